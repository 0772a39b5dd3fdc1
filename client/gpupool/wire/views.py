"""What the pool shows of itself: nodes, devices, sums and dry runs."""

from gpupool.model import limits
from gpupool.model.ids import HoldId, LeaseId, NodeId
from gpupool.model.views import (
    DeviceState,
    DeviceView,
    DryRunResult,
    NodeState,
    NodeVerdict,
    NodeView,
    PoolSummary,
    UnclaimedAssignment,
)
from gpupool.v1 import lease_pb2, pool_pb2
from gpupool.wire import door
from gpupool.wire.assignment import assignment_key_from_proto
from gpupool.wire.enums import EnumTable
from gpupool.wire.inventory import (
    device_from_proto,
    device_to_proto,
    node_inventory_from_proto,
    node_inventory_to_proto,
    stray_process_from_proto,
    stray_process_to_proto,
)
from gpupool.wire.node import device_telemetry_from_proto, device_telemetry_to_proto
from gpupool.wire.resources import (
    cause_to_proto,
    causes_from_proto,
    explanation_from_proto,
    explanation_to_proto,
    member_from_proto,
    member_to_proto,
    place_from_proto,
    place_to_proto,
)
from gpupool.wire.times import timestamp_from_proto, timestamp_to_proto

NODE_STATES = EnumTable(NodeState, pool_pb2.NodeState.Value, "NODE_STATE")
DEVICE_STATES = EnumTable(DeviceState, pool_pb2.DeviceState.Value, "DEVICE_STATE")

_ON_ONE_THING_MAX = 65_536
"""Holds on a node, leases or reasons on a device."""

_VERDICTS_MAX = 1000


def node_view_to_proto(view: NodeView) -> pool_pb2.Node:
    """A node of the pool."""
    message = pool_pb2.Node(
        node_id=view.node_id,
        state=NODE_STATES.to_proto(view.state),
        boot_id=view.boot_id,
        agent_version=view.agent_version,
        inventory=node_inventory_to_proto(view.inventory),
        free_cpu_milli=view.free_cpu_milli,
        free_host_memory_mib=view.free_host_memory_mib,
        hold_ids=view.hold_ids,
    )
    if view.last_seen_unix_s:
        message.last_seen_time.CopyFrom(timestamp_to_proto(view.last_seen_unix_s))
    return message


def node_view_from_proto(message: pool_pb2.Node, at: str = "node") -> NodeView:
    """Raises BadField."""
    door.count(at, "hold_ids", message.hold_ids, 0, _ON_ONE_THING_MAX)
    return NodeView(
        node_id=NodeId(door.node_id(at, "node_id", message.node_id)),
        state=NODE_STATES.from_proto(at, "state", message.state),
        boot_id=door.text(at, "boot_id", message.boot_id),
        agent_version=door.text(at, "agent_version", message.agent_version),
        inventory=node_inventory_from_proto(f"{at}.inventory", message.inventory),
        last_seen_unix_s=timestamp_from_proto(at, "last_seen_time", message.last_seen_time),
        free_cpu_milli=door.integer(
            at, "free_cpu_milli", message.free_cpu_milli, 0, limits.CPU_MILLI_MAX
        ),
        free_host_memory_mib=door.integer(
            at, "free_host_memory_mib", message.free_host_memory_mib, 0, limits.HOST_MEMORY_MIB_MAX
        ),
        hold_ids=tuple(
            HoldId(door.identifier(at, "hold_ids", hold_id)) for hold_id in message.hold_ids
        ),
    )


def device_view_to_proto(view: DeviceView) -> pool_pb2.DeviceStatus:
    """A device and what is granted on it."""
    message = pool_pb2.DeviceStatus(
        device=device_to_proto(view.device),
        node_id=view.node_id,
        state=DEVICE_STATES.to_proto(view.state),
        reasons=view.reasons,
        free_share_pct=view.free_share_pct,
        free_memory_mib=view.free_memory_mib or 0,
        lease_ids=view.lease_ids,
        uid=view.uid,
        strays=[stray_process_to_proto(stray) for stray in view.strays],
    )
    if view.telemetry is not None:
        message.telemetry.CopyFrom(device_telemetry_to_proto(view.telemetry))
    if view.last_seen_unix_s:
        message.last_seen_time.CopyFrom(timestamp_to_proto(view.last_seen_unix_s))
    return message


def device_view_from_proto(message: pool_pb2.DeviceStatus, at: str = "device") -> DeviceView:
    """Raises BadField; free memory of a device of unknown memory is None."""
    for name, values in (
        ("reasons", message.reasons),
        ("lease_ids", message.lease_ids),
        ("strays", message.strays),
    ):
        door.count(at, name, values, 0, _ON_ONE_THING_MAX)
    device = device_from_proto(f"{at}.device", message.device)
    free_mib = door.integer(
        at, "free_memory_mib", message.free_memory_mib, 0, limits.GPU_MEMORY_MIB_MAX
    )
    return DeviceView(
        device=device,
        node_id=NodeId(door.node_id(at, "node_id", message.node_id)),
        state=DEVICE_STATES.from_proto(at, "state", message.state),
        reasons=tuple(door.long_text(at, "reasons", reason) for reason in message.reasons),
        free_share_pct=door.integer(at, "free_share_pct", message.free_share_pct, 0, 100),
        free_memory_mib=None if device.memory_mib is None else free_mib,
        lease_ids=tuple(
            LeaseId(door.identifier(at, "lease_ids", lease_id)) for lease_id in message.lease_ids
        ),
        uid=message.uid if message.HasField("uid") else None,
        strays=tuple(
            stray_process_from_proto(f"{at}.strays[{index}]", stray)
            for index, stray in enumerate(message.strays)
        ),
        telemetry=(
            device_telemetry_from_proto(f"{at}.telemetry", message.telemetry)
            if message.HasField("telemetry")
            else None
        ),
        last_seen_unix_s=timestamp_from_proto(at, "last_seen_time", message.last_seen_time),
    )


