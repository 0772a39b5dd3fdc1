"""Stored shape of a lease: one record with all its members inside.

Members and their devices are most of a big record, so their names are short, a
device is a list (UUID, MiB and, for a slice, percent), and what is usual is left out.
"""

from typing import Any

from gpupool.model.caller import Caller, ProcessRef, Role
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId, RequestId
from gpupool.model.lease import (
    Cause,
    DeviceShare,
    Explanation,
    Lease,
    LeaseState,
    Member,
    MemberState,
    Place,
)
from gpupool_allocator.storage.record_request import Json, spec_from_json, spec_to_json


def caller_to_json(caller: Caller) -> Json:
    """Shape of a caller."""
    shape: Json = {"tenant": caller.tenant, "uid": caller.uid}
    if caller.user:
        shape["user"] = caller.user
    if caller.role != "user":
        shape["role"] = caller.role
    return shape


def caller_from_json(shape: Json) -> Caller:
    """Inverse of ``caller_to_json``."""
    return Caller(
        tenant=shape["tenant"],
        user=shape.get("user", ""),
        uid=shape["uid"],
        role=Role(shape.get("role", "user")),
    )


def _share_to_json(share: DeviceShare) -> list[Any]:
    if not share.whole:
        return [share.device_uuid, share.memory_mib, share.share_pct]
    if share.share_pct != 100:
        raise ValueError(
            f"share_pct of the whole device {share.device_uuid}: {share.share_pct}, not 100"
        )
    return [share.device_uuid, share.memory_mib]


def _share_from_json(shape: list[Any]) -> DeviceShare:
    whole = len(shape) == 2
    return DeviceShare(
        device_uuid=DeviceUuid(shape[0]),
        memory_mib=shape[1],
        share_pct=100 if whole else shape[2],
        whole=whole,
    )


def place_to_json(place: Place) -> Json:
    """Shape of a place."""
    shape: Json = {"node": place.node_id}
    if place.devices:
        shape["devices"] = [_share_to_json(each) for each in place.devices]
    if place.cpu_milli:
        shape["cpu_milli"] = place.cpu_milli
    if place.host_memory_mib:
        shape["host_memory_mib"] = place.host_memory_mib
    return shape


def place_from_json(shape: Json) -> Place:
    """Inverse of ``place_to_json``."""
    return Place(
        node_id=NodeId(shape["node"]),
        devices=tuple(_share_from_json(each) for each in shape.get("devices", ())),
        cpu_milli=shape.get("cpu_milli", 0),
        host_memory_mib=shape.get("host_memory_mib", 0),
    )


def _member_to_json(member: Member) -> Json:
    # The place's fields stand beside the member's own: one object less a member.
    shape = place_to_json(member.place)
    shape["group"] = member.group
    shape["rank"] = member.rank
    if member.index != member.rank:
        shape["index"] = member.index
    shape["state"] = member.state
    shape["token"] = member.token
    return shape


def _member_from_json(shape: Json) -> Member:
    rank: int = shape["rank"]
    return Member(
        group=shape["group"],
        index=shape.get("index", rank),
        rank=rank,
        state=MemberState(shape["state"]),
        token=shape["token"],
        place=place_from_json(shape),
    )


def _process_to_json(process: ProcessRef) -> Json:
    return {"node": process.node_id, "pid": process.pid, "start_ticks": process.start_ticks}


def _process_from_json(shape: Json) -> ProcessRef:
    return ProcessRef(
        node_id=NodeId(shape["node"]), pid=shape["pid"], start_ticks=shape["start_ticks"]
    )


def _explanation_to_json(explanation: Explanation) -> Json:
    shape: Json = {}
    if explanation.summary:
        shape["summary"] = explanation.summary
    if explanation.causes:
        shape["causes"] = [
            {"code": each.code, "count": each.count, "unit": each.unit, "message": each.message}
            for each in explanation.causes
        ]
    if explanation.nearest_change:
        shape["nearest_change"] = explanation.nearest_change
    return shape


def _explanation_from_json(shape: Json) -> Explanation:
    return Explanation(
        summary=shape.get("summary", ""),
        causes=tuple(
            Cause(
                code=each["code"],
                count=each["count"],
                unit=each["unit"],
                message=each["message"],
            )
            for each in shape.get("causes", ())
        ),
        nearest_change=shape.get("nearest_change", ""),
    )


def lease_to_json(lease: Lease) -> Json:
    """Shape of a lease without its id, which is the record's key.

    Members' environments are left out: they hold what only the holder should see,
    and nodes report them anew.
    """
    shape: Json = {
        "request_id": lease.request_id,
        "caller": caller_to_json(lease.caller),
        "spec": spec_to_json(lease.spec),
        "state": lease.state,
        "generation": lease.generation,
        "create_unix_s": lease.create_unix_s,
    }
    if lease.members:
        shape["members"] = [_member_to_json(each) for each in lease.members]
    if lease.ttl_s is not None:
        shape["ttl_s"] = lease.ttl_s
    if lease.process is not None:
        shape["process"] = _process_to_json(lease.process)
    if lease.wait_s is not None:
        shape["wait_s"] = lease.wait_s
    if lease.grant_unix_s is not None:
        shape["grant_unix_s"] = lease.grant_unix_s
    if lease.end_unix_s is not None:
        shape["end_unix_s"] = lease.end_unix_s
    if lease.ending_as is not None:
        shape["ending_as"] = lease.ending_as
    if lease.position:
        shape["position"] = lease.position
    if explanation := _explanation_to_json(lease.explanation):
        shape["explanation"] = explanation
    return shape


def lease_from_json(key: str, shape: Json) -> Lease:
    """Inverse of ``lease_to_json``."""
    process = shape.get("process")
    ending_as = shape.get("ending_as")
    return Lease(
        lease_id=LeaseId(key),
        request_id=RequestId(shape["request_id"]),
        caller=caller_from_json(shape["caller"]),
        spec=spec_from_json(shape["spec"]),
        state=LeaseState(shape["state"]),
        generation=shape["generation"],
        members=tuple(_member_from_json(each) for each in shape.get("members", ())),
        ttl_s=shape.get("ttl_s"),
        process=None if process is None else _process_from_json(process),
        wait_s=shape.get("wait_s"),
        create_unix_s=shape["create_unix_s"],
        grant_unix_s=shape.get("grant_unix_s"),
        end_unix_s=shape.get("end_unix_s"),
        ending_as=None if ending_as is None else LeaseState(ending_as),
        position=shape.get("position", 0),
        explanation=_explanation_from_json(shape.get("explanation", {})),
    )
