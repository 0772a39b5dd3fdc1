"""Stored shapes of a hold and of an unclaimed assignment."""

from gpupool.model.assignment import AssignmentKey, AssignmentReport, AssignmentState
from gpupool.model.hold import Hold, HoldKind, HoldScope
from gpupool.model.ids import HoldId, LeaseId, NodeId
from gpupool_allocator.core.effects import UnclaimedRecord
from gpupool_allocator.storage.record_lease import (
    caller_from_json,
    caller_to_json,
    place_from_json,
    place_to_json,
)
from gpupool_allocator.storage.record_request import Json


def hold_to_json(hold: Hold) -> Json:
    """Shape of a hold without its id, which is the record's key."""
    shape: Json = {
        "kind": hold.kind,
        "scope": hold.scope,
        "target": hold.target,
        "reason": hold.reason,
        "owner": caller_to_json(hold.owner),
        "create_unix_s": hold.create_unix_s,
    }
    if hold.allowed_tenants:
        shape["allowed_tenants"] = hold.allowed_tenants
    if hold.expire_unix_s is not None:
        shape["expire_unix_s"] = hold.expire_unix_s
    if hold.request_id:
        shape["request_id"] = hold.request_id
    return shape


def hold_from_json(key: str, shape: Json) -> Hold:
    """Inverse of ``hold_to_json``."""
    return Hold(
        hold_id=HoldId(key),
        kind=HoldKind(shape["kind"]),
        scope=HoldScope(shape["scope"]),
        target=shape["target"],
        reason=shape["reason"],
        owner=caller_from_json(shape["owner"]),
        allowed_tenants=tuple(shape.get("allowed_tenants", ())),
        expire_unix_s=shape.get("expire_unix_s"),
        create_unix_s=shape["create_unix_s"],
        request_id=shape.get("request_id", ""),
    )


def unclaimed_to_json(unclaimed: UnclaimedRecord) -> Json:
    """Shape of an unclaimed assignment; its environment is left out, as a lease's is."""
    report = unclaimed.report
    shape: Json = {
        "node": unclaimed.node_id,
        "lease": report.key.lease_id,
        "rank": report.key.rank,
        "token": report.token,
        "state": report.state,
        "uid": report.uid,
    }
    if report.reason:
        shape["reason"] = report.reason
    if report.place is not None:
        shape["place"] = place_to_json(report.place)
    return shape


def unclaimed_from_json(_key: str, shape: Json) -> UnclaimedRecord:
    """Inverse of ``unclaimed_to_json``; the record says again what its key says."""
    place = shape.get("place")
    return UnclaimedRecord(
        node_id=NodeId(shape["node"]),
        report=AssignmentReport(
            key=AssignmentKey(lease_id=LeaseId(shape["lease"]), rank=shape["rank"]),
            token=shape["token"],
            state=AssignmentState(shape["state"]),
            reason=shape.get("reason", ""),
            place=None if place is None else place_from_json(place),
            uid=shape["uid"],
        ),
    )