def unclaimed_to_proto(unclaimed: UnclaimedAssignment) -> pool_pb2.UnclaimedAssignment:
    """An assignment that the store does not know."""
    return pool_pb2.UnclaimedAssignment(
        node_id=unclaimed.node_id,
        lease_id=unclaimed.lease_id,
        rank=unclaimed.rank,
        token=unclaimed.token,
        place=place_to_proto(unclaimed.place),
        uid=unclaimed.uid,
        ending=unclaimed.ending,
    )


def unclaimed_from_proto(
    message: pool_pb2.UnclaimedAssignment, at: str = "unclaimed"
) -> UnclaimedAssignment:
    """Raises BadField."""
    key = assignment_key_from_proto(at, message)
    return UnclaimedAssignment(
        node_id=NodeId(door.node_id(at, "node_id", message.node_id)),
        lease_id=key.lease_id,
        rank=key.rank,
        token=door.integer(at, "token", message.token, 0, door.INT64_MAX),
        place=place_from_proto(f"{at}.place", message.place),
        uid=door.integer(at, "uid", message.uid, 0, limits.UID_MAX),
        ending=message.ending,
    )


def pool_summary_to_proto(summary: PoolSummary) -> pool_pb2.GetPoolResponse:
    """Sums of the pool."""
    return pool_pb2.GetPoolResponse(
        epoch=summary.epoch,
        version=summary.version,
        nodes=summary.nodes,
        nodes_connected=summary.nodes_connected,
        devices=summary.devices,
        devices_free=summary.devices_free,
        devices_used=summary.devices_used,
        devices_unavailable=summary.devices_unavailable,
        granted_share_pct=summary.granted_share_pct,
        leases=summary.leases,
        waiting=summary.waiting,
        grain_pct=summary.grain_pct,
        read_only_reason=summary.read_only_reason,
        strays=summary.strays,
    )


def pool_summary_from_proto(message: pool_pb2.GetPoolResponse) -> PoolSummary:
    """Raises BadField for negative sums."""

    def total(name: str, value: int) -> int:
        return door.integer("pool", name, value, 0, door.INT64_MAX)

    return PoolSummary(
        epoch=total("epoch", message.epoch),
        version=door.text("pool", "version", message.version),
        nodes=total("nodes", message.nodes),
        nodes_connected=total("nodes_connected", message.nodes_connected),
        devices=total("devices", message.devices),
        devices_free=total("devices_free", message.devices_free),
        devices_used=total("devices_used", message.devices_used),
        devices_unavailable=total("devices_unavailable", message.devices_unavailable),
        granted_share_pct=total("granted_share_pct", message.granted_share_pct),
        leases=total("leases", message.leases),
        waiting=total("waiting", message.waiting),
        grain_pct=total("grain_pct", message.grain_pct),
        read_only_reason=door.long_text("pool", "read_only_reason", message.read_only_reason),
        strays=total("strays", message.strays),
    )


def node_verdict_to_proto(verdict: NodeVerdict) -> lease_pb2.NodeVerdict:
    """Why a node cannot take a member."""
    return lease_pb2.NodeVerdict(
        node_id=verdict.node_id, causes=[cause_to_proto(cause) for cause in verdict.causes]
    )


def dry_run_result_to_proto(result: DryRunResult) -> lease_pb2.DryRunResponse:
    """What Acquire would answer."""
    return lease_pb2.DryRunResponse(
        granted=result.granted,
        members=[member_to_proto(member) for member in result.members],
        explanation=explanation_to_proto(result.explanation),
        verdicts=[node_verdict_to_proto(verdict) for verdict in result.verdicts],
    )


def dry_run_result_from_proto(message: lease_pb2.DryRunResponse) -> DryRunResult:
    """Raises BadField."""
    at = "dry_run"
    door.count(at, "members", message.members, 0, limits.MEMBERS_MAX)
    door.count(at, "verdicts", message.verdicts, 0, _VERDICTS_MAX)
    return DryRunResult(
        granted=message.granted,
        members=tuple(
            member_from_proto(f"{at}.members[{index}]", member)
            for index, member in enumerate(message.members)
        ),
        explanation=explanation_from_proto(f"{at}.explanation", message.explanation),
        verdicts=tuple(
            NodeVerdict(
                node_id=NodeId(door.node_id(at, f"verdicts[{index}].node_id", verdict.node_id)),
                causes=causes_from_proto(f"{at}.verdicts[{index}]", verdict.causes),
            )
            for index, verdict in enumerate(message.verdicts)
        ),
    )
