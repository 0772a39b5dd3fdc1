"""The helper's socket: who may ask, what is asked, and a line for each of it.

One message is one request. A bad one is refused and the connection goes on; nothing that a
peer sends ends the helper.
"""

import asyncio
import contextlib
import fcntl
import grp
import hashlib
import os
import pwd
import socket
import struct
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from gpupool_agent.helper.actions import Actions
from gpupool_agent.helper.checks import EndProcess, read_action
from gpupool_agent.helper.files import make_directory
from gpupool_agent.helper.messages import (
    MESSAGE_BYTES_MAX,
    BadMessageError,
    decode,
    encode,
    message_id,
)
from gpupool_agent.helper.processes import seen
from gpupool_agent.helper.refusal import FailedError, RefusedError, shown
from gpupool_agent.helper.settings import HelperSettings
from gpupool_agent.settings import SettingsError

IN_FLIGHT_MAX = 32
"""Requests of one connection that are under way; more of them wait in the kernel."""

SHOWN_CHARS_MAX = 200
STOP_S = 5.0


class SocketTakenError(Exception):
    """Another helper serves on the socket; the text names it."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is on the other end, as the kernel saw it connect."""

    pid: int
    uid: int


class HelperServer:
    """Serves on the socket of the settings; SettingsError for users that do not exist."""

    def __init__(self, settings: HelperSettings, actions: Actions) -> None:
        self._settings = settings
        self._actions = actions
        self._policy = settings.policy()
        self._users = {0, user_id(settings.agent_user)}
        self._group = group_id(settings.socket_group) if settings.socket_group else -1
        self._log = structlog.get_logger("helper")
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = 0
        self._requests = 0

    async def serve(self, serving: asyncio.Event) -> None:
        """Serve until cancelled; SocketTakenError, OSError."""
        with _listening(self._settings.socket, self._group) as listener:
            # Whoever asks meanwhile waits: nothing half done is taken for done.
            try:
                await self._actions.sweep()
            except FailedError as error:
                self._log.error("helper.not_swept", reason=str(error))
            serving.set()
            try:
                while True:
                    channel, _ = await asyncio.get_running_loop().sock_accept(listener)
                    self._accept(channel)
            finally:
                await self._end()

    def _accept(self, channel: socket.socket) -> None:
        peer = _peer(channel)
        why = ""
        if peer.uid not in self._users:
            why = "only the agent's user and root are answered"
        elif self._connections >= self._settings.connections_max:
            why = f"there are {self._settings.connections_max} connections"
        if why:
            self._log.warning(
                "helper.connection_refused", peer_uid=peer.uid, peer_pid=peer.pid, reason=why
            )
            channel.close()
            return
        self._connections += 1
        self._spawn(self._converse(channel, peer))

    async def _converse(self, channel: socket.socket, peer: Peer) -> None:
        loop = asyncio.get_running_loop()
        in_flight = asyncio.Semaphore(IN_FLIGHT_MAX)
        writing = asyncio.Lock()
        running: set[asyncio.Task[None]] = set()
        try:
            channel.setblocking(False)
            while True:
                await in_flight.acquire()
                data = b""
                with contextlib.suppress(ConnectionError):  # a peer that broke off has gone too
                    data = await loop.sock_recv(channel, MESSAGE_BYTES_MAX + 1)
                if not data:
                    break
                task = self._spawn(self._answer(channel, writing, peer, data))
                task.add_done_callback(lambda _: in_flight.release())
                running.add(task)
                task.add_done_callback(running.discard)
            # What was asked is carried out, also for a peer that has gone.
            await asyncio.gather(*running)
        finally:
            self._connections -= 1
            channel.close()

    async def _answer(
        self, channel: socket.socket, writing: asyncio.Lock, peer: Peer, data: bytes
    ) -> None:
        try:
            message = decode(data)
        except BadMessageError as error:
            reply = self._refuse_unread(peer, data, str(error))
        else:
            reply = {"id": message_id(message), **await self._carry_out(peer, message)}
        try:
            answer = encode(reply)
        except BadMessageError as error:
            answer = encode({"id": reply["id"], "failed": f"its answer is too long: {error}"})
        # Two senders on one channel would take each other's place in the loop.
        async with writing:
            with contextlib.suppress(ConnectionError, BrokenPipeError):
                await asyncio.get_running_loop().sock_sendall(channel, answer)

    def _refuse_unread(self, peer: Peer, data: bytes, reason: str) -> dict[str, Any]:
        self._audit(peer, "unreadable", {"bytes": len(data)}, {"refused": reason}, 0.0)
        return {"id": 0, "refused": reason}

    async def _carry_out(self, peer: Peer, message: dict[str, Any]) -> dict[str, Any]:
        """Check, do, and write down what became of it."""
        began_s = time.monotonic()
        outcome: dict[str, Any] = {"failed": "it was cut short"}
        target = None
        try:
            with self._one_more():
                action = read_action(message, self._policy)
                if isinstance(action, EndProcess):
                    target = seen(action.pid, action.start_ticks)
                outcome = {"done": await self._actions.perform(action)}
        except RefusedError as error:
            outcome = {"refused": str(error)}
        except FailedError as error:
            outcome = {"failed": str(error)}
        except Exception as error:
            self._log.exception("helper.wrong", action=shown(message.get("action")))
            outcome = {"failed": f"the helper is wrong: {type(error).__name__}"}
        finally:
            arguments = {key: each for key, each in message.items() if key not in ("id", "action")}
            took_s = time.monotonic() - began_s
            self._audit(peer, message.get("action"), arguments, outcome, took_s, target)
        return outcome

    @contextlib.contextmanager
    def _one_more(self) -> Generator[None]:
        if self._requests >= self._settings.requests_max:
            raise RefusedError(f"{self._settings.requests_max} actions are under way")
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    def _audit(
        self,
        peer: Peer,
        action: object,
        arguments: Mapping[str, Any],
        outcome: Mapping[str, Any],
        took_s: float,
        target: Mapping[str, Any] | None = None,
    ) -> None:
        verdict = next(iter(outcome))
        say = self._log.info if verdict == "done" else self._log.warning
        more = {} if verdict == "done" else {"reason": str(outcome[verdict])[:500]}
        # Of a process to be ended: whose it was, since afterwards nobody can look.
        named = {} if target is None else {"process": dict(target)}
        say(
            "helper.action",
            peer_uid=peer.uid,
            peer_pid=peer.pid,
            action=action if isinstance(action, str) and len(action) < 32 else shown(action),
            arguments={
                _bounded(key): _audited(key, each) for key, each in list(arguments.items())[:16]
            },
            outcome=verdict,
            took_ms=round(took_s * 1000, 1),
            **named,
            **more,
        )

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end(self) -> None:
        """Give what is under way a moment; a daemon that was half started is taken back."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)


def user_id(name: str) -> int:
    """A user by name or number; SettingsError."""
    if name.isascii() and name.isdecimal():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError as error:
        raise SettingsError(f"agent_user: the host knows no user {name!r}") from error


def group_id(name: str) -> int:
    """A group by name or number; SettingsError."""
    if name.isascii() and name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise SettingsError(f"socket_group: the host knows no group {name!r}") from error


@contextlib.contextmanager
def _listening(path: Path, group: int) -> Generator[socket.socket]:
    """The socket, for its owner and group alone; locked, so that no second helper takes it."""
    make_directory(path.parent, 0o755)
    lock = os.open(
        path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SocketTakenError(f"another helper serves on {path}") from error
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        with listener:
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            os.chown(path, -1, group)
            path.chmod(0o660)
            listener.listen()
            listener.setblocking(False)
            try:
                yield listener
            finally:
                path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _peer(channel: socket.socket) -> Peer:
    layout = struct.Struct("3i")
    told = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    pid, uid, _ = layout.unpack(told)
    return Peer(pid=pid, uid=uid)


def _audited(key: str, value: Any) -> Any:
    """An argument for the log: bounded; of a spec, what tells it from another one."""
    if key == "spec" and isinstance(value, str):
        data = value.encode("utf-8", "replace")
        return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if isinstance(value, int | float | bool) or value is None:
        return value if abs(value or 0) < 2**64 else shown(value)
    return value if isinstance(value, str) and len(value) <= SHOWN_CHARS_MAX else _bounded(value)


def _bounded(value: object) -> str:
    text = value if isinstance(value, str) else ascii(value)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}..."
