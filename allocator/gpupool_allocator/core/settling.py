"""The book and a node's own account of what it has, brought together both ways.

An account is everything that a node says in Hello, or in a report that is marked full;
agents send one at each connection and then about one a minute. What it does not name
is not there, except for what the node could not know of when it made it: nothing is
taken for lost before the node has accepted a desired state that told it.
"""

from collections.abc import Iterable
from dataclasses import replace

from gpupool.model.assignment import AssignmentReport, AssignmentState, DeviceReport, Report
from gpupool.model.lease import LeaseState, MemberState
from gpupool_allocator.core.ending import begin_end, end_unseen, member_ended
from gpupool_allocator.core.entries import RUNS_ON_NODE, LeaseEntry, MemberEntry, NodeEntry
from gpupool_allocator.core.reporting import (
    take_assignment_reports,
    take_device_reports,
    take_faults,
    take_holder_ends,
    take_process_notes,
)
from gpupool_allocator.core.state import State
from gpupool_allocator.core.unclaimed import forget_unclaimed, is_unknown, keep_unclaimed


def take_report(state: State, node: NodeEntry, report: Report, now: float) -> None:
    """Takes in all of a report but its inventory."""
    # A revision that was never sent cannot have been accepted.
    report = replace(report, accepted_revision=min(report.accepted_revision, node.revision))
    if report.full:
        _settle_holders(state, node, report)
    take_device_reports(state, node, report.devices)
    if report.full:
        _settle_devices(state, node, report.devices)
        settle_assignments(
            state, node, report.assignments, accepted=report.accepted_revision, now=now
        )
    else:
        take_assignment_reports(state, node, report.assignments, now)
    if report.accepted_revision > node.accepted_revision:
        node.accepted_revision = report.accepted_revision
        end_unseen(state, node)
    take_faults(state, node, report.faults, complete=report.full)
    take_process_notes(state, node, report.process_notes)
    take_holder_ends(state, node.node_id, report.ended_holders)
    _tell_again_if_behind(state, node, now)


def settle_assignments(
    state: State,
    node: NodeEntry,
    reports: Iterable[AssignmentReport],
    *,
    accepted: int | None,
    now: float,
) -> None:
    """Takes in a node's complete account of its assignments, and corrects what differs.

    ``accepted``: the revision that the node had accepted when it made the account. None:
    it was made for Hello, when nothing that was sent before can still arrive.
    """
    reports = tuple(reports)
    has_all = accepted is None or accepted >= node.revision
    strange = [each for each in reports if has_all and _is_strange(state, node, each)]
    take_assignment_reports(state, node, reports, now)
    said = {
        (report.key, report.token)
        for report in reports
        if report.state is not AssignmentState.ENDED
    }
    for key, member in list(node.members.items()):
        if (key, member.token) in said:
            member.losses = 0 if member.state is MemberState.READY else member.losses
        elif _was_told(member, accepted):
            lease = state.leases[key.lease_id]
            _settle_unnamed(state, node, lease, member, in_hello=accepted is None)
    keys = {key for key, _ in said}
    for key in [key for key in node.unclaimed if key not in keys]:
        record = state.unclaimed[node.unclaimed_key(key)]
        forget_unclaimed(state, record, "the node does not run it any more")
    for report in strange:
        _settle_strange(state, node, report)


def _was_told(member: MemberEntry, accepted: int | None) -> bool:
    """Whether the account was made by a node that knew what it shall do of the member."""
    if accepted is None:
        return True
    told_at = member.dropped_at if member.state is MemberState.ENDING else member.named_at
    return told_at is not None and told_at <= accepted


def _settle_unnamed(
    state: State, node: NodeEntry, lease: LeaseEntry, member: MemberEntry, *, in_hello: bool
) -> None:
    """The book has a member on the node, and the node does not have it."""
    was = member.state
    if was is MemberState.PREPARING and in_hello:
        # Not lost but on its way, as far as anybody knows: it is what it was.
        member.begin_anew(member.token)
        return
    cause = f"node {node.node_id} does not run it any more"
    if was in RUNS_ON_NODE:
        times, how = _count_loss(lease, member)
        if times >= state.settings.prepare_attempts:
            member.seen = False
            begin_end(state, lease, LeaseState.FAILED, f"{cause} ({how})")
            return
    kind = "member.ended" if was is MemberState.ENDING else "member.preparing"
    state.out.record(kind, lease.lease_id, cause, {"rank": str(member.rank)})
    if was is MemberState.ENDING:
        member_ended(state, lease, member)
        return
    # Under a new token: the node may have accepted later ones on the same device since.
    member.begin_anew(state.next_token())
    state.node_changed(node.node_id)
    if was is MemberState.READY:
        lease.generation += 1
    state.lease_changed(lease, tell=was is MemberState.READY)


