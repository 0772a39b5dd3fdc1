"""A message between agent and allocator causes no traffic but itself.

With thousands of agents, what each small message brings with it is what they cost.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tests.agent_allocator import RunningAgent, TinyAllocator, until
from tests.integration.allocator_daemon import Daemon, PlayedAgent

from gpupool.model.assignment import Report
from gpupool.v1 import node_pb2, node_pb2_grpc, pool_pb2
from gpupool.wire.node import report_to_proto
from gpupool_agent.link import dial

MESSAGES = 20
PAUSE_S = 0.1
"""Between messages: gRPC, where it answers them, does not answer each of a quick row."""


class Tap:
    """A way to a port of this host; counts what comes through, up to it and down from it."""

    def __init__(self, target_port: int) -> None:
        self.up = self.down = 0
        self.port = 0
        self._target_port = target_port

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[str]:
        """Listen inside the block; gives the address."""
        server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        async with server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _join(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, on = await asyncio.open_connection("127.0.0.1", self._target_port)
        await asyncio.gather(self._pass(near, on, up=True), self._pass(far, back, up=False))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                self.up += len(data) * up
                self.down += len(data) * (not up)
                writer.write(data)
        writer.close()


def accepted(running: RunningAgent) -> int:
    return running.agent.node.heartbeat().accepted_revision


# One event loop for all: gRPC is bound to the first that it sees.
@pytest.mark.asyncio(loop_scope="session")
async def test_the_allocator_answers_reports_with_nothing(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path).start()
    tap = Tap(daemon.grpc)
    try:
        async with daemon.connected() as calls, tap.open() as address, dial(address) as channel:
            stream = node_pb2_grpc.NodeServiceStub(channel).Connect()
            await stream.write(node_pb2.ConnectRequest(hello=PlayedAgent("n1").hello()))
            for _ in ("welcome", "desired state"):
                assert isinstance(await stream.read(), node_pb2.ConnectResponse)
            before = 0
            for _ in range(MESSAGES):
                message = node_pb2.ConnectRequest(report=report_to_proto(Report()))
                await stream.write(message)
                # Answered after the report was taken, on another connection.
                await calls.pool.GetPool(pool_pb2.GetPoolRequest())
                before = before or tap.down
                await asyncio.sleep(PAUSE_S)
            assert tap.down == before
            stream.cancel()
    finally:
        daemon.end()


@pytest.mark.asyncio(loop_scope="session")
async def test_the_agent_answers_desired_states_with_nothing(tmp_path: Path) -> None:
    allocator = TinyAllocator(report_interval_s=600.0)
    await allocator.start()
    tap = Tap(allocator.port)
    periods = dict.fromkeys(("usage_period_s", "inventory_period_s", "telemetry_period_s"), 600.0)
    async with tap.open() as address:
        running = RunningAgent(tmp_path, address, **periods)
        await until(lambda: allocator.devices, "the first report")
        before = 0
        for revision in range(1, MESSAGES + 1):
            await allocator.want()
            await until(lambda: accepted(running) == revision, "the desired state")  # noqa: B023
            before = before or tap.up
            await asyncio.sleep(PAUSE_S)
        assert tap.up == before
        await running.stop()
    await allocator.stop()
