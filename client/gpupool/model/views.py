"""What the pool shows of itself: frozen pictures of one moment."""

from dataclasses import dataclass
from enum import StrEnum

from gpupool.model.assignment import DeviceTelemetry
from gpupool.model.ids import HoldId, LeaseId, NodeId
from gpupool.model.inventory import Device, NodeInventory, StrayProcess
from gpupool.model.lease import Cause, Explanation, Member, Place


class NodeState(StrEnum):
    """Whether a node speaks with this allocator."""

    CONNECTED = "connected"
    UNREACHABLE = "unreachable"


class DeviceState(StrEnum):
    """Whether a device can be granted."""

    FREE = "free"
    SLICED = "sliced"
    WHOLE = "whole"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node; ``last_seen_unix_s`` 0 means not in this term."""

    node_id: NodeId
    state: NodeState
    boot_id: str
    agent_version: str
    inventory: NodeInventory
    last_seen_unix_s: float
    free_cpu_milli: int
    free_host_memory_mib: int
    hold_ids: tuple[HoldId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """A device and what is granted on it; ``reasons`` say why it is not offered.

    ``uid`` is the user whose slices are on it, None where there are none or they
    are shared. ``free_memory_mib`` None: unknown. ``last_seen_unix_s`` is when its node
    last had it, while it is missing or failed; 0: it is there, or that is not known.
    """

    device: Device
    node_id: NodeId
    state: DeviceState
    reasons: tuple[str, ...]
    free_share_pct: int
    free_memory_mib: int | None
    lease_ids: tuple[LeaseId, ...]
    uid: int | None
    strays: tuple[StrayProcess, ...]
    telemetry: DeviceTelemetry | None = None
    last_seen_unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnclaimedAssignment:
    """An assignment that a node runs and the pool's store does not know.

    ``ending``: its node keeps it no longer, and has not yet said that it is gone.
    """

    node_id: NodeId
    lease_id: LeaseId
    rank: int
    token: int
    place: Place
    uid: int
    ending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSummary:
    """Sums; devices = free + used + unavailable. ``granted_share_pct``: hundredths of a GPU.

    ``strays``: processes on devices that belong to no lease, or are outside its limits.
    """

    epoch: int
    version: str
    nodes: int
    nodes_connected: int
    devices: int
    devices_free: int
    devices_used: int
    devices_unavailable: int
    granted_share_pct: int
    leases: int
    waiting: int
    grain_pct: int
    read_only_reason: str
    strays: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """Why a node cannot take one member of a request; no causes: it can."""

    node_id: NodeId
    causes: tuple[Cause, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunResult:
    """What Acquire would answer now; ``members`` have token 0."""

    granted: bool
    members: tuple[Member, ...]
    explanation: Explanation
    verdicts: tuple[NodeVerdict, ...] = ()
