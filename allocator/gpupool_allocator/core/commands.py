"""Commands of holders and operators."""

from gpupool.model.caller import Role
from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.hold import Hold, HoldKind, HoldScope
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId
from gpupool.model.lease import LeaseState
from gpupool_allocator.core.admission import refusal
from gpupool_allocator.core.clocks import ClockKind
from gpupool_allocator.core.effects import Answer, Delete, Done, KeptAlive, Put
from gpupool_allocator.core.ending import begin_end
from gpupool_allocator.core.entries import LeaseEntry
from gpupool_allocator.core.events import (
    Acquire,
    AddHold,
    CallEnded,
    EndUnclaimed,
    KeepAlive,
    Release,
    RemoveHold,
    Watch,
)
from gpupool_allocator.core.granting import try_grant
from gpupool_allocator.core.placement import Unplaced
from gpupool_allocator.core.reporting import renew
from gpupool_allocator.core.state import State
from gpupool_allocator.core.unclaimed import drop_unclaimed

DEFAULT_TTL_S = 60.0
"""How long a process-bound request waits for its caller to ask again."""


def acquire(state: State, event: Acquire, now: float) -> None:
    """Grants, queues or refuses a request; a repeated request id finds its lease."""
    known_id = state.requests.get((event.spec.tenant, event.request_id))
    if known_id is not None:
        _join(state, state.leases[known_id], event)
        return
    refused = _unwritable(state) or refusal(event.spec, grain_pct=state.settings.grain_pct)
    if refused is not None:
        state.out.refuse(event.command, refused)
        return
    lease = LeaseEntry(
        lease_id=event.lease_id,
        request_id=event.request_id,
        caller=event.caller,
        spec=event.spec,
        state=LeaseState.PENDING,
        ttl_s=event.ttl_s,
        process=event.process,
        wait_s=event.wait_s,
        create_unix_s=event.unix_s,
    )
    found = try_grant(state, lease, now)
    if isinstance(found, Unplaced) and (found.never or event.wait_s == 0):
        state.out.refuse(
            event.command,
            Refused(
                kind=ErrorKind.NO_CAPACITY,
                message=found.explanation.summary,
                explanation=found.explanation,
            ),
        )
        return
    if isinstance(found, Unplaced) and len(state.queue) >= state.settings.queue_max:
        state.out.refuse(event.command, _queue_full(state))
        return
    _take_in(state, lease, event, now, found if isinstance(found, Unplaced) else None)


def _take_in(
    state: State, lease: LeaseEntry, event: Acquire, now: float, unplaced: Unplaced | None
) -> None:
    state.leases[lease.lease_id] = lease
    state.requests[lease.spec.tenant, lease.request_id] = lease.lease_id
    lease.listeners[event.command] = event.follow
    state.listeners[event.command] = lease.lease_id
    state.watch_holder(lease)
    if unplaced is not None:
        lease.explanation = unplaced.explanation
        state.queue.add(lease.lease_id, priority=lease.spec.priority, arrival_s=now)
        state.queue_changed = True
        if lease.wait_s is not None:
            state.clocks.set(lease.lease_id, ClockKind.WAIT, now + lease.wait_s)
        state.out.record("lease.requested", lease.lease_id, unplaced.explanation.summary)
    state.lease_changed(lease, tell=True)


def _join(state: State, lease: LeaseEntry, event: Acquire) -> None:
    """A retry listens to the lease that its request id made before."""
    if lease.spec != event.spec:
        state.out.refuse(
            event.command,
            Refused(
                kind=ErrorKind.CONFLICT,
                field="request_id",
                message=f"request_id: {event.request_id} was used before for a different request",
            ),
        )
        return
    lease.listeners[event.command] = event.follow
    state.listeners[event.command] = lease.lease_id
    if lease.state is LeaseState.PENDING:
        state.clocks.clear(lease.lease_id, ClockKind.HOLDER)
    state.told[lease.lease_id] = None


