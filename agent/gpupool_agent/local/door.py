"""The front door: a Unix socket that takes down who calls before gRPC sees the call.

gRPC for Python tells a server nothing about its peer's credentials. So this server
accepts the connections itself, reads pid and uid from the kernel (SO_PEERCRED), and
passes the bytes on to an inner gRPC server on a socket in a private directory. Each
inner connection is bound to a path of its own first: gRPC reports that path as the
call's peer, and so a call leads back to its connection.
"""

import asyncio
import fcntl
import os
import secrets
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import structlog

from gpupool.model.limits import MESSAGE_BYTES_MAX
from gpupool.v1.agent_pb2_grpc import add_AgentServiceServicer_to_server
from gpupool_agent.local.adopting import Adopter, AgentService
from gpupool_agent.local.forward import Forwarder, Peer, Uplink
from gpupool_agent.local.places import Places, Seldom

CREDENTIALS = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""

CHUNK_BYTES = 65536
GRACE_S = 1.0
REFUSED_LOG_S = 60.0
"""A user who is refused is named in the log once in so long."""
SERVER_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_concurrent_streams", 256),
)


class DoorTakenError(Exception):
    """Another agent serves this socket."""


class LocalDoor:
    """The socket at ``path`` for clients on this node, while started."""

    def __init__(
        self,
        path: Path,
        *,
        node_id: str,
        link: Uplink,
        connections_max: int,
        start_ticks: Callable[[int], int | None],
        adopter: Adopter,
    ) -> None:
        self.path = path
        self._places = Places(connections_max)
        self._refused = Seldom(REFUSED_LOG_S)
        self._start_ticks = start_ticks
        self._peers: dict[str, Peer] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._forwarder = Forwarder(node_id, link, self._peers.get)
        self._service = AgentService(adopter, self._peers.get)
        self._inner: grpc.aio.Server | None = None
        self._outer: asyncio.Server | None = None
        self._private: Path | None = None
        self._lock = -1
        self._log = structlog.get_logger().bind(node_id=node_id)

    @property
    def connections(self) -> int:
        """Clients connected now."""
        return len(self._connections)

    async def start(self) -> None:
        """Serve; raises DoorTakenError, and OSError where the path cannot be used."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        self._take_lock()
        # In the system's own place for it: the path of a Unix socket is short.
        self._private = Path(tempfile.mkdtemp(prefix="gpupool-"))
        inner = self._private / "inner"
        self._inner = grpc.aio.server(options=SERVER_OPTIONS)
        self._inner.add_generic_rpc_handlers((self._forwarder,))
        add_AgentServiceServicer_to_server(self._service, self._inner)
        self._inner.add_insecure_port(f"unix:{inner}")
        await self._inner.start()
        self.path.unlink(missing_ok=True)
        self._outer = await asyncio.start_unix_server(self._accept, self.path)
        self.path.chmod(0o666)

    async def stop(self) -> None:
        """Stop serving; calls under way are cut."""
        if self._outer is not None:
            self._outer.close()
            self.path.unlink(missing_ok=True)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._inner is not None:
            await self._inner.stop(GRACE_S)
            # Gone while its loop still runs, which its destructor wants.
            self._inner = None
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> None:
        """Two servers on one socket path would not notice one another."""
        lock_path = self.path.with_name(f"{self.path.name}.lock")
        self._lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            self._lock = -1
            raise DoorTakenError(f"{self.path} is served by another agent") from error

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            pid, uid = _credentials(writer)
            if not self._places.take(uid):
                self._tell_refused(uid)
                return
            try:
                await self._serve_process(pid, uid, reader, writer)
            finally:
                self._places.give_back(uid)
        except OSError as error:
            self._log.info("local.connection_lost", reason=str(error))
        finally:
            writer.close()

    def _tell_refused(self, uid: int) -> None:
        if self._refused.due(uid, time.monotonic()):
            self._log.warning(
                "local.refused",
                uid=uid,
                connections=self.connections,
                connections_of_uid=self._places.of(uid),
            )

    async def _serve_process(
        self, pid: int, uid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve who connected, unless that process is already gone."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - callbacks of asyncio servers run in tasks
        self._connections.add(task)
        try:
            ticks = self._start_ticks(pid)
            if ticks is not None:
                await self._serve(Peer(pid=pid, uid=uid, start_ticks=ticks), reader, writer)
        finally:
            self._connections.discard(task)

    async def _serve(
        self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        assert self._private is not None  # noqa: S101 - set before the door opens
        own = self._private / secrets.token_hex(8)
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"unix:{own}"
        try:
            client.setblocking(False)
            client.bind(str(own))
            await asyncio.get_running_loop().sock_connect(client, str(self._private / "inner"))
            self._peers[name] = peer
            inner_reader, inner_writer = await asyncio.open_unix_connection(sock=client)
            try:
                await _exchange((reader, inner_writer), (inner_reader, writer))
            finally:
                inner_writer.close()
        finally:
            self._peers.pop(name, None)
            client.close()
            own.unlink(missing_ok=True)


def _credentials(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """The pid and uid at the other end, as the kernel took them down when it connected."""
    opened: socket.socket = writer.get_extra_info("socket")
    raw = opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(raw)
    return pid, uid


async def _exchange(
    *ways: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Copy both ways until one side closes."""
    tasks = [asyncio.create_task(_copy(reader, writer)) for reader, writer in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
