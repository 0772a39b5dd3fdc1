"""The last measurements of the connected nodes; never stored, never in the core."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpupool.model.assignment import DeviceTelemetry
from gpupool.model.ids import DeviceUuid, NodeId
from gpupool.model.limits import DEVICES_PER_NODE_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryTotals:
    """Sums over the devices that report a figure; the mean is 0 where none does."""

    memory_used_mib: int
    power_mw: int
    utilization_pct_mean: float


class TelemetryBook:
    """At most DEVICES_PER_NODE_MAX measurements a node, while it is connected."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, dict[DeviceUuid, DeviceTelemetry]] = {}

    def put(self, node_id: NodeId, measurements: Sequence[DeviceTelemetry]) -> None:
        """Replaces a node's measurements."""
        newest = measurements[:DEVICES_PER_NODE_MAX]
        self._nodes[node_id] = {measured.uuid: measured for measured in newest}

    def forget(self, node_id: NodeId) -> None:
        """Drops a node that is gone: an old figure must not look like a new one."""
        self._nodes.pop(node_id, None)

    def of(self, node_id: NodeId, uuid: DeviceUuid) -> DeviceTelemetry | None:
        """The last measurement of a device."""
        return self._nodes.get(node_id, {}).get(uuid)

    def totals(self) -> TelemetryTotals:
        """Sums over all devices."""
        memory_used_mib = power_mw = utilization_pct = devices = 0
        for node in self._nodes.values():
            for measured in node.values():
                memory_used_mib += measured.memory_used_mib or 0
                power_mw += measured.power_mw or 0
                if measured.utilization_pct is not None:
                    utilization_pct += measured.utilization_pct
                    devices += 1
        return TelemetryTotals(
            memory_used_mib=memory_used_mib,
            power_mw=power_mw,
            utilization_pct_mean=utilization_pct / devices if devices else 0.0,
        )
