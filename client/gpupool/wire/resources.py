"""Leases, members and places; the request itself is in ``gpupool.wire.request``."""

from collections.abc import Sequence

from gpupool.model import limits
from gpupool.model.caller import Caller, ProcessRef, Role
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId, RequestId
from gpupool.model.lease import (
    NO_EXPLANATION,
    Cause,
    DeviceShare,
    Explanation,
    Lease,
    Member,
    Place,
    ShareGiven,
)
from gpupool.v1 import resources_pb2 as pb
from gpupool.wire import door
from gpupool.wire.enums import LEASE_STATES, MEMBER_STATES
from gpupool.wire.errors import BadField
from gpupool.wire.request import lease_spec_from_proto, lease_spec_to_proto
from gpupool.wire.times import (
    duration_from_proto,
    duration_to_proto,
    timestamp_from_proto,
    timestamp_to_proto,
)

__all__ = [
    "caller_from_proto",
    "caller_to_proto",
    "cause_from_proto",
    "cause_to_proto",
    "device_share_from_proto",
    "device_share_to_proto",
    "explanation_from_proto",
    "explanation_to_proto",
    "lease_from_proto",
    "lease_spec_from_proto",
    "lease_spec_to_proto",
    "lease_to_proto",
    "member_from_proto",
    "member_to_proto",
    "place_from_proto",
    "place_to_proto",
    "process_ref_from_proto",
    "process_ref_to_proto",
    "share_given_to_proto",
    "shares_given_from_proto",
]

PID_MAX = 4_194_304
"""Linux's own limit (PID_MAX_LIMIT)."""

_CAUSES_MAX = 1024
_ROLES = {role.value: role for role in Role}


def device_share_to_proto(share: DeviceShare) -> pb.DeviceShare:
    """Part of a device at a member's place."""
    return pb.DeviceShare(
        device_uuid=share.device_uuid,
        share_pct=share.share_pct,
        memory_mib=share.memory_mib,
        whole=share.whole,
    )


def device_share_from_proto(at: str, message: pb.DeviceShare) -> DeviceShare:
    """Raises BadField; a whole device has share 100."""
    least = 100 if message.whole else 0
    return DeviceShare(
        device_uuid=DeviceUuid(door.device_uuid(at, "device_uuid", message.device_uuid)),
        share_pct=door.integer(at, "share_pct", message.share_pct, least, 100),
        memory_mib=door.integer(at, "memory_mib", message.memory_mib, 0, limits.GPU_MEMORY_MIB_MAX),
        whole=message.whole,
    )


def share_given_to_proto(share: ShareGiven) -> pb.ShareGiven:
    """What a slice really gets."""
    return pb.ShareGiven(
        device_uuid=share.device_uuid,
        sm_count=share.sm_count,
        share_milli_pct=share.share_milli_pct,
    )


def shares_given_from_proto(at: str, messages: Sequence[pb.ShareGiven]) -> tuple[ShareGiven, ...]:
    """What the slices of one member get. Raises BadField; no device may be named twice."""
    door.count(at, "given", messages, 0, limits.GPUS_PER_MEMBER_MAX)
    found = tuple(
        ShareGiven(
            device_uuid=DeviceUuid(
                door.device_uuid(f"{at}.given[{index}]", "device_uuid", each.device_uuid)
            ),
            sm_count=door.integer(
                f"{at}.given[{index}]", "sm_count", each.sm_count, 0, limits.SM_COUNT_MAX
            ),
            share_milli_pct=door.integer(
                f"{at}.given[{index}]", "share_milli_pct", each.share_milli_pct, 0, 100_000
            ),
        )
        for index, each in enumerate(messages)
    )
    door.unique(at, "given", [share.device_uuid for share in found])
    return found


def place_to_proto(place: Place) -> pb.Place:
    """Where a member runs."""
    return pb.Place(
        node_id=place.node_id,
        devices=[device_share_to_proto(share) for share in place.devices],
        cpu_milli=place.cpu_milli,
        host_memory_mib=place.host_memory_mib,
    )


