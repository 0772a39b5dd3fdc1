"""The pool: nodes, devices, events, holds and unclaimed assignments."""

import time
from dataclasses import replace
from typing import Any

from grpc import aio

from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.hold import Hold, HoldKind
from gpupool.model.ids import LeaseId, NodeId
from gpupool.model.limits import PAGE_MAX
from gpupool.v1 import pool_pb2 as pb
from gpupool.wire import door
from gpupool.wire.errors import BadField
from gpupool.wire.pool import (
    after_sequence_from_proto,
    event_to_proto,
    hold_ask_from_proto,
    hold_id_from_proto,
    hold_to_proto,
    page_size_from_proto,
)
from gpupool.wire.views import (
    device_view_to_proto,
    node_view_to_proto,
    pool_summary_to_proto,
    unclaimed_to_proto,
)
from gpupool_allocator.core.effects import Done
from gpupool_allocator.core.events import AddHold, EndUnclaimed, RemoveHold
from gpupool_allocator.engine import Engine, RefusedError
from gpupool_allocator.engine.feed import ForgottenError
from gpupool_allocator.engine.ids import new_hold_id
from gpupool_allocator.rpc.callers import ForwardKeys
from gpupool_allocator.rpc.pages import ACCEPTED, page_after, page_token
from gpupool_allocator.rpc.refusals import accepted
from gpupool_allocator.telemetry import TelemetryBook

Context = aio.ServicerContext[Any, Any]


