"""From a request to a grant: hold checks, plan, independent validation, booking."""

from dataclasses import dataclass, replace

from gpupool.model.caller import Caller
from gpupool.model.ids import HoldId, LeaseId, NodeId, RequestId
from gpupool.model.lease import Cause, Explanation, Lease, LeaseState, Member, MemberState, Place
from gpupool.model.request import LeaseSpec, Level
from gpupool_allocator.core.books import BookingError
from gpupool_allocator.core.clocks import ClockKind
from gpupool_allocator.core.entries import LeaseEntry, MemberEntry
from gpupool_allocator.core.placement import Plan, Unplaced, plan, validate
from gpupool_allocator.core.state import State, queue_hold_id
from gpupool_allocator.core.words import counted_are

STORE_ASKED_FROM = 1024
"""Members and devices from which a lease's record may be too large: some 600 bytes each
at the very most, beside a request of 384 KiB (checked at the door), in a record of 1 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The request now holds its places."""

    nodes_touched: int


def passes(
    state: State, spec: LeaseSpec, lease_id: LeaseId | None, now: float
) -> frozenset[HoldId]:
    """Holds that let a request through: its tenant's, its own reservation, or backfill.

    A request may run inside the places reserved for the queue's head when its
    ``max_duration_s`` ends before the head is expected to need them.
    """
    through = {hold.hold_id for hold in state.holds.values() if spec.tenant in hold.allowed_tenants}
    if state.reserved_for is not None:
        in_time = (
            spec.max_duration_s is not None and now + spec.max_duration_s <= state.reserved_until
        )
        if lease_id == state.reserved_for or in_time:
            through.add(queue_hold_id(state.reserved_for))
    return frozenset(through)


def decide(state: State, spec: LeaseSpec, lease_id: LeaseId | None, now: float) -> Plan | Unplaced:
    """The places that the request would get now, or why it gets none.

    The same for a dry run and for the real thing; nothing is changed by it.
    """
    through = passes(state, spec, lease_id, now)
    found = plan(state.books, spec, through)
    if isinstance(found, Unplaced):
        return _behind_the_head(state, spec, through, found)
    checked = _validated(state, spec, found, through)
    if isinstance(checked, Plan) and not _can_be_stored(state, spec, checked):
        return Unplaced(
            explanation=Explanation(
                summary=f"a lease of {len(checked.members)} members here is larger than one "
                "stored record",
                nearest_change="split the request into several leases",
            ),
            never=True,
            too_large=True,
        )
    return checked


def _validated(
    state: State, spec: LeaseSpec, found: Plan, through: frozenset[HoldId]
) -> Plan | Unplaced:
    """The plan, if the independent validator finds nothing wrong with it."""
    wrong = validate(state.books, spec, found, through)
    if wrong is None:
        return found
    state.out.alarm("plan_rejected", f"validator rejected a plan: {wrong}")
    return _internal(wrong)


def _internal(wrong: str) -> Unplaced:
    return Unplaced(explanation=Explanation(summary=f"internal: {wrong}"), never=False)


def _behind_the_head(
    state: State, spec: LeaseSpec, through: frozenset[HoldId], found: Unplaced
) -> Unplaced:
    """Tells what is missing from what is only kept for the head of the queue."""
    if state.reserved_for is None:
        return found
    reserved = queue_hold_id(state.reserved_for)
    if reserved in through:
        return found
    beyond = plan(state.books, spec, through | {reserved})
    if isinstance(beyond, Unplaced):
        return beyond
    count = len(state.reserved)
    kept = counted_are(count, "node")
    message = f"{kept} kept for request {state.reserved_for}, the first in the queue"
    return Unplaced(
        explanation=Explanation(
            summary=message,
            causes=(Cause(code="queue", count=count, unit="node", message=message),),
            nearest_change="a max_duration that ends before the first request is expected to start",
        ),
        never=False,
    )


def try_grant(state: State, lease: LeaseEntry, now: float) -> Granted | Unplaced:
    """Grants a request whole, or leaves everything as it was."""
    found = decide(state, lease.spec, lease.lease_id, now)
    if isinstance(found, Unplaced):
        return found
    members = [
        MemberEntry(
            group=planned.group,
            index=planned.index,
            rank=planned.rank,
            token=state.next_token(),
            place=planned.place,
        )
        for planned in found.members
    ]
    refused = _book_all(state, lease, members)
    if refused is not None:
        state.out.alarm("booking_refused", f"books refused a validated plan: {refused}")
        return _internal(refused)
    _settle_grant(state, lease, members, now)
    return Granted(nodes_touched=found.nodes_touched)


