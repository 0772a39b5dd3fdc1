"""The way out of a lease: nodes are told, confirm that nothing is left, then it ends.

What a member holds stays booked until its node has confirmed it clean. No clock
stands in for that.
"""

from gpupool.model.lease import Explanation, LeaseState, MemberState
from gpupool_allocator.core.clocks import ClockKind
from gpupool_allocator.core.entries import LeaseEntry, MemberEntry, NodeEntry
from gpupool_allocator.core.state import State
from gpupool_allocator.core.unclaimed import book_unclaimed


def begin_end(state: State, lease: LeaseEntry, towards: LeaseState, cause: str) -> None:
    """Starts to end a lease; one that already ends or has ended is left alone."""
    if lease.state is LeaseState.PENDING:
        _leave_queue(state, lease, towards, cause)
        return
    if not lease.running:
        return
    lease.state = LeaseState.RELEASING
    lease.ending_as = towards
    lease.generation += 1
    lease.explanation = Explanation(summary=cause)
    state.clocks.clear(lease.lease_id, ClockKind.HOLDER, ClockKind.END)
    state.unwatch_holder(lease)
    for member in lease.members:
        if member.state is MemberState.ENDED:
            continue
        node = state.nodes[member.place.node_id]
        member.state = MemberState.ENDING
        # The next desired state is the first that does not name it.
        member.dropped_at = node.revision + 1
        state.node_changed(node.node_id)
    state.out.record("lease.releasing", lease.lease_id, cause, {"towards": towards})
    state.lease_changed(lease, tell=True)
    _finish_when_empty(state, lease)


def _leave_queue(state: State, lease: LeaseEntry, towards: LeaseState, cause: str) -> None:
    state.queue.remove(lease.lease_id)
    state.queue_changed = True
    state.unwatch_holder(lease)
    ended_in_queue = LeaseState.CANCELLED if towards is LeaseState.RELEASED else towards
    _finish(state, lease, ended_in_queue, cause)


def member_ended(state: State, lease: LeaseEntry, member: MemberEntry) -> None:
    """The node confirmed that nothing of the member is left."""
    state.books.unbook(lease.key(member))
    node = state.nodes[member.place.node_id]
    node.members.pop(lease.key(member), None)
    member.state = MemberState.ENDED
    member.forget_node()
    state.node_freed(node.node_id)
    book_unclaimed(state, node.node_id)
    state.lease_changed(lease, tell=False)
    _finish_when_empty(state, lease)


def _finish_when_empty(state: State, lease: LeaseEntry) -> None:
    if lease.ending_as is None:
        return
    if all(other.state is MemberState.ENDED for other in lease.members):
        _finish(state, lease, lease.ending_as, lease.explanation.summary)


def _finish(state: State, lease: LeaseEntry, final: LeaseState, cause: str) -> None:
    lease.state = final
    lease.end_unix_s = state.out.unix_s
    lease.generation += 1
    lease.explanation = Explanation(summary=cause)
    state.out.record(f"lease.{final}", lease.lease_id, cause)
    state.lease_changed(lease, tell=True)
    state.remember_ended(lease)


def end_unseen(state: State, node: NodeEntry) -> None:
    """Ends members that were dropped before their node ever heard of them.

    A node that has accepted a desired state without the member, and never spoke of
    it, has nothing of it.
    """
    for key, member in list(node.members.items()):
        if (
            member.state is MemberState.ENDING
            and not member.seen
            and member.dropped_at is not None
            and member.dropped_at <= node.accepted_revision
        ):
            member_ended(state, state.leases[key.lease_id], member)