class PoolService:
    """Handlers of gpupool.v1.PoolService."""

    def __init__(self, engine: Engine, keys: ForwardKeys, telemetry: TelemetryBook) -> None:
        self._engine = engine
        self._keys = keys
        self._telemetry = telemetry

    async def get_pool(self, _request: pb.GetPoolRequest, context: Context) -> pb.GetPoolResponse:
        """Sums of the pool."""
        self._keys.sender(context)
        summary = await self._engine.read(lambda pool: pool.summary())
        return pool_summary_to_proto(summary)

    async def list_nodes(
        self, request: pb.ListNodesRequest, context: Context
    ) -> pb.ListNodesResponse:
        """Lists nodes by id."""
        self._keys.sender(context)
        size = page_size_from_proto(request.page_size)
        (after,) = page_after("nodes", (), request.page_token, 1)
        nodes = await self._engine.read(lambda pool: pool.nodes(after=after, limit=size + 1))
        shown = nodes[:size]
        return pb.ListNodesResponse(
            nodes=[node_view_to_proto(node) for node in shown],
            next_page_token=(
                page_token("nodes", (), [shown[-1].node_id]) if len(nodes) > size else ""
            ),
        )

    async def list_devices(
        self, request: pb.ListDevicesRequest, context: Context
    ) -> pb.ListDevicesResponse:
        """Lists devices by node and UUID."""
        self._keys.sender(context)
        size = page_size_from_proto(request.page_size)
        node_id = door.node_id("", "node_id", request.node_id) if request.node_id else ""
        node, uuid = page_after("devices", (node_id,), request.page_token, 2)
        devices = await self._engine.read(
            lambda pool: pool.devices(after=(node, uuid), limit=size + 1, node_id=node_id)
        )
        shown = devices[:size]
        token = ""
        if len(devices) > size:
            last = shown[-1]
            token = page_token("devices", (node_id,), [last.node_id, last.device.uuid])
        return pb.ListDevicesResponse(
            devices=[
                device_view_to_proto(
                    replace(
                        device, telemetry=self._telemetry.of(device.node_id, device.device.uuid)
                    )
                )
                for device in shown
            ],
            next_page_token=token,
        )

    async def list_events(
        self, request: pb.ListEventsRequest, context: Context
    ) -> pb.ListEventsResponse:
        """Lists events after a sequence number."""
        self._keys.sender(context)
        size = page_size_from_proto(request.page_size)
        after = after_sequence_from_proto(request.after_sequence)
        subject = door.text("", "subject", request.subject)
        feed = self._engine.feed
        events = await feed.page(after, size, subject)
        oldest, newest = await feed.bounds()
        return pb.ListEventsResponse(
            events=[event_to_proto(event) for event in events],
            last_sequence=newest,
            oldest_sequence=oldest,
        )

    async def watch_events(self, request: pb.WatchEventsRequest, context: Context) -> None:
        """Streams events, those after a sequence number first."""
        self._keys.sender(context)
        after = after_sequence_from_proto(request.after_sequence, least=-1)
        feed = self._engine.feed
        if after == -1:
            after = feed.newest
        elif after == 0:
            # "From the oldest kept": then nothing is missed by starting there.
            after = max((await feed.bounds())[0] - 1, 0)
        try:
            while True:
                events = await feed.next_page(after, PAGE_MAX)
                await context.write(
                    pb.WatchEventsResponse(events=[event_to_proto(event) for event in events])
                )
                after = events[-1].sequence
        except ForgottenError as error:
            raise RefusedError(
                Refused(
                    kind=ErrorKind.WRONG_STATE,
                    message=f"after_sequence: {error}; list again from there",
                    field="after_sequence",
                )
            ) from error

    async def create_hold(
        self, request: pb.CreateHoldRequest, context: Context
    ) -> pb.CreateHoldResponse:
        """Adds an operator's hold."""
        ask = hold_ask_from_proto(request)
        command = AddHold(
            command=self._engine.ids.command(),
            caller=self._keys.sender(context).caller,
            hold_id=new_hold_id(),
            request_id=ask.request_id,
            kind=HoldKind.OPERATOR,
            scope=ask.scope,
            target=ask.target,
            reason=ask.reason,
            allowed_tenants=ask.allowed_tenants,
            expire_unix_s=ask.expire_unix_s,
            unix_s=time.time(),
        )
        hold = accepted(await self._engine.ask(command), Hold)
        return pb.CreateHoldResponse(hold=hold_to_proto(hold))

    async def list_holds(
        self, request: pb.ListHoldsRequest, context: Context
    ) -> pb.ListHoldsResponse:
        """Lists holds by id."""
        self._keys.sender(context)
        size = page_size_from_proto(request.page_size)
        (after,) = page_after("holds", (), request.page_token, 1)
        holds = await self._engine.read(lambda pool: pool.holds(after=after, limit=size + 1))
        shown = holds[:size]
        return pb.ListHoldsResponse(
            holds=[hold_to_proto(hold) for hold in shown],
            next_page_token=(
                page_token("holds", (), [shown[-1].hold_id]) if len(holds) > size else ""
            ),
        )

    async def delete_hold(
        self, request: pb.DeleteHoldRequest, context: Context
    ) -> pb.DeleteHoldResponse:
        """Removes an operator's hold."""
        command = RemoveHold(
            command=self._engine.ids.command(),
            caller=self._keys.sender(context).caller,
            hold_id=hold_id_from_proto(request.hold_id),
            unix_s=time.time(),
        )
        accepted(await self._engine.ask(command), Done)
        return pb.DeleteHoldResponse()

    async def list_unclaimed(
        self, request: pb.ListUnclaimedRequest, context: Context
    ) -> pb.ListUnclaimedResponse:
        """Lists unclaimed assignments by node, lease and rank."""
        self._keys.sender(context)
        size = page_size_from_proto(request.page_size)
        after = _after_unclaimed(request.page_token)
        found = await self._engine.read(lambda pool: pool.unclaimed(after=after, limit=size + 1))
        shown = found[:size]
        token = ""
        if len(found) > size:
            last = shown[-1]
            token = page_token("unclaimed", (), [last.node_id, last.lease_id, str(last.rank)])
        return pb.ListUnclaimedResponse(
            assignments=[unclaimed_to_proto(each) for each in shown], next_page_token=token
        )

    async def end_unclaimed(
        self, request: pb.EndUnclaimedRequest, context: Context
    ) -> pb.EndUnclaimedResponse:
        """Ends the unclaimed assignments of a lease on a node."""
        command = EndUnclaimed(
            command=self._engine.ids.command(),
            caller=self._keys.sender(context).caller,
            node_id=NodeId(door.node_id("", "node_id", request.node_id)),
            lease_id=LeaseId(door.identifier("", "lease_id", request.lease_id)),
            unix_s=time.time(),
        )
        accepted(await self._engine.ask(command), Done)
        return pb.EndUnclaimedResponse()


def _after_unclaimed(token: str) -> tuple[str, str, int]:
    node, lease, rank = page_after("unclaimed", (), token, 3)
    try:
        return node, lease, int(rank or -1)
    except ValueError as error:
        raise BadField("page_token", token, ACCEPTED) from error