def _can_be_stored(state: State, spec: LeaseSpec, found: Plan) -> bool:
    """Whether the granted lease is small enough to be one record; asked where it may not be."""
    size = len(found.members) + sum(len(planned.place.devices) for planned in found.members)
    if size < STORE_ASKED_FROM:
        return True
    members = tuple(
        Member(
            group=planned.group,
            index=planned.index,
            rank=planned.rank,
            state=MemberState.PREPARING,
            token=(state.epoch + 1) << 32,
            place=planned.place,
        )
        for planned in found.members
    )
    # Ids and times are in the room that the store leaves for growth.
    lease = Lease(
        lease_id=LeaseId(""),
        request_id=RequestId(""),
        caller=Caller(),
        spec=spec,
        state=LeaseState.GRANTED,
        members=members,
    )
    return state.fits_store(lease)


def _book_all(state: State, lease: LeaseEntry, members: list[MemberEntry]) -> str | None:
    """Books every member or none; the reason where the books refuse."""
    for count, member in enumerate(members):
        try:
            state.books.book(
                lease.key(member),
                member.place,
                uid=lease.spec.uid,
                shared_trust=lease.spec.shared_trust,
            )
        except BookingError as refused:
            for booked in members[:count]:
                state.books.unbook(lease.key(booked))
            return str(refused)
    return None


def _settle_grant(state: State, lease: LeaseEntry, members: list[MemberEntry], now: float) -> None:
    lease.members = members
    lease.state = LeaseState.GRANTED
    lease.grant_unix_s = state.out.unix_s
    lease.explanation = Explanation(summary="")
    for member in members:
        place_on_node(state, lease, member)
    state.clocks.clear(lease.lease_id, ClockKind.WAIT)
    if lease.ttl_s is not None:
        state.clocks.set(lease.lease_id, ClockKind.HOLDER, now + lease.ttl_s)
    if lease.spec.max_duration_s is not None:
        lease.end_unix_s = state.out.unix_s + lease.spec.max_duration_s
        state.clocks.set(lease.lease_id, ClockKind.END, now + lease.spec.max_duration_s)
    state.out.record(
        "lease.granted",
        lease.lease_id,
        "request fits",
        {f"member.{member.rank}": place_text(member) for member in members},
    )
    state.lease_changed(lease, tell=True)


def place_on_node(state: State, lease: LeaseEntry, member: MemberEntry) -> None:
    """Puts a booked member into its node's desired state."""
    node = state.nodes[member.place.node_id]
    node.members[lease.key(member)] = member
    state.node_changed(node.node_id)


def place_text(member: MemberEntry) -> str:
    """A member's place and token in one line of the history."""
    devices = ",".join(
        f"{share.device_uuid}:{'whole' if share.whole else share.share_pct}:{share.memory_mib}"
        for share in member.place.devices
    )
    return f"{member.place.node_id} {member.token} {devices or '-'}"


def replan_member(
    state: State, lease: LeaseEntry, member: MemberEntry, now: float
) -> Place | Unplaced:
    """A new place for one member that holds none, inside the lease's own constraints."""
    group = next(group for group in lease.spec.groups if group.name == member.group)
    siblings = [other for other in lease.members if other is not member]
    avoid = set(lease.excluded)
    for topology, others in (
        (lease.spec.topology, siblings),
        (group.topology, [other for other in siblings if other.group == member.group]),
    ):
        if topology.required is Level.NODE and others:
            return Unplaced(
                explanation=Explanation(
                    summary=f"all members must be on one node, {others[0].place.node_id}"
                ),
                never=False,
            )
        if topology.spread is Level.NODE:
            avoid |= _full_nodes(others, topology.max_per_domain)
    alone = replace(lease.spec, groups=(replace(group, replicas=1),))
    through = passes(state, lease.spec, lease.lease_id, now)
    found = plan(state.books, alone, through, exclude=frozenset(avoid))
    if isinstance(found, Unplaced):
        return found
    checked = _validated(state, alone, found, through)
    return checked if isinstance(checked, Unplaced) else checked.members[0].place


def _full_nodes(members: list[MemberEntry], most: int) -> set[NodeId]:
    """Nodes that hold as many of these members as one node may."""
    counts: dict[NodeId, int] = {}
    for member in members:
        counts[member.place.node_id] = counts.get(member.place.node_id, 0) + 1
    return {node_id for node_id, count in counts.items() if count >= most}
