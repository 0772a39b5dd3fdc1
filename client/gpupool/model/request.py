"""What a lease may ask for."""

from dataclasses import dataclass, field
from enum import StrEnum


class Level(StrEnum):
    """Levels of the topology, narrow to wide."""

    GPU = "gpu"
    NVLINK_DOMAIN = "nvlink_domain"
    NODE = "node"
    BLOCK = "block"
    POD = "pod"
    FABRIC = "fabric"


class OnFailure(StrEnum):
    """What happens to a lease when a member is lost."""

    REPLACE = "replace"
    SHRINK = "shrink"
    STOP = "stop"
    WAIT = "wait"


class WorkloadClass(StrEnum):
    """What the work is like."""

    INFERENCE = "inference"
    TRAINING = "training"
    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyConstraint:
    """Where members may sit relative to one another.

    ``max_per_domain`` counts members in one ``spread`` level and is at least 1.
    """

    required: Level | None = None
    preferred: Level | None = None
    spread: Level | None = None
    max_per_domain: int = 1


NO_CONSTRAINT = TopologyConstraint()


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGpus:
    """``count`` GPUs of at least ``min_memory_mib`` usable memory each."""

    count: int
    min_memory_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSlice:
    """Part of one GPU.

    ``share_pct`` 0 reserves no compute; ``memory_mib`` 0 means the share of the
    GPU's usable memory. At least one of them is set.
    """

    share_pct: int = 0
    memory_mib: int = 0
    min_share_pct: int = 0
    max_share_pct: int = 0


NODE_LABEL = "gpupool.node"
"""Label that every node has: its node id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSelector:
    """One test on a node's labels; no ``values`` means any value."""

    key: str
    values: tuple[str, ...] = ()
    exclude: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Named role: ``replicas`` members of one shape.

    ``accelerator`` None: a role without GPUs. ``models`` are lower case; empty
    means any. CPU is in thousandths of a core.
    """

    name: str = "main"
    replicas: int = 1
    accelerator: WholeGpus | GpuSlice | None = None
    models: tuple[str, ...] = ()
    node_selectors: tuple[LabelSelector, ...] = ()
    cpu_milli: int = 0
    host_memory_mib: int = 0
    topology: TopologyConstraint = NO_CONSTRAINT
    member_topology: TopologyConstraint = NO_CONSTRAINT


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSpec:
    """A lease's request as accepted, defaults filled in.

    ``max_duration_s`` None: unlimited. Slices of one GPU share ``uid`` unless
    ``shared_trust`` is set on all of them. ``on_caller_node``: all members on the node
    of the caller, whose agent forwards the call.
    """

    groups: tuple[Group, ...]
    topology: TopologyConstraint = NO_CONSTRAINT
    display_name: str = ""
    labels: dict[str, str] = field(default_factory=dict[str, str])
    tenant: str = "default"
    uid: int = 0
    priority: int = 0
    max_duration_s: float | None = None
    disconnect_s: float = 24 * 3600.0
    spares: int = 0
    on_failure: OnFailure | None = None
    isolated: bool = False
    movable: bool = False
    workload_class: WorkloadClass | None = None
    shared_trust: bool = False
    on_caller_node: bool = False
