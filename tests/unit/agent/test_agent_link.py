"""The link to an allocator, against a real gRPC server."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from gpupool.v1 import node_pb2, node_pb2_grpc
from gpupool_agent import link


class RefusingAllocator(node_pb2_grpc.NodeServiceServicer):
    """Ends every stream at once."""

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        del request_iterator
        await context.abort(grpc.StatusCode.UNAVAILABLE, "stopping")
        yield node_pb2.ConnectResponse()


class Nobody:
    """Whom a link without an allocator speaks for."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is called without an allocator")


def pauses(failures: int, spread_s: float) -> list[float]:
    """What a thousand agents wait that have lost their allocator at one moment, sorted."""
    agents = (link.Link(["127.0.0.1:1"], link.dial, Nobody()) for _ in range(1000))
    return sorted(agent._pause_s(failures, spread_s) for agent in agents)


def test_agents_that_lost_their_allocator_at_once_spread_their_first_attempts() -> None:
    waits = pauses(0, 5.0)
    # Some at once, so that the pool can grant again; no more at a time than it was told.
    assert waits[20] < 0.5
    assert 4.5 < waits[-1] <= 5.0 + link.RETRY_S_MIN
    busiest = max(sum(start <= each < start + 0.5 for each in waits) for start in waits[::10])
    assert busiest < 200


def test_agents_spread_also_when_the_allocator_stays_away() -> None:
    waits = pauses(30, 60.0)
    assert waits[0] >= 30.0
    assert 55.0 < waits[-1] <= 60.0
    alone = pauses(30, 0.0)
    assert alone[0] >= link.RETRY_S_MAX / 2
    assert alone[-1] <= link.RETRY_S_MAX


def test_an_agent_whose_stream_broke_is_back_at_once_in_a_small_pool() -> None:
    assert pauses(0, 0.002)[-1] < 0.2


async def test_a_report_for_a_stream_that_has_ended_ends_the_connection_with_its_status() -> None:
    server = grpc.aio.server()
    node_pb2_grpc.add_NodeServiceServicer_to_server(RefusingAllocator(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with link.dial(f"127.0.0.1:{port}") as channel:
            stream: link.Stream = node_pb2_grpc.NodeServiceStub(channel).Connect()
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(link._LinkClosedError, match="UNAVAILABLE: stopping"):
                await link._write(stream, node_pb2.ConnectRequest())
    finally:
        await server.stop(None)