def _count_loss(lease: LeaseEntry, member: MemberEntry) -> tuple[int, str]:
    """How often it was lost like this, also in words; it is tried again a bounded number of times.

    Lost while it was prepared is a failure to prepare. A ready one may be lost now and
    then in a long life, by reboots: only losses between which no account named it count.
    """
    if member.state is MemberState.PREPARING:
        lease.prepare_failures += 1
        return lease.prepare_failures, f"attempt {lease.prepare_failures}"
    member.losses += 1
    return member.losses, f"prepared and lost {member.losses} times"


def _is_strange(state: State, node: NodeEntry, report: AssignmentReport) -> bool:
    """Whether the node has something that it should be ending, or not have."""
    if report.state is AssignmentState.ENDED:
        return False
    ending = report.state is AssignmentState.ENDING
    member = node.members.get(report.key)
    if member is not None and member.token == report.token:
        return member.state not in RUNS_ON_NODE and not ending
    if report.key in node.unclaimed:
        kept = state.unclaimed[node.unclaimed_key(report.key)].report
        return kept.state is AssignmentState.ENDING and not ending
    return not ending or is_unknown(state, node, report)


def _settle_strange(state: State, node: NodeEntry, report: AssignmentReport) -> None:
    """Keeps what nobody knows, and has the rest ended by the next desired state."""
    if report.place and report.key not in node.unclaimed and is_unknown(state, node, report):
        keep_unclaimed(state, node, report)
        return
    state.node_changed(node.node_id)
    state.out.record(
        "assignment.unwanted",
        node.node_id,
        "the book does not have it there: the node is told again what it shall run",
        {
            "lease_id": report.key.lease_id,
            "rank": str(report.key.rank),
            "token": str(report.token),
            "state": report.state,
        },
    )


def _settle_devices(state: State, node: NodeEntry, reports: Iterable[DeviceReport]) -> None:
    """A device that a complete account leaves out is confirmed by nobody."""
    named = {report.uuid for report in reports}
    for uuid, entry in node.devices.items():
        if entry.confirmed and uuid not in named:
            entry.confirmed = False
            state.books.offer_device(uuid, False)
            if entry.present:  # else its absence is history already
                cause = f"node {node.node_id} says nothing of it any more"
                state.out.record("device.unconfirmed", uuid, cause)


def _settle_holders(state: State, node: NodeEntry, report: Report) -> None:
    """A node watches exactly the holders that it was asked to watch, or says how they ended."""
    if report.accepted_revision < node.revision:
        return
    told = {*report.alive_holders, *(end.lease_id for end in report.ended_holders)}
    wrong = [
        *(("holder.unwatched", each, "not ") for each in node.held_leases if each not in told),
        *(
            ("holder.unwanted", each, "")
            for each in report.alive_holders
            if each not in node.held_leases
        ),
    ]
    for kind, lease_id, what in wrong:
        cause = f"node {node.node_id} does {what}watch its process: it is told again"
        state.out.record(kind, lease_id, cause)
        state.node_changed(node.node_id)


def _tell_again_if_behind(state: State, node: NodeEntry, now: float) -> None:
    """A node that speaks and has not taken on a desired state for too long gets it again."""
    if node.accepted_revision >= node.revision:
        node.behind = None
    elif node.behind is None or node.accepted_revision >= node.behind[0]:
        node.behind = (node.revision, now)
    elif now - node.behind[1] >= state.settings.heartbeat_timeout_s:
        waited_s = now - node.behind[1]
        state.out.record(
            "node.told_again",
            node.node_id,
            f"it has not accepted what it shall run for {waited_s:.0f} s",
            {"revision": str(node.behind[0]), "accepted": str(node.accepted_revision)},
        )
        node.behind = None
        state.node_changed(node.node_id)
