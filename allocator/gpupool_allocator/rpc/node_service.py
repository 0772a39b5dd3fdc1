"""The stream between a node's agent and the allocator."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import structlog
from grpc import aio

from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.ids import NodeId
from gpupool.v1 import node_pb2 as pb
from gpupool.wire.errors import BadField
from gpupool.wire.node import hello_from_proto, report_from_proto, telemetry_from_proto
from gpupool_allocator.core.events import (
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    NodeSpoke,
)
from gpupool_allocator.engine import Engine, RefusedError
from gpupool_allocator.engine.ids import new_forward_key
from gpupool_allocator.rpc.agents import AgentStream, AgentStreams
from gpupool_allocator.rpc.callers import ForwardKeys
from gpupool_allocator.rpc.refusals import bad_input
from gpupool_allocator.rpc.sizes import check_inventory_size
from gpupool_allocator.storage.store import EPOCH_MAX
from gpupool_allocator.telemetry import TelemetryBook

Context = aio.ServicerContext[Any, Any]

HELLO_S = 10.0
"""Longest time from the opening of a stream to its Hello."""

HELLOS_AT_ONCE = 16
"""Agents whose Hello is taken in at one time. After a restart a whole pool says hello at
once; those that are in must not wait with their reports until the last one is."""

log = structlog.stdlib.get_logger("agents")


class NodeService:
    """Handlers of gpupool.v1.NodeService."""

    def __init__(
        self,
        engine: Engine,
        keys: ForwardKeys,
        streams: AgentStreams,
        telemetry: TelemetryBook,
    ) -> None:
        self._engine = engine
        self._keys = keys
        self._streams = streams
        self._telemetry = telemetry
        self._hello_turn = asyncio.Semaphore(HELLOS_AT_ONCE)

    async def connect(self, requests: AsyncIterator[pb.ConnectRequest], context: Context) -> None:
        """Hello, then reports up and desired states down, until either side ends it."""
        message = await _first(requests)
        async with self._hello_turn:
            stream = await self._enter(message)
        log.info("agent.connected", node=stream.node_id, peer=context.peer())
        reading = asyncio.create_task(self._read(requests, stream))
        try:
            await stream.write(context)
        finally:
            reading.cancel()
            self._forget(stream)

    async def _enter(self, message: pb.Hello) -> AgentStream:
        """Takes in a Hello; returns once that is durable."""
        hello = hello_from_proto(message)
        check_inventory_size(hello.inventory, message.inventory.ByteSize(), "hello.inventory")
        if hello.highest_epoch > EPOCH_MAX:
            raise BadField("hello.highest_epoch", hello.highest_epoch, f"0..{EPOCH_MAX}")
        stream = AgentStream(NodeId(hello.node_id), new_forward_key(), self._keys)
        self._streams.add(stream)
        stream.connection = self._engine.open_connection(stream)
        connected = NodeConnected(
            connection=stream.connection,
            hello=hello,
            forward_key=stream.forward_key,
            unix_s=time.time(),
        )
        try:
            await self._engine.tell(connected)
        except asyncio.CancelledError:
            # The agent went away before it was welcome; nobody else knows of the stream.
            self._forget(stream)
            raise
        return stream

    def _forget(self, stream: AgentStream) -> None:
        reason = stream.end_reason or "the connection broke"
        self._streams.remove(stream)
        if self._keys.remove(stream.node_id, stream.connection):
            self._telemetry.forget(stream.node_id)
        self._engine.close_connection(stream.connection)
        self._engine.notify(
            NodeDisconnected(
                connection=stream.connection,
                node_id=stream.node_id,
                reason=reason,
                unix_s=time.time(),
            )
        )
        log.info("agent.gone", node=stream.node_id, reason=reason)

    async def _read(self, requests: AsyncIterator[pb.ConnectRequest], stream: AgentStream) -> None:
        try:
            async for request in requests:
                # Taking it may wait for the disk: that is not the agent's silence.
                stream.heard_at = math.inf
                await self._take(request, stream)
                stream.heard_at = time.monotonic()
        except RefusedError as error:
            stream.close(error.refused)
        except BadField as error:
            stream.close(bad_input(error))
        except Exception:
            log.exception("agent.failed", node=stream.node_id)
            stream.close(Refused(kind=ErrorKind.INTERNAL, message="internal error, see the log"))
        else:
            stream.end("the agent closed the stream")

    async def _take(self, request: pb.ConnectRequest, stream: AgentStream) -> None:
        match request.WhichOneof("message"):
            case "report":
                report = report_from_proto(request.report)
                if report.inventory is not None:
                    size = request.report.inventory.ByteSize()
                    check_inventory_size(report.inventory, size, "report.inventory")
                # One report of a node at a time: a fast agent waits, not our memory.
                await self._engine.tell(
                    NodeReported(
                        connection=stream.connection,
                        node_id=stream.node_id,
                        report=report,
                        unix_s=time.time(),
                    )
                )
            case "telemetry":
                measurements = telemetry_from_proto(request.telemetry)
                if self._keys.proves(stream.node_id, stream.forward_key):
                    self._telemetry.put(stream.node_id, measurements)
                await self._engine.tell(
                    NodeSpoke(
                        connection=stream.connection, node_id=stream.node_id, unix_s=time.time()
                    )
                )
            case found:
                raise BadField("message", found or "nothing", "report, telemetry after hello")


async def _first(requests: AsyncIterator[pb.ConnectRequest]) -> pb.Hello:
    try:
        async with asyncio.timeout(HELLO_S):
            request = await anext(requests, None)
    except TimeoutError as error:
        raise RefusedError(
            Refused(kind=ErrorKind.TIMEOUT, message=f"no hello within {HELLO_S:g} s")
        ) from error
    if request is None or not request.HasField("hello"):
        found = "nothing" if request is None else request.WhichOneof("message") or "nothing"
        raise BadField("message", found, "hello first")
    return request.hello
