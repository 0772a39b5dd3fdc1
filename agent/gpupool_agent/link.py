"""The stream to an allocator: opened, kept, and opened again.

Hello goes up and Welcome comes down; then reports go up in their order, a heartbeat
where there is nothing else to say, and desired states come down. Allocators are
tried in turn with a growing, jittered delay. A connection whose reports pile up is
dropped, since the next one begins with a snapshot.
"""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import grpc
import grpc.aio
import structlog

from gpupool.model.assignment import DesiredState, DeviceTelemetry, Hello, Report, Welcome
from gpupool.model.limits import MESSAGE_BYTES_MAX
from gpupool.v1 import node_pb2, node_pb2_grpc
from gpupool.wire.assignment import desired_state_from_proto
from gpupool.wire.errors import BadField
from gpupool.wire.node import (
    hello_to_proto,
    report_to_proto,
    telemetry_to_proto,
    welcome_from_proto,
)
from gpupool_agent.devices.interfaces import Dial

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # Many agents of one process (simulation) must not share a connection.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A host that vanished sends no reset: this notices it.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Messages are small: nothing is gained by a ping after each, which measures the way.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.enable_retries", 0),
)
WELCOME_DEADLINE_S = 15.0
RETRY_S_MIN = 0.1
RETRY_S_MAX = 2.0
OUTBOUND_MAX = 1024

Stream = grpc.aio.StreamStreamCall[node_pb2.ConnectRequest, node_pb2.ConnectResponse]


