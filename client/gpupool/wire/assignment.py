"""What a node must carry out, and what it says about it."""

from collections.abc import Sequence

from gpupool.model import limits
from gpupool.model.assignment import (
    Assignment,
    AssignmentKey,
    AssignmentReport,
    DesiredState,
    HolderWatch,
)
from gpupool.model.ids import LeaseId
from gpupool.v1 import node_pb2 as pb
from gpupool.v1 import pool_pb2
from gpupool.wire import door
from gpupool.wire.enums import ASSIGNMENT_STATES
from gpupool.wire.resources import (
    place_from_proto,
    place_to_proto,
    process_ref_from_proto,
    process_ref_to_proto,
    share_given_to_proto,
    shares_given_from_proto,
)
from gpupool.wire.times import duration_from_proto, duration_to_proto

ASSIGNMENTS_PER_NODE_MAX = limits.MEMBERS_MAX
"""Members without GPUs may sit on one node in numbers."""


def assignment_key_to_proto(key: AssignmentKey) -> pb.AssignmentKey:
    """Names a member's assignment."""
    return pb.AssignmentKey(lease_id=key.lease_id, rank=key.rank)


def assignment_key_from_proto(
    at: str,
    message: pb.AssignmentKey | pb.Assignment | pb.AssignmentReport | pool_pb2.UnclaimedAssignment,
) -> AssignmentKey:
    """Key of any message that carries a lease id and a rank. Raises BadField."""
    return AssignmentKey(
        lease_id=LeaseId(door.identifier(at, "lease_id", message.lease_id)),
        rank=door.integer(at, "rank", message.rank, 0, limits.MEMBERS_MAX - 1),
    )


def assignment_to_proto(assignment: Assignment) -> pb.Assignment:
    """What a node must carry out for one member."""
    return pb.Assignment(
        lease_id=assignment.key.lease_id,
        rank=assignment.key.rank,
        group=assignment.group,
        token=assignment.token,
        place=place_to_proto(assignment.place),
        uid=assignment.uid,
        disconnect_timeout=duration_to_proto(assignment.disconnect_s),
        world_size=assignment.world_size,
    )


def assignment_from_proto(at: str, message: pb.Assignment) -> Assignment:
    """Raises BadField."""
    return Assignment(
        key=assignment_key_from_proto(at, message),
        group=door.group_name(at, "group", message.group),
        token=door.integer(at, "token", message.token, 0, door.INT64_MAX),
        place=place_from_proto(f"{at}.place", message.place),
        uid=door.integer(at, "uid", message.uid, 0, limits.UID_MAX),
        disconnect_s=duration_from_proto(
            at,
            "disconnect_timeout",
            message.disconnect_timeout,
            limits.DISCONNECT_S_MIN,
            limits.DISCONNECT_S_MAX,
        ),
        world_size=door.integer(at, "world_size", message.world_size, 1, limits.MEMBERS_MAX),
    )


def holder_watch_to_proto(watch: HolderWatch) -> pb.HolderWatch:
    """A holding process to watch."""
    return pb.HolderWatch(lease_id=watch.lease_id, process=process_ref_to_proto(watch.process))


def holder_watch_from_proto(at: str, message: pb.HolderWatch) -> HolderWatch:
    """Raises BadField."""
    return HolderWatch(
        lease_id=LeaseId(door.identifier(at, "lease_id", message.lease_id)),
        process=process_ref_from_proto(f"{at}.process", message.process),
    )


def desired_state_to_proto(desired: DesiredState) -> pb.DesiredState:
    """All that a node shall run."""
    return pb.DesiredState(
        revision=desired.revision,
        epoch=desired.epoch,
        assignments=[assignment_to_proto(assignment) for assignment in desired.assignments],
        holders=[holder_watch_to_proto(watch) for watch in desired.holders],
        unclaimed=[assignment_key_to_proto(key) for key in desired.unclaimed],
    )


def desired_state_from_proto(message: pb.DesiredState, at: str = "desired_state") -> DesiredState:
    """Raises BadField; no assignment and no holder's lease may appear twice."""
    door.count(at, "assignments", message.assignments, 0, ASSIGNMENTS_PER_NODE_MAX)
    door.count(at, "holders", message.holders, 0, ASSIGNMENTS_PER_NODE_MAX)
    door.count(at, "unclaimed", message.unclaimed, 0, ASSIGNMENTS_PER_NODE_MAX)
    assignments = tuple(
        assignment_from_proto(f"{at}.assignments[{index}]", assignment)
        for index, assignment in enumerate(message.assignments)
    )
    door.unique(at, "assignments", [assignment.key for assignment in assignments])
    holders = tuple(
        holder_watch_from_proto(f"{at}.holders[{index}]", watch)
        for index, watch in enumerate(message.holders)
    )
    door.unique(at, "holders", [watch.lease_id for watch in holders])
    unclaimed = tuple(
        assignment_key_from_proto(f"{at}.unclaimed[{index}]", key)
        for index, key in enumerate(message.unclaimed)
    )
    door.unique(at, "unclaimed", unclaimed)
    return DesiredState(
        revision=door.integer(at, "revision", message.revision, 0, door.INT64_MAX),
        epoch=door.integer(at, "epoch", message.epoch, 0, door.INT64_MAX),
        assignments=assignments,
        holders=holders,
        unclaimed=unclaimed,
    )


def assignment_report_to_proto(report: AssignmentReport) -> pb.AssignmentReport:
    """What a node says about one assignment."""
    message = pb.AssignmentReport(
        lease_id=report.key.lease_id,
        rank=report.key.rank,
        token=report.token,
        state=ASSIGNMENT_STATES.to_proto(report.state),
        environment=report.environment,
        reason=report.reason,
        uid=report.uid,
        given=[share_given_to_proto(share) for share in report.given],
        degraded=report.degraded,
    )
    if report.place is not None:
        message.place.CopyFrom(place_to_proto(report.place))
    return message


def assignment_report_from_proto(at: str, message: pb.AssignmentReport) -> AssignmentReport:
    """Raises BadField."""
    return AssignmentReport(
        key=assignment_key_from_proto(at, message),
        token=door.integer(at, "token", message.token, 0, door.INT64_MAX),
        state=ASSIGNMENT_STATES.from_proto(at, "state", message.state),
        environment=door.environment(at, "environment", message.environment),
        reason=door.long_text(at, "reason", message.reason),
        place=(
            place_from_proto(f"{at}.place", message.place) if message.HasField("place") else None
        ),
        uid=door.integer(at, "uid", message.uid, 0, limits.UID_MAX),
        given=shares_given_from_proto(at, message.given),
        degraded=door.long_text(at, "degraded", message.degraded),
    )


def assignment_reports_from_proto(
    at: str, messages: Sequence[pb.AssignmentReport]
) -> tuple[AssignmentReport, ...]:
    """Reports of one message. Raises BadField, also where one appears twice."""
    door.count(at, "assignments", messages, 0, ASSIGNMENTS_PER_NODE_MAX)
    reports = tuple(
        assignment_report_from_proto(f"{at}.assignments[{index}]", report)
        for index, report in enumerate(messages)
    )
    door.unique(at, "assignments", [(report.key, report.token) for report in reports])
    return reports
