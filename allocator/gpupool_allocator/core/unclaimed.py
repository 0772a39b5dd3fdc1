"""Assignments that nodes run and the pool does not know.

After an operator restored an old copy of the store, nodes may run work that the
copy has never heard of. It is kept, shown, and ended only by an operator; what it
stands on is booked so that nobody else gets it, also while it ends. Each node's work is
its own: several may claim the same member, and the copy may have it elsewhere.
"""

from dataclasses import replace

from gpupool.model.assignment import AssignmentReport, AssignmentState
from gpupool.model.ids import NodeId
from gpupool_allocator.core.books import BookingError
from gpupool_allocator.core.effects import Delete, Put, UnclaimedRecord
from gpupool_allocator.core.entries import NodeEntry
from gpupool_allocator.core.state import State


def is_unknown(state: State, node: NodeEntry, report: AssignmentReport) -> bool:
    """Whether the pool has never given the node this assignment, as far as it can know.

    Of a lease that it knows, that is one with a later token of an earlier term than the
    store had for that rank. Any other is an older place, or of this term: to be ended.
    """
    lease = state.leases.get(report.key.lease_id)
    if lease is None:
        return True
    if lease.ended or lease.ending_as is not None or report.key in node.members:
        return False
    rank = report.key.rank
    stored = next((each.stored_token for each in lease.members if each.rank == rank), 0)
    return stored < report.token <= state.epoch << 32


def keep_unclaimed(state: State, node: NodeEntry, report: AssignmentReport) -> None:
    """Takes in an assignment that the pool does not know."""
    if report.key in node.unclaimed or report.place is None:
        return
    # What a node runs is on it, whatever name it had when the work was placed.
    here = replace(report, place=replace(report.place, node_id=node.node_id))
    record = UnclaimedRecord(node_id=node.node_id, report=here)
    state.unclaimed[record.key] = record
    node.unclaimed[report.key] = False
    state.out.put("unclaimed", _key(record), Put(record=record))
    known = report.key.lease_id in state.leases
    cause = "the store has the member elsewhere" if known else "the store does not know the lease"
    _record(state, "assignment.unclaimed", record, cause)
    _book(state, node, record)


def book_unclaimed(state: State, node_id: NodeId) -> None:
    """Books unclaimed assignments of a node, as soon as nothing of the book overlaps them."""
    node = state.nodes[node_id]
    for key in node.unclaimed:
        _book(state, node, state.unclaimed[node.unclaimed_key(key)])


def _book(state: State, node: NodeEntry, record: UnclaimedRecord) -> None:
    key, place = record.key, record.report.place
    if place is None or state.books.place_of(key) is not None:
        return
    try:
        state.books.book(key, place, uid=record.report.uid, restored=True)
    except BookingError as overlap:
        # The lease that the old copy has on these devices holds them for now. Its
        # node refuses its older token, so it fails and makes room.
        if not node.unclaimed[record.report.key]:
            node.unclaimed[record.report.key] = True
            state.out.record("assignment.overlaps", node.node_id, str(overlap))


def drop_unclaimed(state: State, record: UnclaimedRecord, cause: str) -> None:
    """The node is told to keep it no longer; booked until the node says that it has ended."""
    if record.report.state is AssignmentState.ENDING:
        return
    ending = replace(record, report=replace(record.report, state=AssignmentState.ENDING))
    state.unclaimed[ending.key] = ending
    state.node_changed(record.node_id)
    state.out.put("unclaimed", _key(ending), Put(record=ending))
    _record(state, "assignment.ending", ending, cause)


def forget_unclaimed(state: State, record: UnclaimedRecord, cause: str) -> None:
    """The assignment is gone from its node."""
    key = record.key
    del state.unclaimed[key], state.nodes[record.node_id].unclaimed[record.report.key]
    if state.books.place_of(key) is not None:
        state.books.unbook(key)
    state.node_freed(record.node_id)
    state.out.put("unclaimed", _key(record), Delete(record=record))
    _record(state, "assignment.gone", record, cause)


def _record(state: State, kind: str, record: UnclaimedRecord, cause: str) -> None:
    key = record.report.key
    details = {"lease_id": key.lease_id, "rank": str(key.rank)}
    state.out.record(kind, record.node_id, cause, details)


def _key(record: UnclaimedRecord) -> str:
    key = record.report.key
    return f"{record.node_id}/{key.lease_id}/{key.rank}"
