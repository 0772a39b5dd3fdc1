"""What connected nodes say: assignments, devices, holders."""

from collections.abc import Iterable

from gpupool.model.assignment import (
    AssignmentReport,
    AssignmentState,
    DeviceReport,
    FaultReport,
    HolderEnd,
    ProcessNote,
    ProcessNoteKind,
)
from gpupool.model.ids import DeviceUuid, NodeId
from gpupool.model.inventory import StrayCause, StrayProcess
from gpupool.model.lease import Explanation, LeaseState, MemberState, Place
from gpupool.model.request import OnFailure
from gpupool_allocator.core.books import BookingError
from gpupool_allocator.core.capacity import FAULTY, UNCLEAN, UnclaimedKey
from gpupool_allocator.core.clocks import ClockKind
from gpupool_allocator.core.ending import begin_end, member_ended
from gpupool_allocator.core.entries import (
    DeviceEntry,
    FaultName,
    LeaseEntry,
    MemberEntry,
    NodeEntry,
)
from gpupool_allocator.core.granting import place_on_node, place_text, replan_member
from gpupool_allocator.core.state import State
from gpupool_allocator.core.unclaimed import book_unclaimed, forget_unclaimed

FAULTS_PER_NODE_MAX = 1024
"""Open faults remembered of one node; it names no more of them in one report."""


def take_assignment_reports(
    state: State, node: NodeEntry, reports: Iterable[AssignmentReport], now: float
) -> None:
    """Takes in what a node says of its assignments."""
    for report in reports:
        member = node.members.get(report.key)
        if member is not None and member.token == report.token:
            _take_report(state, state.leases[report.key.lease_id], member, report, now)
        elif (record := state.unclaimed.get(node.unclaimed_key(report.key))) is not None:
            same = record.report.token == report.token
            if same and report.state is AssignmentState.ENDED:
                forget_unclaimed(state, record, "the node ended it")
        # Anything else speaks of an older place: the next desired state ends it there.


def _take_report(
    state: State, lease: LeaseEntry, member: MemberEntry, report: AssignmentReport, now: float
) -> None:
    member.seen = True
    match report.state:
        case AssignmentState.PREPARED:
            _member_prepared(state, lease, member, report)
        case AssignmentState.FAILED:
            _member_refused(state, lease, member, report.reason, now)
        case AssignmentState.ENDED:
            if member.state is MemberState.ENDING:
                member_ended(state, lease, member)
            else:
                _member_lost(state, lease, member, report.reason or "its node ended it")
        case AssignmentState.PREPARING | AssignmentState.ENDING:
            pass


def _member_prepared(
    state: State, lease: LeaseEntry, member: MemberEntry, report: AssignmentReport
) -> None:
    if member.state is MemberState.ENDING:
        return
    told = (report.environment, report.given, report.degraded)
    known = (member.environment, member.given, member.degraded)
    news = told != known or member.state is not MemberState.READY
    was_degraded = member.degraded
    member.environment, member.given, member.degraded = told
    member.state = MemberState.READY
    ready = all(other.state is MemberState.READY for other in lease.members)
    if lease.state is LeaseState.GRANTED and ready:
        lease.state = LeaseState.ACTIVE
        state.out.record("lease.active", lease.lease_id, "every node has prepared")
        state.lease_changed(lease, tell=True)
    elif news and ready:
        state.told[lease.lease_id] = None
    if bool(was_degraded) != bool(member.degraded):
        state.out.record(
            "lease.degraded" if member.degraded else "lease.restored",
            lease.lease_id,
            member.degraded or was_degraded,
            {"rank": str(member.rank), "node_id": member.place.node_id},
        )


def _member_refused(
    state: State, lease: LeaseEntry, member: MemberEntry, reason: str, now: float
) -> None:
    """The node could not prepare the member, and has nothing of it.

    The member gets another place, a bounded number of times and never again the
    node that refused it: the refusal is news about that node, not bad luck. Where the
    node has taken a GPU of the place out as well, it is news about that GPU alone.
    """
    if member.state is MemberState.ENDING:
        member_ended(state, lease, member)
        return
    node_id = member.place.node_id
    state.out.record(
        "member.refused", lease.lease_id, reason, {"rank": str(member.rank), "node_id": node_id}
    )
    places = (state.books.device(share.device_uuid) for share in member.place.devices)
    if all(device.offered for device in places):
        lease.excluded.add(node_id)
    lease.prepare_failures += 1
    cause = f"node {node_id} could not prepare it: {reason}"
    if lease.prepare_failures >= state.settings.prepare_attempts:
        begin_end(state, lease, LeaseState.FAILED, f"{cause} (attempt {lease.prepare_failures})")
        member_ended(state, lease, member)
        return
    key = lease.key(member)
    state.books.unbook(key)
    state.nodes[node_id].members.pop(key)
    state.node_changed(node_id)
    state.node_freed(node_id)
    book_unclaimed(state, node_id)
    found = replan_member(state, lease, member, now)
    if isinstance(found, Place) and _take_new_place(state, lease, member, found):
        return
    why = "the books refused it" if isinstance(found, Place) else found.explanation.summary
    member.state = MemberState.ENDED
    begin_end(state, lease, LeaseState.FAILED, f"{cause}; no other place: {why}")


