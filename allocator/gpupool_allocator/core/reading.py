"""Pictures of the pool for the outside. Nothing here changes anything."""

from collections.abc import Iterator
from heapq import nsmallest

from gpupool.model.assignment import AssignmentState
from gpupool.model.caller import Caller, Role
from gpupool.model.errors import Refused
from gpupool.model.hold import Hold, HoldKind, HoldScope
from gpupool.model.ids import DeviceUuid, HoldId, NodeId
from gpupool.model.lease import Explanation, Lease, LeaseState, Member, MemberState
from gpupool.model.request import LeaseSpec
from gpupool.model.views import (
    DeviceState,
    DeviceView,
    DryRunResult,
    NodeState,
    NodeView,
    PoolSummary,
    UnclaimedAssignment,
)
from gpupool_allocator.core.admission import refusal
from gpupool_allocator.core.effects import UnclaimedRecord
from gpupool_allocator.core.entries import DeviceEntry, LeaseEntry, NodeEntry
from gpupool_allocator.core.granting import decide, passes
from gpupool_allocator.core.placement import Unplaced
from gpupool_allocator.core.placement import explain as explain_nodes
from gpupool_allocator.core.state import State


def leases(
    state: State,
    *,
    after: str,
    limit: int,
    states: frozenset[LeaseState],
    tenant: str,
    node_id: str,
) -> list[Lease]:
    """Leases by id that match all filters."""

    def wanted(lease: LeaseEntry) -> bool:
        return (
            lease.lease_id > after
            and (lease.state in states if states else not lease.ended)
            and (not tenant or lease.spec.tenant == tenant)
            and (not node_id or any(m.place.node_id == node_id for m in lease.members))
        )

    found = nsmallest(limit, (i for i, lease in state.leases.items() if wanted(lease)))
    return [state.snapshot(state.leases[lease_id]) for lease_id in found]


def nodes(state: State, *, after: str, limit: int) -> list[NodeView]:
    """Nodes by id."""
    found = nsmallest(limit, (node_id for node_id in state.nodes if node_id > after))
    return [_node_view(state, state.nodes[node_id]) for node_id in found]


def _node_view(state: State, node: NodeEntry) -> NodeView:
    holds = [
        hold.hold_id
        for hold in state.holds.values()
        if hold.target == node.node_id or hold.target in node.devices
    ]
    if node.node_id in state.reserved:
        holds.append(HoldId(f"queue:{state.reserved_for}"))
    return NodeView(
        node_id=node.node_id,
        state=NodeState.CONNECTED if node.connection is not None else NodeState.UNREACHABLE,
        boot_id=node.boot_id,
        agent_version=node.agent_version,
        inventory=node.inventory,
        last_seen_unix_s=node.last_seen_unix_s,
        free_cpu_milli=state.books.free_cpu_milli(node.node_id),
        free_host_memory_mib=state.books.free_host_memory_mib(node.node_id),
        hold_ids=tuple(sorted(holds)),
    )


def devices(state: State, *, after: tuple[str, str], limit: int, node_id: str) -> list[DeviceView]:
    """Devices by (node id, UUID)."""

    def keys() -> Iterator[tuple[NodeId, DeviceUuid]]:
        chosen = [node_id] if node_id else state.nodes
        for name in chosen:
            node = state.nodes.get(NodeId(name))
            if node is not None and node.node_id >= after[0]:
                yield from ((node.node_id, uuid) for uuid in node.devices)

    found = nsmallest(limit, (key for key in keys() if key > after))
    return [_device_view(state, state.nodes[name], uuid) for name, uuid in found]


def _device_view(state: State, node: NodeEntry, uuid: DeviceUuid) -> DeviceView:
    entry = node.devices[uuid]
    reasons = _reasons(state, node, uuid, entry)
    return DeviceView(
        device=entry.device,
        node_id=node.node_id,
        state=_device_state(state, uuid, offered=not reasons),
        reasons=reasons,
        free_share_pct=state.books.free_share_pct(uuid),
        free_memory_mib=state.books.free_memory_mib(uuid),
        lease_ids=tuple(sorted({key.lease_id for key in state.books.keys_on(uuid)})),
        uid=state.books.uid_of(uuid),
        strays=entry.strays,
        last_seen_unix_s=entry.lost_unix_s,
    )


def _device_state(state: State, uuid: DeviceUuid, *, offered: bool) -> DeviceState:
    keys = state.books.keys_on(uuid)
    if not keys:
        return DeviceState.FREE if offered else DeviceState.UNAVAILABLE
    return DeviceState.WHOLE if state.books.is_whole(uuid) else DeviceState.SLICED