def place_from_proto(at: str, message: pb.Place) -> Place:
    """Raises BadField; no device may be named twice."""
    door.count(at, "devices", message.devices, 0, limits.GPUS_PER_MEMBER_MAX)
    devices = tuple(
        device_share_from_proto(f"{at}.devices[{index}]", share)
        for index, share in enumerate(message.devices)
    )
    door.unique(at, "devices", [share.device_uuid for share in devices])
    return Place(
        node_id=NodeId(door.node_id(at, "node_id", message.node_id)),
        devices=devices,
        cpu_milli=door.integer(at, "cpu_milli", message.cpu_milli, 0, limits.CPU_MILLI_MAX),
        host_memory_mib=door.integer(
            at, "host_memory_mib", message.host_memory_mib, 0, limits.HOST_MEMORY_MIB_MAX
        ),
    )


def member_to_proto(member: Member) -> pb.Member:
    """One member."""
    return pb.Member(
        group=member.group,
        index=member.index,
        rank=member.rank,
        state=MEMBER_STATES.to_proto(member.state),
        token=member.token,
        place=place_to_proto(member.place),
        environment=member.environment,
        given=[share_given_to_proto(share) for share in member.given],
        degraded=member.degraded,
    )


def member_from_proto(at: str, message: pb.Member) -> Member:
    """Raises BadField; an empty environment reads as None, for "not reported"."""
    environment = door.environment(at, "environment", message.environment)
    return Member(
        group=door.group_name(at, "group", message.group),
        index=door.integer(at, "index", message.index, 0, limits.REPLICAS_MAX - 1),
        rank=door.integer(at, "rank", message.rank, 0, limits.MEMBERS_MAX - 1),
        state=MEMBER_STATES.from_proto(at, "state", message.state),
        token=door.integer(at, "token", message.token, 0, door.INT64_MAX),
        place=place_from_proto(f"{at}.place", message.place),
        environment=environment or None,
        given=shares_given_from_proto(at, message.given),
        degraded=door.long_text(at, "degraded", message.degraded),
    )


def caller_to_proto(caller: Caller) -> pb.Caller:
    """Sender of a command."""
    return pb.Caller(tenant=caller.tenant, user=caller.user, uid=caller.uid, role=caller.role.value)


def caller_from_proto(at: str, message: pb.Caller) -> Caller:
    """Raises BadField; an empty role is that of a user."""
    role = _ROLES.get(message.role or Role.USER.value)
    if role is None:
        raise BadField(door.path(at, "role"), message.role, ", ".join(_ROLES))
    return Caller(
        tenant=door.text(at, "tenant", message.tenant) or "default",
        user=door.text(at, "user", message.user),
        uid=door.integer(at, "uid", message.uid, 0, limits.UID_MAX),
        role=role,
    )


def process_ref_to_proto(process: ProcessRef) -> pb.ProcessRef:
    """A process on a pool node."""
    return pb.ProcessRef(node_id=process.node_id, pid=process.pid, start_ticks=process.start_ticks)


def process_ref_from_proto(at: str, message: pb.ProcessRef) -> ProcessRef:
    """Raises BadField for pids that no Linux process has."""
    return ProcessRef(
        node_id=NodeId(door.node_id(at, "node_id", message.node_id)),
        pid=door.integer(at, "pid", message.pid, 1, PID_MAX),
        start_ticks=door.integer(at, "start_ticks", message.start_ticks, 0, door.INT64_MAX),
    )


def cause_to_proto(cause: Cause) -> pb.Cause:
    """One counted cause."""
    return pb.Cause(code=cause.code, count=cause.count, unit=cause.unit, message=cause.message)


def cause_from_proto(at: str, message: pb.Cause) -> Cause:
    """Raises BadField."""
    return Cause(
        code=door.word(at, "code", message.code),
        count=door.integer(at, "count", message.count, 0, door.INT64_MAX),
        unit=door.text(at, "unit", message.unit),
        message=door.long_text(at, "message", message.message),
    )


def causes_from_proto(at: str, messages: Sequence[pb.Cause]) -> tuple[Cause, ...]:
    """Causes of one answer; raises BadField for more than 1024."""
    door.count(at, "causes", messages, 0, _CAUSES_MAX)
    return tuple(
        cause_from_proto(f"{at}.causes[{index}]", cause) for index, cause in enumerate(messages)
    )