def watch(state: State, event: Watch) -> None:
    """Answers with the lease now and at each later change."""
    lease = state.leases.get(event.lease_id)
    if lease is None:
        state.out.refuse(event.command, unknown_lease(event.lease_id))
        return
    lease.listeners[event.command] = True
    state.listeners[event.command] = lease.lease_id
    state.told[lease.lease_id] = None


def call_ended(state: State, event: CallEnded, now: float) -> None:
    """A waiting request that nobody listens to lives on for its TTL, then is cancelled."""
    lease = state.forget_listener(event.command)
    if lease is not None and lease.state is LeaseState.PENDING and not lease.listeners:
        ttl_s = lease.ttl_s or DEFAULT_TTL_S
        state.clocks.set(lease.lease_id, ClockKind.HOLDER, now + ttl_s)


def keep_alive(state: State, event: KeepAlive, now: float) -> None:
    """Renews leases; renewals are not stored. One that is not the caller's refuses them all."""
    known = (lease for lease_id in event.lease_ids if (lease := state.leases.get(lease_id)))
    refused = next(filter(None, (_not_its_holder(event, lease) for lease in known)), None)
    if refused is not None:
        state.out.refuse(event.command, refused)
        return
    gone: list[LeaseId] = []
    shortest: float | None = None
    for lease_id in event.lease_ids:
        lease = state.leases.get(lease_id)
        if lease is None or not renew(state, lease, now):
            gone.append(lease_id)
        elif lease.ttl_s is not None:
            shortest = lease.ttl_s if shortest is None else min(shortest, lease.ttl_s)
    state.out.tell(
        Answer(
            command=event.command,
            result=KeptAlive(gone=tuple(gone), ttl_s=shortest),
            final=True,
        )
    )


def release(state: State, event: Release) -> None:
    """Ends a lease; the answer shows it releasing, or ended."""
    lease = state.leases.get(event.lease_id)
    if lease is None:
        refused: Refused | None = unknown_lease(event.lease_id)
    else:
        refused = _not_its_holder(event, lease) or (None if lease.ended else _unwritable(state))
    if lease is None or refused is not None:
        assert refused is not None
        state.out.refuse(event.command, refused)
        return
    begin_end(state, lease, LeaseState.RELEASED, event.reason or "released by its holder")
    state.out.tell(Answer(command=event.command, result=state.snapshot(lease), final=True))


def add_hold(state: State, event: AddHold, now: float) -> None:
    """Adds a hold; a repeated request id gives the hold it made."""
    made = next(
        (hold for hold in state.holds.values() if hold.request_id == event.request_id), None
    )
    if made is not None:
        state.out.tell(Answer(command=event.command, result=made, final=True))
        return
    refused = _unwritable(state) or _not_operator(event) or _no_target(state, event)
    if refused is not None:
        state.out.refuse(event.command, refused)
        return
    hold = Hold(
        hold_id=event.hold_id,
        kind=HoldKind.OPERATOR,
        scope=event.scope,
        target=event.target,
        reason=event.reason,
        owner=event.caller,
        allowed_tenants=event.allowed_tenants,
        expire_unix_s=event.expire_unix_s,
        create_unix_s=event.unix_s,
        request_id=event.request_id,
    )
    state.holds[hold.hold_id] = hold
    state.out.put("hold", hold.hold_id, Put(record=hold))
    cause = f"{hold.target}: {hold.reason}" if hold.reason else hold.target
    state.out.record("hold.added", hold.hold_id, cause, {"target": hold.target})
    if hold.expire_unix_s is not None:
        left_s = max(0.0, hold.expire_unix_s - event.unix_s)
        state.clocks.set(hold.hold_id, ClockKind.HOLD, now + left_s)
    _hold_changed(state, hold)
    state.out.tell(Answer(command=event.command, result=hold, final=True))


