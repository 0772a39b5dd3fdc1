"""The network between one simulated node and an allocator, so that it can be cut.

A small TCP proxy on loopback. While it is cut, connections through it are reset
and new ones are reset as soon as they come.
"""

import asyncio
import socket
from typing import Any, Self, cast

HOST = "127.0.0.1"


class GateAddressError(ValueError):
    """An allocator's address that is not host:port."""


class Gate:
    """A way to ``target`` (host:port). ``address`` is this side of it."""

    def __init__(self, target: str) -> None:
        self._target = _split(target)
        self._socket = socket.create_server((HOST, 0))
        self._server: asyncio.Server | None = None
        self._sides: set[_Side] = set()
        self._cut = False

    @classmethod
    async def open(cls, target: str) -> Self:
        """Listen on a free port. Raises GateAddressError when target is not host:port."""
        gate = cls(target)
        host, port = gate._target
        gate._server = await asyncio.get_running_loop().create_server(
            lambda: _Near(gate, host, port), sock=gate._socket
        )
        return gate

    @property
    def address(self) -> str:
        """Where the agent connects to."""
        return f"{HOST}:{self._socket.getsockname()[1]}"

    @property
    def is_cut(self) -> bool:
        """Whether it lets nothing through."""
        return self._cut

    def cut(self) -> None:
        """Reset every connection, and every new one, until ``mend``."""
        self._cut = True
        for side in tuple(self._sides):
            side.reset()

    def mend(self) -> None:
        """Let connections through again."""
        self._cut = False

    async def close(self) -> None:
        """Reset every connection and listen no more."""
        self.cut()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def enter(self, side: "_Side") -> None:
        """Count a connection's end; it is reset at once while the gate is cut."""
        self._sides.add(side)
        if self._cut:
            side.reset()

    def leave(self, side: "_Side") -> None:
        """Forget a connection's end."""
        self._sides.discard(side)


class _Side(asyncio.Protocol):
    """One end of a proxied connection; what it reads goes to ``other``."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.gate.enter(self)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        # This end's peer is slow: stop reading from the other end, or data piles up here.
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.gate.leave(self)
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def reset(self) -> None:
        """End the connection without a good-bye."""
        if self.transport is not None:
            self.transport.abort()


class _Near(_Side):
    """The agent's end: reads nothing until the allocator's end is there."""

    def __init__(self, gate: Gate, host: str, port: int) -> None:
        super().__init__(gate)
        self._host = host
        self._port = port
        self._connecting: asyncio.Task[Any] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.transport is not None and not self.gate.is_cut:
            self.transport.pause_reading()
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        far = _Side(self.gate)
        far.other = self
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: far, self._host, self._port)
        except OSError:
            # Nobody listens there: the agent sees what it would see without a gate.
            self.reset()
            return
        self.other = far
        if self.transport is not None:
            if self.transport.is_closing():
                far.reset()
            else:
                self.transport.resume_reading()


def _split(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise GateAddressError(
            f"allocator address {target!r} is not host:port with a port of 1 to 65535"
        )
    return host.strip("[]"), int(port)
