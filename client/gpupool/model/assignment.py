"""What a node must carry out, and what it says about it."""

from dataclasses import dataclass, field
from enum import StrEnum

from gpupool.model.caller import ProcessRef
from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool.model.inventory import NodeInventory, StrayProcess
from gpupool.model.lease import Place, ShareGiven


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class AssignmentKey:
    """Names an assignment: a member of a lease."""

    lease_id: LeaseId
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one node must carry out for one member.

    A node refuses a ``token`` lower than one it has seen for the key or any of
    the devices. ``disconnect_s`` runs on the node's own clock.
    """

    key: AssignmentKey
    group: str
    token: int
    place: Place
    uid: int
    disconnect_s: float
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderWatch:
    """Asks the agent to watch the process that holds a lease."""

    lease_id: LeaseId
    process: ProcessRef


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """All that a node shall run: what is not named in it ends.

    ``unclaimed`` names assignments that the allocator does not know (a restored
    store) and that are kept until an operator ends them.
    """

    revision: int
    epoch: int
    assignments: tuple[Assignment, ...] = ()
    holders: tuple[HolderWatch, ...] = ()
    unclaimed: tuple[AssignmentKey, ...] = ()


class AssignmentState(StrEnum):
    """State of one assignment on its node."""

    PREPARING = "preparing"
    PREPARED = "prepared"
    FAILED = "failed"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentReport:
    """What a node says about one assignment.

    ``environment`` is complete once prepared. ``place`` and ``uid`` are set in
    Hello and in full reports, so that an allocator can show what it does not know.
    ``given`` is what its slices really get; ``degraded`` says why they do not work as
    they should.
    """

    key: AssignmentKey
    token: int
    state: AssignmentState
    environment: dict[str, str] = field(default_factory=dict[str, str])
    reason: str = ""
    place: Place | None = None
    uid: int = 0
    given: tuple[ShareGiven, ...] = ()
    degraded: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """What a node says about one device.

    ``clean``: nothing runs on it outside assignments or their limits, its unassigned
    memory is free and its mode is what it was. ``failed``: the driver lost it, or does not
    answer for it.
    """

    uuid: DeviceUuid
    clean: bool
    failed: bool = False
    strays: tuple[StrayProcess, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderEnd:
    """A holding process that ended: "exited", "reboot" or "not found"."""

    lease_id: LeaseId
    pid: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReport:
    """Something is wrong with a device, or with the node (``device_uuid`` None)."""

    code: str
    evidence: str
    open: bool
    device_uuid: DeviceUuid | None = None
    unix_s: float = 0.0


class ProcessNoteKind(StrEnum):
    """What was done to a process: the agent ended it, or it was taken into a lease."""

    STOPPED = "stopped"
    ADOPTED = "adopted"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessNote:
    """Something that was done to a process on a device, for the history.

    ``process.lease_id`` is the lease that it was taken into, or was of. ``actor`` is who
    asked for it, empty where the agent went by its own rules.
    """

    kind: ProcessNoteKind
    device_uuid: DeviceUuid
    process: StrayProcess
    reason: str = ""
    actor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """An agent introduces its node; see node.proto for each field."""

    node_id: str
    boot_id: str
    agent_version: str
    agent_instance_id: str
    protocol_revisions: tuple[int, ...]
    inventory: NodeInventory
    assignments: tuple[AssignmentReport, ...] = ()
    devices: tuple[DeviceReport, ...] = ()
    highest_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The allocator's answer to Hello; ``forward_key`` proves forwarded calls."""

    epoch: int
    protocol_revision: int
    allocator_version: str
    heartbeat_timeout_s: float
    report_interval_s: float
    reconnect_spread_s: float = 0.0
    forward_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is on a node, as far as it changed.

    A ``full`` one is an account of all assignments, devices, holders and open faults;
    only the inventory is left out where this connection has heard it.
    ``alive_holders`` is complete in every report: it renews every process-bound
    lease whose holder lives on the node. ``process_notes`` are told once.
    """

    full: bool = False
    inventory: NodeInventory | None = None
    assignments: tuple[AssignmentReport, ...] = ()
    devices: tuple[DeviceReport, ...] = ()
    alive_holders: tuple[LeaseId, ...] = ()
    ended_holders: tuple[HolderEnd, ...] = ()
    accepted_revision: int = 0
    faults: tuple[FaultReport, ...] = ()
    process_notes: tuple[ProcessNote, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTelemetry:
    """Measurements of a device; None where it cannot say."""

    uuid: DeviceUuid
    utilization_pct: int | None = None
    memory_used_mib: int | None = None
    temperature_c: int | None = None
    power_mw: int | None = None