def remove_hold(state: State, event: RemoveHold) -> None:
    """Removes a hold."""
    hold = state.holds.get(event.hold_id)
    refused = _unwritable(state) or _not_operator(event)
    if hold is None:
        refused = Refused(
            kind=ErrorKind.NOT_FOUND, field="hold_id", message=f"no hold {event.hold_id}"
        )
    if hold is None or refused is not None:
        assert refused is not None
        state.out.refuse(event.command, refused)
        return
    drop_hold(state, hold, "removed by an operator")
    state.out.tell(Answer(command=event.command, result=Done(), final=True))


def drop_hold(state: State, hold: Hold, cause: str) -> None:
    """Ends a hold, and lets waiting requests see what it held."""
    del state.holds[hold.hold_id]
    state.out.put("hold", hold.hold_id, Delete(record=hold))
    state.out.record("hold.removed", hold.hold_id, cause, {"target": hold.target})
    _hold_changed(state, hold)


def _hold_changed(state: State, hold: Hold) -> None:
    node_id = _node_of(state, hold.scope, hold.target)
    if node_id is not None:
        state.apply_holds(node_id)
        state.node_freed(node_id)


def _node_of(state: State, scope: HoldScope, target: str) -> NodeId | None:
    if scope is HoldScope.NODE:
        return NodeId(target) if target in state.nodes else None
    return state.device_nodes.get(DeviceUuid(target))


def _no_target(state: State, event: AddHold) -> Refused | None:
    if _node_of(state, event.scope, event.target) is not None:
        return None
    return Refused(
        kind=ErrorKind.NOT_FOUND,
        field="hold.target",
        message=f"hold.target: the pool has no {event.scope} {event.target}",
    )


def end_unclaimed(state: State, event: EndUnclaimed) -> None:
    """Ends an unclaimed lease's assignments on a node: its agent is no longer told to keep them."""
    refused = _unwritable(state) or _not_operator(event)
    found = [
        record
        for key, record in state.unclaimed.items()
        if key.lease_id == event.lease_id and key.node_id == event.node_id
    ]
    if refused is None and not found:
        refused = Refused(
            kind=ErrorKind.NOT_FOUND,
            field="lease_id",
            message=f"node {event.node_id} runs no unclaimed assignment of {event.lease_id}",
        )
    if refused is not None:
        state.out.refuse(event.command, refused)
        return
    for record in found:
        drop_unclaimed(state, record, f"ended by {event.caller.user or 'an operator'}")
    state.out.tell(Answer(command=event.command, result=Done(), final=True))


def unknown_lease(lease_id: LeaseId) -> Refused:
    """The refusal for a lease id that the pool does not know."""
    return Refused(kind=ErrorKind.NOT_FOUND, field="lease_id", message=f"no lease {lease_id}")


def _unwritable(state: State) -> Refused | None:
    if not state.read_only:
        return None
    return Refused(
        kind=ErrorKind.UNAVAILABLE,
        message=f"changes are refused: {state.read_only}",
        retry_after_s=5.0,
    )


def _not_operator(event: AddHold | RemoveHold | EndUnclaimed) -> Refused | None:
    if event.caller.role is Role.OPERATOR:
        return None
    return Refused(kind=ErrorKind.FORBIDDEN, message="only operators may do this")


def _not_its_holder(event: KeepAlive | Release, lease: LeaseEntry) -> Refused | None:
    """On a node a user renews and ends only what that user asked for.

    Of a caller on another machine nobody has said who it is (uid 0, and no operator): its
    requests carry what they name.
    """
    caller = event.caller
    if caller.role is not Role.USER or caller.uid in (0, lease.caller.uid):
        return None
    field, doing = ("lease_id", "end") if isinstance(event, Release) else ("lease_ids", "renew")
    return Refused(
        kind=ErrorKind.FORBIDDEN,
        field=field,
        message=f"{field}: {lease.lease_id} is held by uid {lease.caller.uid}, not by"
        f" {caller.uid}; its holder, root or an operator can {doing} it",
    )


def _queue_full(state: State) -> Refused:
    return Refused(
        kind=ErrorKind.NO_CAPACITY,
        message=f"the queue is full: {state.settings.queue_max} requests wait",
        retry_after_s=10.0,
    )