def _take_new_place(state: State, lease: LeaseEntry, member: MemberEntry, place: Place) -> bool:
    try:
        state.books.book(
            lease.key(member), place, uid=lease.spec.uid, shared_trust=lease.spec.shared_trust
        )
    except BookingError as refused:
        state.out.alarm("booking_refused", f"books refused a validated replacement: {refused}")
        return False
    member.place = place
    member.begin_anew(state.next_token())
    lease.generation += 1
    place_on_node(state, lease, member)
    state.out.record(
        "member.replaced",
        lease.lease_id,
        "its node could not prepare it",
        {f"member.{member.rank}": place_text(member)},
    )
    state.lease_changed(lease, tell=True)
    return True


def _member_lost(state: State, lease: LeaseEntry, member: MemberEntry, reason: str) -> None:
    """A running member is gone from its node."""
    if not lease.running:
        return
    if lease.spec.on_failure is OnFailure.WAIT:
        # The node has buried the old token, so the member gets a new one.
        member.begin_anew(state.next_token())
        lease.generation += 1
        state.node_changed(member.place.node_id)
        state.out.record("member.preparing", lease.lease_id, reason, {"rank": str(member.rank)})
        state.lease_changed(lease, tell=True)
        return
    begin_end(state, lease, LeaseState.FAILED, f"member {member.rank}: {reason}")
    member_ended(state, lease, member)


def take_device_reports(state: State, node: NodeEntry, reports: Iterable[DeviceReport]) -> None:
    """Takes in the state of devices: clean, failed, strays."""
    for report in reports:
        entry = node.devices.get(report.uuid)
        if entry is None:
            continue  # reported before its inventory; the full state follows with it
        was_offered, had_failed = entry.offered, entry.failed
        entry.confirmed = True
        entry.clean = report.clean
        entry.failed = report.failed
        entry.reason = report.reason
        _take_strays(state, node, entry, report)
        cause = FAULTY if entry.failed else UNCLEAN
        state.books.offer_device(report.uuid, entry.offered, cause)
        if entry.offered and not was_offered:
            state.node_freed(node.node_id)
        if report.failed != had_failed:
            kind = "device.failed" if report.failed else "device.recovered"
            entry.lost_unix_s = node.seen_before_unix_s if report.failed else 0.0
            state.record_changed(node.node_id)
            state.out.record(kind, report.uuid, report.reason or "reported by its node")
        if report.failed and not had_failed:
            device_lost(state, report.uuid, report.reason or "the driver has lost it")


STRAY_CAUSES: dict[str, str] = {
    StrayCause.NO_LEASE: "and belongs to no lease",
    StrayCause.OUTLIVED: "although its lease has ended",
    StrayCause.ELSEWHERE: "although its lease has other devices",
    StrayCause.BESIDE_MPS: "beside the MPS server of its lease's slice",
    StrayCause.OVER_MEMORY: "with more memory than its lease's slice was given",
}
"""Why a process should not be on a device; agents of the first release do not tell."""


def _take_strays(state: State, node: NodeEntry, entry: DeviceEntry, report: DeviceReport) -> None:
    """Each process that is on a device and should not be, once when it comes and when it goes."""
    before = {stray.pid: stray for stray in entry.strays}
    named = {stray.pid: stray for stray in report.strays}
    for pid, stray in named.items():
        if pid not in before or stray.cause != before[pid].cause:
            why = STRAY_CAUSES.get(stray.cause, STRAY_CAUSES[StrayCause.NO_LEASE])
            cause = f"{_process_text(stray)} is on it {why}"
            state.out.record("device.stray", report.uuid, cause, _process_details(node, stray))
    for pid, stray in before.items():
        if pid not in named:
            cause = f"{_process_text(stray)} is not named by its node any more"
            state.out.record("device.stray_gone", report.uuid, cause, _process_details(node, stray))
    entry.strays = report.strays
    if report.strays:
        state.with_strays[report.uuid] = len(report.strays)
    else:
        state.with_strays.pop(report.uuid, None)