def _reasons(
    state: State, node: NodeEntry, uuid: DeviceUuid, entry: DeviceEntry
) -> tuple[str, ...]:
    """Why nothing more is granted on a device."""
    reasons: list[str] = []
    if node.connection is None:
        reasons.append("node unreachable")
    if not entry.present:
        reasons.append("missing from its node")
    elif entry.failed:
        reasons.append(entry.reason or "failed")
    elif node.connection is not None and not entry.confirmed:
        reasons.append("not yet confirmed by its node")
    elif entry.confirmed and not entry.clean:
        reasons.append(entry.reason or "not clean")
    reasons += [
        f"hold {hold.hold_id}: {hold.reason}"
        for hold in state.holds.values()
        if hold.target in (node.node_id, uuid)
    ]
    if node.node_id in state.reserved:
        reasons.append(f"kept for waiting request {state.reserved_for}")
    return tuple(reasons)


def holds(state: State, *, after: str, limit: int) -> list[Hold]:
    """Holds by id; each place kept for the queue's head is one."""
    owner = Caller(user="gpupool-allocator", role=Role.OPERATOR)
    kept = {
        HoldId(f"queue:{state.reserved_for}:{node_id}"): Hold(
            hold_id=HoldId(f"queue:{state.reserved_for}:{node_id}"),
            kind=HoldKind.QUEUE,
            scope=HoldScope.NODE,
            target=node_id,
            reason=f"kept for waiting request {state.reserved_for}",
            owner=owner,
        )
        for node_id in state.reserved
    }
    everything = {**state.holds, **kept}
    found = nsmallest(limit, (hold_id for hold_id in everything if hold_id > after))
    return [everything[hold_id] for hold_id in found]


def unclaimed(
    state: State, *, after: tuple[str, str, int], limit: int
) -> list[UnclaimedAssignment]:
    """Unclaimed assignments by (node id, lease id, rank)."""
    by_place = {
        (key.node_id, key.lease_id, key.rank): record for key, record in state.unclaimed.items()
    }
    found = nsmallest(limit, (place for place in by_place if place > after))
    return [_unclaimed_view(by_place[place]) for place in found]


def _unclaimed_view(record: UnclaimedRecord) -> UnclaimedAssignment:
    report = record.report
    assert report.place is not None, f"{report.key} was taken in without its place"
    return UnclaimedAssignment(
        node_id=record.node_id,
        lease_id=report.key.lease_id,
        rank=report.key.rank,
        token=report.token,
        place=report.place,
        uid=report.uid,
        ending=report.state is AssignmentState.ENDING,
    )


def summary(state: State) -> PoolSummary:
    """Sums of the pool; devices = free + used + unavailable."""
    totals = state.books.totals()
    return PoolSummary(
        epoch=state.epoch,
        version=state.settings.version,
        nodes=len(state.nodes),
        nodes_connected=sum(node.connection is not None for node in state.nodes.values()),
        devices=totals.devices,
        devices_free=totals.free,
        devices_used=totals.used,
        devices_unavailable=totals.devices - totals.free - totals.used,
        granted_share_pct=totals.granted_share_pct,
        leases=len(state.leases) - len(state.ended) - len(state.queue),
        waiting=len(state.queue),
        grain_pct=state.settings.grain_pct,
        read_only_reason=state.read_only,
        strays=sum(state.with_strays.values()),
    )


def dry_run(state: State, spec: LeaseSpec, now: float, *, explain: bool) -> DryRunResult | Refused:
    """The answer that Acquire would give, by the same decision."""
    refused = refusal(spec, grain_pct=state.settings.grain_pct)
    if refused is not None:
        return refused
    found = decide(state, spec, None, now)
    verdicts = explain_nodes(state.books, spec, passes(state, spec, None, now)) if explain else ()
    if isinstance(found, Unplaced):
        return DryRunResult(
            granted=False, members=(), explanation=found.explanation, verdicts=verdicts
        )
    members = tuple(
        Member(
            group=planned.group,
            index=planned.index,
            rank=planned.rank,
            state=MemberState.PREPARING,
            token=0,
            place=planned.place,
        )
        for planned in found.members
    )
    summary_text = f"fits now, {found.nodes_touched} nodes looked at closely"
    return DryRunResult(
        granted=True,
        members=members,
        explanation=Explanation(summary=summary_text),
        verdicts=verdicts,
    )
