"""A pool of a few GPUs on one node that speaks the real protocol, for tests of the client.

It grants whole GPUs in order of arrival, and can be told to misbehave.
"""

# ruff: noqa: N802, ARG002 - the protocol names the methods and their arguments

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from gpupool.model.caller import Caller, ProcessRef
from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.event import Event
from gpupool.model.hold import Hold, HoldKind
from gpupool.model.ids import DeviceUuid, HoldId, LeaseId, NodeId
from gpupool.model.inventory import Device, NodeInventory
from gpupool.model.lease import (
    ENDED,
    Cause,
    DeviceShare,
    Explanation,
    Lease,
    LeaseState,
    Member,
    MemberState,
    Place,
)
from gpupool.model.request import LeaseSpec, WholeGpus
from gpupool.model.views import (
    DeviceState,
    DeviceView,
    DryRunResult,
    NodeState,
    NodeVerdict,
    NodeView,
    PoolSummary,
    UnclaimedAssignment,
)
from gpupool.v1 import lease_pb2, lease_pb2_grpc, pool_pb2, pool_pb2_grpc
from gpupool.wire.errors import BadField
from gpupool.wire.lease import acquire_ask_from_proto, refusal_to_proto
from gpupool.wire.pool import event_to_proto, hold_ask_from_proto, hold_to_proto
from gpupool.wire.request import lease_spec_from_proto
from gpupool.wire.resources import lease_to_proto
from gpupool.wire.views import (
    device_view_to_proto,
    dry_run_result_to_proto,
    node_view_to_proto,
    pool_summary_to_proto,
    unclaimed_to_proto,
)

NODE = NodeId("node-1")
NO_ROOM = Explanation(
    summary="no GPU is free",
    causes=(Cause(code="gpu_busy", count=1, unit="device", message="granted to others"),),
    nearest_change="wait for one GPU",
)
Context = aio.ServicerContext[Any, Any]


