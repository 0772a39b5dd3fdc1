"""What the allocator shows, as messages: its views, dry runs and renewals."""

from gpupool.model.assignment import DeviceTelemetry
from gpupool.v1 import lease_pb2, pool_pb2
from gpupool.wire.inventory import (
    device_to_proto,
    node_inventory_to_proto,
    stray_process_to_proto,
)
from gpupool.wire.node import device_telemetry_to_proto
from gpupool.wire.resources import cause_to_proto, explanation_to_proto, member_to_proto
from gpupool.wire.times import duration_to_proto, timestamp_to_proto
from gpupool_allocator.core.effects import KeptAlive
from gpupool_allocator.core.views import (
    DeviceState,
    DeviceView,
    DryRunResult,
    NodeState,
    NodeView,
    PoolSummary,
)

_NODE_STATES = {
    NodeState.CONNECTED: pool_pb2.NODE_STATE_CONNECTED,
    NodeState.UNREACHABLE: pool_pb2.NODE_STATE_UNREACHABLE,
}
_DEVICE_STATES = {
    DeviceState.FREE: pool_pb2.DEVICE_STATE_FREE,
    DeviceState.SLICED: pool_pb2.DEVICE_STATE_SLICED,
    DeviceState.WHOLE: pool_pb2.DEVICE_STATE_WHOLE,
    DeviceState.UNAVAILABLE: pool_pb2.DEVICE_STATE_UNAVAILABLE,
}


def kept_alive_to_proto(kept: KeptAlive) -> lease_pb2.KeepAliveResponse:
    """What became of a renewal."""
    message = lease_pb2.KeepAliveResponse(gone_lease_ids=kept.gone)
    if kept.ttl_s is not None:
        message.ttl.CopyFrom(duration_to_proto(kept.ttl_s))
    return message


def dry_run_to_proto(result: DryRunResult) -> lease_pb2.DryRunResponse:
    """What Acquire would answer."""
    return lease_pb2.DryRunResponse(
        granted=result.granted,
        members=[member_to_proto(member) for member in result.members],
        explanation=explanation_to_proto(result.explanation),
        verdicts=[
            lease_pb2.NodeVerdict(
                node_id=verdict.node_id,
                causes=[cause_to_proto(cause) for cause in verdict.causes],
            )
            for verdict in result.verdicts
        ],
    )


def summary_to_proto(summary: PoolSummary, version: str) -> pool_pb2.GetPoolResponse:
    """Sums of the pool."""
    return pool_pb2.GetPoolResponse(
        epoch=summary.epoch,
        version=version,
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
    )


def node_to_proto(node: NodeView) -> pool_pb2.Node:
    """A host of the pool."""
    message = pool_pb2.Node(
        node_id=node.node_id,
        state=_NODE_STATES[node.state],
        boot_id=node.boot_id,
        agent_version=node.agent_version,
        inventory=node_inventory_to_proto(node.inventory),
        free_cpu_milli=node.free_cpu_milli,
        free_host_memory_mib=node.free_host_memory_mib,
        hold_ids=node.hold_ids,
    )
    if node.last_seen_unix_s:
        message.last_seen_time.CopyFrom(timestamp_to_proto(node.last_seen_unix_s))
    return message


def device_status_to_proto(
    device: DeviceView, telemetry: DeviceTelemetry | None
) -> pool_pb2.DeviceStatus:
    """A device and what is granted on it."""
    message = pool_pb2.DeviceStatus(
        device=device_to_proto(device.device),
        node_id=device.node_id,
        state=_DEVICE_STATES[device.state],
        reasons=device.reasons,
        free_share_pct=device.free_share_pct,
        free_memory_mib=device.free_memory_mib or 0,
        lease_ids=device.lease_ids,
        strays=[stray_process_to_proto(stray) for stray in device.strays],
    )
    if device.uid is not None:
        message.uid = device.uid
    if telemetry is not None:
        message.telemetry.CopyFrom(device_telemetry_to_proto(telemetry))
    return message
