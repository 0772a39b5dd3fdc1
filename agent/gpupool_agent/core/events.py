"""What can happen to a node (past or noun phrases) and what it wants done (imperative).

``unix_s`` is wall time, for people only; every other time is monotonic seconds.
"""

from dataclasses import dataclass, field

from gpupool.model.assignment import (
    Assignment,
    AssignmentKey,
    AssignmentState,
    DesiredState,
    HolderWatch,
    Report,
    Welcome,
)
from gpupool.model.errors import Refused
from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool.model.inventory import Hca
from gpupool.model.lease import ShareGiven
from gpupool_agent.core.adoptions import Adoption
from gpupool_agent.core.readings import DeviceState, DriverInventory


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """An allocator answered Hello."""

    welcome: Welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """The stream to the allocator ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredArrived:
    """The allocator said what this node shall run."""

    desired: DesiredState


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryRead:
    """The driver enumerated its devices."""

    inventory: DriverInventory
    unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HcasRead:
    """The network adapters were read."""

    hcas: tuple[Hca, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRead:
    """Processes and memory of the devices, as they were at ``started_s`` or later."""

    started_s: float
    devices: tuple[DeviceState, ...]
    unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSilent:
    """The driver does not answer ("nvml_hang") or is not there ("driver_unavailable")."""

    code: str
    reason: str
    unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A Prepare or CleanUp succeeded; ``environment`` is what preparing adds.

    ``sm_counts`` are the multiprocessors that the probe of each slice saw, 0: unknown.
    """

    key: AssignmentKey
    token: int
    environment: dict[str, str] = field(default_factory=dict[str, str])
    sm_counts: dict[DeviceUuid, int] = field(default_factory=dict[DeviceUuid, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """A Prepare or CleanUp failed; nothing half-done is left of a Prepare."""

    key: AssignmentKey
    token: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderEnded:
    """A watched process is gone: "exited" or "not found"."""

    watch: HolderWatch
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFault:
    """Something about the node itself is wrong, or is right again."""

    code: str
    evidence: str
    open: bool
    unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsChanged:
    """What is wrong with MPS on a device has changed; an empty reason: nothing is."""

    uuid: DeviceUuid
    reason: str
    unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFailed:
    """A process was not sent the signal that StopProcess asked for."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptionComes:
    """A user is about to ask for it, once the GPUs have been read; ``over``: or does no more."""

    pid: int
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptionAsked:
    """A user wants a process taken into a lease; answered with AdoptionAnswered.

    ``process_uid`` is the user whose the process is in every respect, None: of several.
    ``asker`` is the user's name or id.
    """

    number: int
    lease_id: LeaseId
    pid: int
    start_ticks: int
    process_uid: int | None
    asker_uid: int
    asker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedEnded:
    """An adopted process is gone."""

    adoption: Adoption


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """``Node.next_deadline()`` has come."""


NodeEvent = (
    Connected
    | Disconnected
    | DesiredArrived
    | InventoryRead
    | HcasRead
    | UsageRead
    | DriverSilent
    | StepDone
    | StepFailed
    | HolderEnded
    | NodeFault
    | MpsChanged
    | StopFailed
    | AdoptionComes
    | AdoptionAsked
    | AdoptedEnded
    | TimePassed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """An assignment as it is kept over a restart of the agent.

    ``touched``: preparing it was begun, so something of it may be there.
    """

    assignment: Assignment
    state: AssignmentState
    environment: dict[str, str] = field(default_factory=dict[str, str])
    reason: str = ""
    touched: bool = True
    given: tuple[ShareGiven, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What an agent must not forget over its restart.

    ``contact_lost_s`` is on the boot's monotonic clock, None while connected.
    ``floors`` and ``tombstones`` are the fence, oldest first.
    """

    boot_id: str
    epoch: int = 0
    revision: int = 0
    contact_lost_s: float | None = None
    entries: tuple[CheckpointEntry, ...] = ()
    holders: tuple[HolderWatch, ...] = ()
    floors: tuple[tuple[DeviceUuid, int], ...] = ()
    tombstones: tuple[tuple[AssignmentKey, int], ...] = ()
    adoptions: tuple[Adoption, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """Make this durable before performing the effects after it."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Prepare the node for an assignment; answer with StepDone or StepFailed.

    ``adopted``: it was prepared before the agent's restart and may be in use, so
    only what the agent itself forgot is done.
    """

    assignment: Assignment
    adopted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanUp:
    """Take back what Prepare did; answer with StepDone or StepFailed."""

    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadUsage:
    """Read processes and memory now; answer with UsageRead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchHolder:
    """Watch a process; answer with HolderEnded when it is gone."""

    watch: HolderWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwatchHolder:
    """Stop watching the holder of a lease."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class StopProcess:
    """Have a process end, by SIGTERM or by ``force``; StopFailed where that fails.

    ``reason`` and what follows it are for the log.
    """

    pid: int
    start_ticks: int
    force: bool
    gpu: DeviceUuid
    reason: str = ""
    user: str = ""
    command: str = ""
    lease_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptionAnswered:
    """What became of AdoptionAsked ``number``; ``refused`` None: it was adopted."""

    number: int
    refused: Refused | None = None
    device_uuids: tuple[DeviceUuid, ...] = ()
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchAdopted:
    """Watch an adopted process; answer with AdoptedEnded when it is gone."""

    adoption: Adoption


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwatchAdopted:
    """Stop watching an adopted process."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """Tell the allocator."""

    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseConnection:
    """End the stream: this allocator's term is over."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Something that the operator should find in the log; ``event`` is a stable word."""

    event: str
    details: dict[str, str]


NodeEffect = (
    SaveCheckpoint
    | Prepare
    | CleanUp
    | ReadUsage
    | WatchHolder
    | UnwatchHolder
    | StopProcess
    | AdoptionAnswered
    | WatchAdopted
    | UnwatchAdopted
    | SendReport
    | CloseConnection
    | Log
)