@dataclass
class SmallPool(lease_pb2_grpc.LeaseServiceServicer, pool_pb2_grpc.PoolServiceServicer):
    """State, and knobs: ``cut_acquires`` streams end after their first answer or before it."""

    gpus: int = 2
    page: int = 2
    leases: dict[LeaseId, Lease] = field(default_factory=dict[LeaseId, Lease])
    renewals: dict[str, int] = field(default_factory=dict[str, int])
    acquires: list[str] = field(default_factory=list[str])
    holds: dict[HoldId, Hold] = field(default_factory=dict[HoldId, Hold])
    unclaimed: list[UnclaimedAssignment] = field(default_factory=list[UnclaimedAssignment])
    events: list[Event] = field(default_factory=list[Event])
    silent: bool = False
    cut_acquires: int = 0
    refuse_releases: int = 0
    address: str = ""

    def __post_init__(self) -> None:
        self.changed = asyncio.Condition()
        self.server: aio.Server | None = None

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self.server = aio.server(options=(("grpc.so_reuseport", 0),))
        lease_pb2_grpc.add_LeaseServiceServicer_to_server(self, self.server)
        pool_pb2_grpc.add_PoolServiceServicer_to_server(self, self.server)
        port = self.server.add_insecure_port(address)
        self.address = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(None)
            self.server = None

    async def set(self, lease: Lease) -> None:
        async with self.changed:
            self.leases[lease.lease_id] = lease
            self.note(f"lease.{lease.state}", lease.lease_id)
            for waiting in list(self.leases.values()):
                if waiting.state is LeaseState.PENDING and self._free() >= gpus_of(waiting.spec):
                    self.leases[waiting.lease_id] = granted(waiting)
                    self.note("lease.active", waiting.lease_id)
            self.changed.notify_all()

    def note(self, kind: str, subject: str) -> None:
        self.events.append(
            Event(
                sequence=len(self.events) + 1,
                unix_s=1_800_000_000.0,
                kind=kind,
                subject=subject,
                cause="test",
            )
        )

    async def until(self, test: Any) -> None:
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(test)

    def state_of(self, lease_id: str) -> LeaseState:
        return self.leases[LeaseId(lease_id)].state

    def _free(self) -> int:
        held = (LeaseState.GRANTED, LeaseState.ACTIVE)
        return self.gpus - sum(gpus_of(x.spec) for x in self.leases.values() if x.state in held)

    async def Acquire(
        self, request: lease_pb2.AcquireRequest, context: Context
    ) -> AsyncIterator[lease_pb2.AcquireResponse]:
        try:
            ask = acquire_ask_from_proto(request)
        except BadField as bad:
            await refuse(
                context, Refused(kind=ErrorKind.INVALID, message=str(bad), field=bad.field)
            )
            return
        async with self.changed:
            self.acquires.append(ask.request_id)
            self.changed.notify_all()
        known = [x for x in self.leases.values() if x.request_id == ask.request_id]
        if not known:
            lease = pending(
                LeaseId(f"lease-{len(self.leases) + 1}"), ask.request_id, ask.spec, ask.ttl_s
            )
            if ask.caller_process:
                process = ProcessRef(node_id=NODE, pid=1, start_ticks=1)
                lease = replace(lease, ttl_s=None, process=process)
            if ask.wait_s == 0 and self._free() < gpus_of(ask.spec):
                await refuse(
                    context,
                    Refused(
                        kind=ErrorKind.NO_CAPACITY, message="no GPU is free", explanation=NO_ROOM
                    ),
                )
                return
            await self.set(lease)
            known = [lease]
        if self.silent:
            await asyncio.Event().wait()
        async for lease in self._states(known[0].lease_id):
            if self.cut_acquires > 0:
                self.cut_acquires -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            yield lease_pb2.AcquireResponse(lease=lease_to_proto(lease))
            if lease.state is LeaseState.ACTIVE or lease.state in ENDED:
                return

    async def WatchLease(
        self, request: lease_pb2.WatchLeaseRequest, context: Context
    ) -> AsyncIterator[lease_pb2.WatchLeaseResponse]:
        async for lease in self._states(LeaseId(request.lease_id)):
            yield lease_pb2.WatchLeaseResponse(lease=lease_to_proto(lease))
            if lease.state in ENDED:
                return

    async def _states(self, lease_id: LeaseId) -> AsyncIterator[Lease]:
        last: Lease | None = None
        while True:
            async with self.changed:
                while self.leases[lease_id] == last:
                    await self.changed.wait()
                last = self.leases[lease_id]
            yield last

    async def KeepAlive(
        self, request: lease_pb2.KeepAliveRequest, context: Context
    ) -> lease_pb2.KeepAliveResponse:
        gone: list[str] = []
        async with self.changed:
            for lease_id in request.lease_ids:
                lease = self.leases.get(LeaseId(lease_id))
                if lease is None or lease.state in ENDED:
                    gone.append(lease_id)
                else:
                    self.renewals[lease_id] = self.renewals.get(lease_id, 0) + 1
            self.changed.notify_all()
        return lease_pb2.KeepAliveResponse(gone_lease_ids=gone)

    async def Release(
        self, request: lease_pb2.ReleaseRequest, context: Context
    ) -> lease_pb2.ReleaseResponse:
        if self.refuse_releases > 0:
            self.refuse_releases -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "later")
        lease = await self._lease(request.lease_id, context)
        if lease.state not in ENDED:
            waiting = lease.state is LeaseState.PENDING
            lease = replace(lease, state=LeaseState.CANCELLED if waiting else LeaseState.RELEASED)
            await self.set(lease)
        return lease_pb2.ReleaseResponse(lease=lease_to_proto(lease))

    async def GetLease(
        self, request: lease_pb2.GetLeaseRequest, context: Context
    ) -> lease_pb2.GetLeaseResponse:
        lease = await self._lease(request.lease_id, context)
        return lease_pb2.GetLeaseResponse(lease=lease_to_proto(lease))

    async def _lease(self, lease_id: str, context: Context) -> Lease:
        lease = self.leases.get(LeaseId(lease_id))
        if lease is None:
            await refuse(context, Refused(kind=ErrorKind.NOT_FOUND, message=f"no lease {lease_id}"))
            raise AssertionError("refuse() leaves the handler")
        return lease

    async def ListLeases(
        self, request: lease_pb2.ListLeasesRequest, context: Context
    ) -> lease_pb2.ListLeasesResponse:
        found = sorted(
            (x for x in self.leases.values() if x.state not in ENDED and on_node(x, request)),
            key=lambda x: x.lease_id,
        )
        start = int(request.page_token or 0)
        end = start + self.page
        return lease_pb2.ListLeasesResponse(
            leases=[lease_to_proto(lease) for lease in found[start:end]],
            next_page_token=str(end) if end < len(found) else "",
        )

    async def DryRun(
        self, request: lease_pb2.DryRunRequest, context: Context
    ) -> lease_pb2.DryRunResponse:
        spec = lease_spec_from_proto(request.spec)
        fits = self._free() >= gpus_of(spec)
        verdicts = (NodeVerdict(node_id=NODE, causes=() if fits else NO_ROOM.causes),)
        result = DryRunResult(
            granted=fits,
            members=members_of(spec) if fits else (),
            explanation=Explanation(summary="") if fits else NO_ROOM,
            verdicts=verdicts if request.explain else (),
        )
        return dry_run_result_to_proto(result)

    async def GetPool(
        self, request: pool_pb2.GetPoolRequest, context: Context
    ) -> pool_pb2.GetPoolResponse:
        used = self.gpus - self._free()
        return pool_summary_to_proto(
            PoolSummary(
                epoch=1,
                version="0.1.0",
                nodes=1,
                nodes_connected=1,
                devices=self.gpus,
                devices_free=self._free(),
                devices_used=used,
                devices_unavailable=0,
                granted_share_pct=100 * used,
                leases=used,
                waiting=0,
                grain_pct=10,
                read_only_reason="",
            )
        )

    async def ListNodes(
        self, request: pool_pb2.ListNodesRequest, context: Context
    ) -> pool_pb2.ListNodesResponse:
        inventory = NodeInventory(devices=tuple(device(i) for i in range(self.gpus)))
        node = NodeView(
            node_id=NODE,
            state=NodeState.CONNECTED,
            boot_id="boot",
            agent_version="0.1.0",
            inventory=inventory,
            last_seen_unix_s=1_800_000_000.0,
            free_cpu_milli=8000,
            free_host_memory_mib=65536,
        )
        return pool_pb2.ListNodesResponse(nodes=[node_view_to_proto(node)])

    async def ListDevices(
        self, request: pool_pb2.ListDevicesRequest, context: Context
    ) -> pool_pb2.ListDevicesResponse:
        views = [
            DeviceView(
                device=device(index),
                node_id=NODE,
                state=DeviceState.FREE,
                reasons=(),
                free_share_pct=100,
                free_memory_mib=81559,
                lease_ids=(),
                uid=None,
                strays=(),
            )
            for index in range(self.gpus)
            if request.node_id in ("", NODE)
        ]
        return pool_pb2.ListDevicesResponse(devices=[device_view_to_proto(view) for view in views])

    async def ListEvents(
        self, request: pool_pb2.ListEventsRequest, context: Context
    ) -> pool_pb2.ListEventsResponse:
        found = [
            event
            for event in self.events
            if event.sequence > request.after_sequence and request.subject in ("", event.subject)
        ]
        return pool_pb2.ListEventsResponse(
            events=[event_to_proto(event) for event in found[: request.page_size]],
            last_sequence=len(self.events),
            oldest_sequence=1,
        )

    async def WatchEvents(
        self, request: pool_pb2.WatchEventsRequest, context: Context
    ) -> AsyncIterator[pool_pb2.WatchEventsResponse]:
        seen = len(self.events) if request.after_sequence < 0 else request.after_sequence
        while True:
            async with self.changed:
                while len(self.events) <= seen:
                    await self.changed.wait()
                found = self.events[seen:]
                seen = len(self.events)
            yield pool_pb2.WatchEventsResponse(events=[event_to_proto(event) for event in found])

    async def CreateHold(
        self, request: pool_pb2.CreateHoldRequest, context: Context
    ) -> pool_pb2.CreateHoldResponse:
        ask = hold_ask_from_proto(request)
        hold = Hold(
            hold_id=HoldId(f"hold-{len(self.holds) + 1}"),
            kind=HoldKind.OPERATOR,
            scope=ask.scope,
            target=ask.target,
            reason=ask.reason,
            owner=Caller(user="tester"),
            allowed_tenants=ask.allowed_tenants,
            expire_unix_s=ask.expire_unix_s,
            create_unix_s=1_800_000_000.0,
        )
        self.holds[hold.hold_id] = hold
        return pool_pb2.CreateHoldResponse(hold=hold_to_proto(hold))

    async def ListHolds(
        self, request: pool_pb2.ListHoldsRequest, context: Context
    ) -> pool_pb2.ListHoldsResponse:
        return pool_pb2.ListHoldsResponse(holds=[hold_to_proto(x) for x in self.holds.values()])

    async def DeleteHold(
        self, request: pool_pb2.DeleteHoldRequest, context: Context
    ) -> pool_pb2.DeleteHoldResponse:
        if self.holds.pop(HoldId(request.hold_id), None) is None:
            missing = f"no hold {request.hold_id}"
            await refuse(context, Refused(kind=ErrorKind.NOT_FOUND, message=missing))
        return pool_pb2.DeleteHoldResponse()

    async def ListUnclaimed(
        self, request: pool_pb2.ListUnclaimedRequest, context: Context
    ) -> pool_pb2.ListUnclaimedResponse:
        start = int(request.page_token or 0)
        end = start + self.page
        return pool_pb2.ListUnclaimedResponse(
            assignments=[unclaimed_to_proto(each) for each in self.unclaimed[start:end]],
            next_page_token=str(end) if end < len(self.unclaimed) else "",
        )

    async def EndUnclaimed(
        self, request: pool_pb2.EndUnclaimedRequest, context: Context
    ) -> pool_pb2.EndUnclaimedResponse:
        named = (request.node_id, request.lease_id)
        left = [each for each in self.unclaimed if (each.node_id, each.lease_id) != named]
        if left == self.unclaimed:
            await refuse(context, Refused(kind=ErrorKind.NOT_FOUND, message="nothing to end"))
        self.unclaimed = left
        return pool_pb2.EndUnclaimedResponse()


