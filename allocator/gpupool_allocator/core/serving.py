"""Serving the queue: who is tried when something became available, and the head's places.

Only changes that can matter wake a request: it is tried again when a node on which
something became available could let it in. The first request that fits an idle pool
but not this one gets a hold on the nodes where it will fit soonest, so that a stream
of smaller requests cannot starve it.
"""

from itertools import islice
from math import inf

from gpupool.model.ids import HoldId, LeaseId, NodeId
from gpupool.model.lease import LeaseState
from gpupool_allocator.core.clocks import ClockKind
from gpupool_allocator.core.ending import begin_end
from gpupool_allocator.core.entries import LeaseEntry
from gpupool_allocator.core.granting import Granted, passes, try_grant
from gpupool_allocator.core.placement import may_fit_now, soonest
from gpupool_allocator.core.state import State, queue_hold_id

HEADS_TRIED_MAX = 8
"""Waiting requests that are asked for a reservation until one can have one."""

TOLD_MAX = 100
"""Waiting requests whose listeners hear of a new position."""

TOLD_EXACTLY_MAX = 10
"""The first of them hear of each; the others when it has changed by a tenth."""

ROUNDS_MAX = 4
"""Rounds of one event: places that the head gives up may suit others, and so on."""

RESERVATION = "reservation"


def serve(state: State, now: float) -> None:
    """Tries waiting requests on what became available, in the queue's order."""
    if not len(state.queue):
        _reserve(state, None, (), inf)
        state.freed = {}
        state.queue_changed = False
        return
    if state.read_only:
        return
    order_changed = state.queue_changed
    state.queue_changed = False
    for _ in range(ROUNDS_MAX):
        freed, state.freed = list(state.freed), {}
        left = _one_pass(state, freed, now)
        order_changed = order_changed or left
        # A request that comes or goes behind the heads changes nothing for them.
        if left or _may_choose_anew(state, freed):
            _choose_reservation(state, now)
        if not state.freed:
            break
    if order_changed:
        _tell_positions(state)


def _heads(state: State) -> tuple[LeaseId, ...]:
    """Waiting requests that may have places kept for them."""
    return tuple(islice(state.queue, HEADS_TRIED_MAX))


def _may_choose_anew(state: State, freed: list[NodeId]) -> bool:
    """Whether other places might be kept: for a head that is new, or as the present one is gone.

    The heads before the present one were asked and can have none; those behind it wait for it.
    """
    heads = _heads(state)
    if state.reserved_for is None:
        return bool(freed) or not set(heads) <= set(state.heads)
    if state.reserved_for not in heads:
        return True
    return not set(heads[: heads.index(state.reserved_for)]) <= set(state.heads)


def _tell_positions(state: State) -> None:
    """Lets the first in the queue hear of a position that is news to them.

    Each is an answer with the whole request in it, and a queue moves with every grant.
    """
    for position, lease_id in zip(range(1, TOLD_MAX + 1), state.queue, strict=False):
        lease = state.leases[lease_id]
        told = lease.position_told
        exactly = told == 0 or position <= TOLD_EXACTLY_MAX
        if position != told and (exactly or 10 * abs(position - told) >= told):
            lease.position_told = position
            state.told[lease_id] = None


def _one_pass(state: State, freed: list[NodeId], now: float) -> bool:
    """Tries every waiting request once; True when one left the queue."""
    left = False
    if not freed:
        return left  # an arrival lets in nobody who waits already
    for lease_id in list(state.queue):
        lease = state.leases[lease_id]
        through = passes(state, lease.spec, lease_id, now)
        if not may_fit_now(state.books, lease.spec, freed, through):
            continue
        found = try_grant(state, lease, now)
        if isinstance(found, Granted) or found.too_large:
            if isinstance(found, Granted):
                state.queue.remove(lease_id)
            else:
                # No more room will help it, and it must keep no places from others.
                begin_end(state, lease, LeaseState.CANCELLED, found.explanation.summary)
            left = True
            if lease_id == state.reserved_for:
                _reserve(state, None, (), inf)
        elif found.explanation != lease.explanation:
            lease.explanation = found.explanation
            state.told[lease_id] = None
    return left


def refresh_reservation(state: State, now: float) -> None:
    """Chooses the head's places anew: what ends when has changed."""
    if len(state.queue) and not state.read_only:
        _choose_reservation(state, now)


def _choose_reservation(state: State, now: float) -> None:
    def ends(lease_id: LeaseId) -> float:
        known = state.clocks.get(lease_id, ClockKind.END)
        return inf if known is None else known

    # Places kept for the present head are no obstacle to a better one.
    kept = {queue_hold_id(state.reserved_for)} if state.reserved_for is not None else set[HoldId]()
    state.heads = _heads(state)
    for lease_id in state.heads:
        head = state.leases[lease_id]
        through = passes(state, head.spec, lease_id, now) | kept
        at, nodes = soonest(state.books, head.spec, ends, now, through)
        if nodes:
            _reserve(state, head, nodes, at)
            state.clocks.set(RESERVATION, ClockKind.RESERVATION, now + state.settings.reservation_s)
            return
    _reserve(state, None, (), inf)


def _reserve(
    state: State, head: LeaseEntry | None, nodes: tuple[NodeId, ...], until: float
) -> None:
    """Keeps these nodes for the head, and lets the others see those given up."""
    wanted = dict.fromkeys(nodes)
    new_head = head.lease_id if head is not None else None
    state.reserved_until = until
    if wanted.keys() == state.reserved.keys() and new_head == state.reserved_for:
        return
    touched = dict.fromkeys([*state.reserved, *wanted])
    # A new head may use what was kept for the old one, everybody what is kept no more.
    opened = [
        node_id
        for node_id in state.reserved
        if new_head != state.reserved_for or node_id not in wanted
    ]
    if new_head != state.reserved_for:
        if state.reserved_for is not None:
            state.out.record("hold.removed", f"queue:{state.reserved_for}", "no longer needed")
        if new_head is not None:
            state.out.record("hold.added", f"queue:{new_head}", "places for the head of the queue")
    state.reserved, state.reserved_for = wanted, new_head
    for node_id in touched:
        state.apply_holds(node_id)
    for node_id in opened:
        state.node_freed(node_id)