def dial(address: str) -> grpc.aio.Channel:
    """Open a channel of its own to an allocator."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


class LinkUser(Protocol):
    """Whom a link speaks for."""

    def hello(self) -> Hello:
        """How the node introduces itself now."""
        ...

    def heartbeat(self) -> Report:
        """What is said when there is nothing to say."""
        ...

    def welcomed(self, welcome: Welcome) -> None:
        """An allocator answered."""
        ...

    def desired(self, desired: DesiredState) -> None:
        """What the node shall run."""
        ...

    def lost(self) -> None:
        """The stream, once welcomed, is gone."""
        ...


class _LinkClosedError(Exception):
    """This connection is over; the text says why."""


class Link:
    """One agent's connection to whichever allocator serves.

    ``channel`` and ``welcome`` are set while an allocator has welcomed the agent.
    """

    def __init__(self, addresses: Sequence[str], dial: Dial, user: LinkUser) -> None:
        self._addresses = tuple(addresses)
        self._dial = dial
        self._user = user
        self._reports: deque[Report] = deque()
        self._telemetry: tuple[DeviceTelemetry, ...] | None = None
        self._news = asyncio.Event()
        self._closing = ""
        self._random = random.Random()  # noqa: S311 - spreads retries, keeps no secret
        self._log = structlog.get_logger()
        self.channel: grpc.aio.Channel | None = None
        self.welcome: Welcome | None = None

    async def run(self) -> None:
        """Connect, and connect again, until cancelled."""
        failures, told, spread_s = 0, "", 0.0
        while True:
            address = self._addresses[failures % len(self._addresses)]
            why = await self._attempt(address)
            if self.welcome is not None:
                spread_s = self.welcome.reconnect_spread_s
                self.welcome = None
                failures, told = 0, ""
                self._user.lost()
            if why != told:
                self._log.warning("allocator.unreachable", address=address, reason=why)
                told = why
            await asyncio.sleep(self._pause_s(failures, spread_s))
            failures += 1

    def _pause_s(self, failures: int, spread_s: float) -> float:
        """Time to the next attempt.

        All agents of the pool lose their allocator at once, so they spread their first
        attempts, and the later ones while it is away.
        """
        if failures == 0:
            return self._random.uniform(RETRY_S_MIN / 2, RETRY_S_MIN + spread_s)
        bound_s = min(max(RETRY_S_MAX, spread_s), RETRY_S_MIN * 2.0 ** min(failures, 16))
        return self._random.uniform(bound_s / 2, bound_s)

    def send(self, report: Report) -> None:
        """Send a report after those before it; dropped while there is no connection."""
        if self.welcome is None:
            return
        if len(self._reports) >= OUTBOUND_MAX:
            self.close("the allocator does not read its reports")
            return
        self._reports.append(report)
        self._news.set()

    def send_telemetry(self, devices: tuple[DeviceTelemetry, ...]) -> None:
        """Send measurements when there is nothing else; newer ones replace them."""
        if self.welcome is not None:
            self._telemetry = devices
            self._news.set()

    def close(self, reason: str) -> None:
        """End this connection; the next one begins with a snapshot."""
        self._closing = reason
        self._news.set()

    async def _attempt(self, address: str) -> str:
        """Connect and talk; why that ended."""
        try:
            return await self._connect(address)
        except (_LinkClosedError, BadField, OSError) as error:
            return str(error)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"

    async def _connect(self, address: str) -> str:
        self._reports.clear()
        self._telemetry = None
        self._closing = ""
        async with _closed(self._dial(address)) as channel:
            stream: Stream = node_pb2_grpc.NodeServiceStub(channel).Connect()
            try:
                try:
                    async with asyncio.timeout(WELCOME_DEADLINE_S):
                        welcome = await self._introduce(stream)
                except TimeoutError as error:
                    raise _LinkClosedError("no answer to Hello") from error
                self.channel = channel
                self._log.info("allocator.connected", address=address)
                return await self._talk(stream, welcome)
            finally:
                self.channel = None
                stream.cancel()

    async def _introduce(self, stream: Stream) -> Welcome:
        # Nobody may be there: Hello is made for one who listens, and says what is now.
        await stream.wait_for_connection()
        hello = hello_to_proto(self._user.hello())
        await _write(stream, node_pb2.ConnectRequest(hello=hello))
        message = await _read(stream)
        if not message.HasField("welcome"):
            raise _LinkClosedError("the first message was no Welcome")
        welcome = welcome_from_proto(message.welcome)
        self.welcome = welcome
        self._user.welcomed(welcome)
        return welcome

    async def _talk(self, stream: Stream, welcome: Welcome) -> str:
        tasks = [
            asyncio.create_task(self._listen(stream)),
            asyncio.create_task(self._say(stream, welcome.report_interval_s)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task.result() for task in done)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, stream: Stream) -> str:
        while True:
            message = await _read(stream)
            if message.HasField("desired_state"):
                self._user.desired(desired_state_from_proto(message.desired_state))

    async def _say(self, stream: Stream, interval_s: float) -> str:
        while not self._closing:
            if self._reports:
                await _write(stream, _report(self._reports.popleft()))
                continue
            if self._telemetry is not None:
                devices, self._telemetry = self._telemetry, None
                message = telemetry_to_proto(devices)
                await _write(stream, node_pb2.ConnectRequest(telemetry=message))
                continue
            self._news.clear()
            try:
                async with asyncio.timeout(interval_s):
                    await self._news.wait()
            except TimeoutError:
                await _write(stream, _report(self._user.heartbeat()))
        return self._closing


def _report(report: Report) -> node_pb2.ConnectRequest:
    return node_pb2.ConnectRequest(report=report_to_proto(report))


async def _write(stream: Stream, message: node_pb2.ConnectRequest) -> None:
    try:
        await stream.write(message)
    except asyncio.InvalidStateError as error:
        # grpc's answer where the stream has ended meanwhile: nobody is to blame here.
        raise await _ended(stream) from error


async def _read(stream: Stream) -> node_pb2.ConnectResponse:
    message = await stream.read()
    if not isinstance(message, node_pb2.ConnectResponse):
        raise await _ended(stream)
    return message


async def _ended(stream: Stream) -> _LinkClosedError:
    status = await stream.code()
    return _LinkClosedError(f"{status.name}: {await stream.details() or 'the stream ended'}")


@contextlib.asynccontextmanager
async def _closed(channel: grpc.aio.Channel) -> AsyncGenerator[grpc.aio.Channel, None]:
    try:
        yield channel
    finally:
        await channel.close()