def unclaimed(node_id: str, rank: int) -> UnclaimedAssignment:
    """A GPU's worth of a lease that the store has forgotten."""
    share = DeviceShare(
        device_uuid=DeviceUuid(f"GPU-{rank}"), share_pct=100, memory_mib=81559, whole=True
    )
    return UnclaimedAssignment(
        node_id=NodeId(node_id),
        lease_id=LeaseId("l-old"),
        rank=rank,
        token=7,
        place=Place(node_id=NodeId(node_id), devices=(share,)),
        uid=1001,
    )


def on_node(lease: Lease, request: lease_pb2.ListLeasesRequest) -> bool:
    nodes = {member.place.node_id for member in lease.members}
    return not request.node_id or request.node_id in nodes


def gpus_of(spec: LeaseSpec) -> int:
    return sum(
        group.replicas
        * (group.accelerator.count if isinstance(group.accelerator, WholeGpus) else 1)
        for group in spec.groups
    )


def device(index: int) -> Device:
    return Device(
        uuid=DeviceUuid(f"GPU-{index}"), model="NVIDIA H100", index=index, memory_mib=81559
    )


def members_of(spec: LeaseSpec) -> tuple[Member, ...]:
    group = spec.groups[0]
    return tuple(
        Member(
            group=group.name,
            index=rank,
            rank=rank,
            state=MemberState.READY,
            token=1,
            place=Place(
                node_id=NODE,
                devices=(
                    DeviceShare(
                        device_uuid=DeviceUuid(f"GPU-{rank}"),
                        share_pct=100,
                        memory_mib=81559,
                        whole=True,
                    ),
                ),
            ),
            environment={"CUDA_VISIBLE_DEVICES": f"GPU-{rank}", "GPUPOOL_RANK": str(rank)},
        )
        for rank in range(group.replicas)
    )


def pending(lease_id: LeaseId, request_id: Any, spec: LeaseSpec, ttl_s: float | None) -> Lease:
    return Lease(
        lease_id=lease_id,
        request_id=request_id,
        caller=Caller(),
        spec=spec,
        state=LeaseState.PENDING,
        ttl_s=ttl_s,
        position=1,
        explanation=NO_ROOM,
        create_unix_s=1_800_000_000.0,
    )


def granted(lease: Lease) -> Lease:
    return replace(
        lease,
        state=LeaseState.ACTIVE,
        generation=lease.generation + 1,
        members=members_of(lease.spec),
        position=0,
        explanation=Explanation(summary=""),
    )


async def refuse(context: Context, refused: Refused) -> None:
    packed = refusal_to_proto(refused).SerializeToString()
    code = grpc.StatusCode[refused.kind.value.grpc]
    await context.abort(code, refused.message, (("gpupool-refusal-bin", packed),))


def socket_address(folder: Path) -> str:
    return f"unix:{folder / 'agent.sock'}"