def explanation_to_proto(explanation: Explanation) -> pb.Explanation:
    """Why, with its counted causes."""
    return pb.Explanation(
        summary=explanation.summary,
        causes=[cause_to_proto(cause) for cause in explanation.causes],
        nearest_change=explanation.nearest_change,
    )


def explanation_from_proto(at: str, message: pb.Explanation) -> Explanation:
    """Raises BadField."""
    return Explanation(
        summary=door.long_text(at, "summary", message.summary),
        causes=causes_from_proto(at, message.causes),
        nearest_change=door.long_text(at, "nearest_change", message.nearest_change),
    )


def lease_to_proto(lease: Lease) -> pb.Lease:
    """The lease as holders and operators see it; ``wait_s`` stays in the pool."""
    message = pb.Lease(
        lease_id=lease.lease_id,
        generation=lease.generation,
        state=LEASE_STATES.to_proto(lease.state),
        spec=lease_spec_to_proto(lease.spec),
        members=[member_to_proto(member) for member in lease.members],
        position=lease.position,
        caller=caller_to_proto(lease.caller),
        request_id=lease.request_id,
    )
    if lease.explanation != NO_EXPLANATION:
        message.explanation.CopyFrom(explanation_to_proto(lease.explanation))
    if lease.create_unix_s:
        message.create_time.CopyFrom(timestamp_to_proto(lease.create_unix_s))
    if lease.grant_unix_s is not None:
        message.grant_time.CopyFrom(timestamp_to_proto(lease.grant_unix_s))
    if lease.end_unix_s is not None:
        message.end_time.CopyFrom(timestamp_to_proto(lease.end_unix_s))
    if lease.expire_unix_s is not None:
        message.expire_time.CopyFrom(timestamp_to_proto(lease.expire_unix_s))
    if lease.ttl_s is not None:
        message.ttl.CopyFrom(duration_to_proto(lease.ttl_s))
    if lease.process is not None:
        message.process.CopyFrom(process_ref_to_proto(lease.process))
    return message


def lease_from_proto(message: pb.Lease, at: str = "lease") -> Lease:
    """The lease of a message, without ``wait_s``. Raises BadField."""
    door.count(at, "members", message.members, 0, limits.MEMBERS_MAX)
    return Lease(
        lease_id=LeaseId(door.identifier(at, "lease_id", message.lease_id)),
        request_id=RequestId(door.request_id(at, "request_id", message.request_id)),
        caller=caller_from_proto(f"{at}.caller", message.caller),
        spec=lease_spec_from_proto(message.spec, f"{at}.spec"),
        state=LEASE_STATES.from_proto(at, "state", message.state),
        generation=door.integer(at, "generation", message.generation, 0, door.INT64_MAX),
        members=tuple(
            member_from_proto(f"{at}.members[{index}]", member)
            for index, member in enumerate(message.members)
        ),
        ttl_s=_ttl_s(at, message),
        process=(
            process_ref_from_proto(f"{at}.process", message.process)
            if message.HasField("process")
            else None
        ),
        create_unix_s=timestamp_from_proto(at, "create_time", message.create_time),
        grant_unix_s=(
            timestamp_from_proto(at, "grant_time", message.grant_time)
            if message.HasField("grant_time")
            else None
        ),
        end_unix_s=(
            timestamp_from_proto(at, "end_time", message.end_time)
            if message.HasField("end_time")
            else None
        ),
        expire_unix_s=(
            timestamp_from_proto(at, "expire_time", message.expire_time)
            if message.HasField("expire_time")
            else None
        ),
        position=door.integer(at, "position", message.position, 0, door.INT32_MAX),
        explanation=(
            explanation_from_proto(f"{at}.explanation", message.explanation)
            if message.HasField("explanation")
            else NO_EXPLANATION
        ),
    )


def _ttl_s(at: str, message: pb.Lease) -> float | None:
    if not message.HasField("ttl"):
        return None
    return duration_from_proto(at, "ttl", message.ttl, limits.TTL_S_MIN, limits.TTL_S_MAX)
