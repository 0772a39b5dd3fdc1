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