def take_process_notes(state: State, node: NodeEntry, notes: Iterable[ProcessNote]) -> None:
    """Puts what an agent did to processes into the history."""
    for note in notes:
        what, details = _process_text(note.process), _process_details(node, note.process)
        match note.kind:
            case ProcessNoteKind.STOPPED:
                cause = f"its node ended {what} on it by {note.reason}"
                state.out.record("process.stopped", note.device_uuid, cause, details)
            case ProcessNoteKind.ADOPTED:
                cause = f"{note.actor} took {what} on {note.device_uuid} into it"
                details = {**details, "device_uuid": note.device_uuid, "actor": note.actor}
                subject = note.process.lease_id or note.device_uuid
                state.out.record("process.adopted", subject, cause, details)


def _process_text(stray: StrayProcess) -> str:
    who = stray.user or f"uid {stray.uid}"
    return f"process {stray.pid} of {who} ({stray.command or 'unknown command'})"


def _process_details(node: NodeEntry, stray: StrayProcess) -> dict[str, str]:
    return {
        "node_id": node.node_id,
        "pid": str(stray.pid),
        "uid": str(stray.uid),
        "user": stray.user,
        "command": stray.command,
        "memory_mib": str(stray.memory_mib),
        "why": stray.cause,
        "lease_id": stray.lease_id,
    }


def device_lost(state: State, uuid: DeviceUuid, reason: str) -> None:
    """Applies each lease's policy to the loss of a device."""
    for key in state.books.keys_on(uuid):
        lease = None if isinstance(key, UnclaimedKey) else state.leases.get(key.lease_id)
        if lease is None or not lease.running:
            continue
        if lease.spec.on_failure is OnFailure.WAIT:
            lease.generation += 1
            lease.explanation = Explanation(summary=f"device {uuid}: {reason}")
            state.lease_changed(lease, tell=True)
        else:
            begin_end(state, lease, LeaseState.FAILED, f"device {uuid}: {reason}")


def take_faults(
    state: State, node: NodeEntry, reports: Iterable[FaultReport], *, complete: bool
) -> None:
    """Puts what an agent found wrong into the history; ``complete``: it named every open one."""
    reports = tuple(reports)
    for fault in reports:
        name = (fault.code, fault.device_uuid)
        if not fault.open:
            node.faults.pop(name, None)
        elif name in node.faults:
            continue  # told once more
        else:
            node.faults[name] = None
        _record_fault(state, node, name, fault.evidence, is_open=fault.open)
    if complete:
        named = {(fault.code, fault.device_uuid) for fault in reports if fault.open}
        for name in [name for name in node.faults if name not in named]:
            del node.faults[name]
            cause = f"node {node.node_id} does not name it any more"
            _record_fault(state, node, name, cause, is_open=False)
    while len(node.faults) > FAULTS_PER_NODE_MAX:
        del node.faults[next(iter(node.faults))]


def _record_fault(
    state: State, node: NodeEntry, name: FaultName, cause: str, *, is_open: bool
) -> None:
    code, device_uuid = name
    state.record_changed(node.node_id)
    state.out.record(
        "fault.opened" if is_open else "fault.closed",
        device_uuid or node.node_id,
        cause,
        {"code": code, "node_id": node.node_id},
    )


def take_holder_ends(state: State, node_id: NodeId, ends: Iterable[HolderEnd]) -> None:
    """Ends the leases of holding processes that are gone."""
    for end in ends:
        lease = state.leases.get(end.lease_id)
        held_here = (
            lease is not None
            and lease.process is not None
            and lease.process.node_id == node_id
            and lease.process.pid == end.pid
        )
        if lease is not None and held_here:
            begin_end(
                state,
                lease,
                LeaseState.RELEASED if end.reason == "exited" else LeaseState.EXPIRED,
                f"its holder, process {end.pid} on node {node_id}, is gone: {end.reason}",
            )


def renew(state: State, lease: LeaseEntry, now: float) -> bool:
    """Moves a TTL lease's deadline; False for a lease that cannot be renewed."""
    if lease.ended or lease.state is LeaseState.RELEASING:
        return False
    if lease.ttl_s is not None:
        state.clocks.set(lease.lease_id, ClockKind.HOLDER, now + lease.ttl_s)
    return True
