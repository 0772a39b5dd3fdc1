"""The seams between the agent and its machine.

``Agent(settings, adapters)`` meets the machine only through what is in here, so it
runs unchanged over a real host and over a described one. Methods of ``GpuDriver``
and ``HcaReader`` may block in the kernel for ever: the agent calls them through
``driver_calls``, on a thread of their own and with a deadline. All the others answer
at once.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc.aio

from gpupool.model.assignment import AssignmentKey, DeviceTelemetry
from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool.model.inventory import Hca
from gpupool_agent.core.assignments import AssignmentName
from gpupool_agent.core.readings import DeviceUsage, DriverInventory, PortCounters
from gpupool_agent.devices.blocking import BlockingCalls
from gpupool_agent.devices.privileged import Privileged


class DriverUnavailableError(Exception):
    """The driver can say nothing at all: no library, module not loaded, no devices.

    Never fatal: the agent asks again with a growing delay.
    """


class GpuDriver(Protocol):
    """The GPUs of this host. Every method raises DriverUnavailableError or answers.

    A query that fails for one device or one value hides nothing else: the device
    is then named as failed, or the value is None.
    """

    def inventory(self) -> DriverInventory:
        """Every GPU and MIG instance, freshly enumerated."""
        ...

    def usage(self) -> tuple[DeviceUsage, ...]:
        """Processes and memory of every device of the last inventory."""
        ...

    def telemetry(self) -> tuple[DeviceTelemetry, ...]:
        """Measurements of every device of the last inventory."""
        ...

    def close(self) -> None:
        """Give the driver back; the object is not used afterwards."""
        ...


class HcaReader(Protocol):
    """The network adapters of this host."""

    def read(self) -> tuple[Hca, ...]:
        """Every adapter with its ports, by name; none is no error."""
        ...

    def counters(self) -> tuple[PortCounters, ...]:
        """Counters of every port that has some; a file that refuses is left alone."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a host is. ``simulated`` is empty on real hardware.

    ``cpu_milli`` is in thousandths of a core; ``boot_id`` is new after each boot.
    """

    hostname: str
    boot_id: str
    cpu_milli: int
    host_memory_mib: int
    simulated: str = ""


class HostReader(Protocol):
    """The host itself."""

    def read(self) -> HostFacts:
        """Read it; cheap, called once at the agent's start."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """A process as the kernel shows it.

    ``lease_id`` is the GPUPOOL_LEASE_ID of its environment, else the lease that its
    cgroup is called after (gpupool-lease-LEASE): empty where it has none, None where the
    environment may not be read. ``ancestors`` are the pids of its parent, grandparent
    and so on up to init, at most 64.
    """

    pid: int
    start_ticks: int
    uid: int
    user: str
    command: str
    lease_id: str | None
    ancestors: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One process for ever, and whose it is; ``uid`` None: of several users at once."""

    start_ticks: int
    uid: int | None


class ProcessWatch(Protocol):
    """A process that is being watched."""

    def close(self) -> None:
        """Stop watching; ``on_end`` is not called any more."""
        ...


class ProcessTable(Protocol):
    """The processes of this host."""

    def describe(self, pid: int) -> ProcessFacts | None:
        """Facts of a process, None when there is no such process."""
        ...

    def identify(self, pid: int) -> ProcessIdentity | None:
        """Start time and user of a process, None when there is none."""
        ...

    def start_ticks(self, pid: int) -> int | None:
        """Start time of a process in clock ticks since boot, None when there is none."""
        ...

    def watch(
        self, pid: int, start_ticks: int, on_end: Callable[[str], None]
    ) -> ProcessWatch | None:
        """Call ``on_end("exited")`` on the running event loop once the process is gone.

        None: there is no process with this pid and start time.
        """
        ...

    def signal(self, pid: int, start_ticks: int, number: int) -> str:
        """Send a signal to exactly this process.

        Empty on success and when the process is already gone, else why not.
        """
        ...


class MpsError(Exception):
    """MPS on a GPU did not do what was asked; the text is for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceLimits:
    """Limits of one slice.

    ``share_pct`` 0 sets no compute limit, ``memory_mib`` 0 no memory limit. ``sm_count``
    are the multiprocessors of the whole GPU, 0: unknown.
    """

    key: AssignmentKey
    token: int
    uid: int
    share_pct: int
    memory_mib: int
    sm_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsStatus:
    """What runs on a GPU. ``uid`` None: no daemon. Slices by assignment and token."""

    uid: int | None
    healthy: bool
    slices: tuple[SliceLimits, ...] = ()
    reason: str = ""


class MpsControl(Protocol):
    """The life of MPS on one host: one daemon a GPU, serving one user at a time.

    Each call is repeatable: done twice it does nothing the second time. Each one
    raises MpsError, and then has undone what it had begun.
    """

    async def start(self, gpu: DeviceUuid, uid: int) -> None:
        """Have a daemon for this user on the GPU; refuses a second user."""
        ...

    async def set_limits(self, gpu: DeviceUuid, limits: SliceLimits) -> dict[str, str]:
        """Admit a slice and give the CUDA_MPS_* environment that its holder needs.

        Refuses when the shares on the GPU would pass 100 percent.
        """
        ...

    async def probe(self, gpu: DeviceUuid, limits: SliceLimits) -> int:
        """Run a client as the slice's user under its limits; raises when it fails.

        Gives the multiprocessors that it saw, 0 where it cannot say.
        """
        ...

    async def status(self, gpu: DeviceUuid) -> MpsStatus:
        """What runs there now, read back."""
        ...

    async def remove_limits(self, gpu: DeviceUuid, key: AssignmentKey, token: int) -> None:
        """Take a slice away."""
        ...

    async def stop(self, gpu: DeviceUuid) -> None:
        """End the daemon and restore the GPU's mode; refuses while slices are left."""
        ...

    async def sweep(self, gpu: DeviceUuid, kept: Collection[AssignmentName]) -> None:
        """End what a former agent has left on a GPU, and none of ``kept`` needs.

        ``kept`` are the assignments that have a slice of it. No client is ended by it:
        one that belongs to nobody is a stray, and raises MpsError until it has gone.
        """
        ...

    async def verify(self, gpu: DeviceUuid) -> str:
        """Empty when no daemon, mode or directory of ours is left on it, else what is."""
        ...

    async def watch(
        self,
        gpus: Callable[[], Sequence[DeviceUuid]],
        tell: Callable[[DeviceUuid, str], None],
    ) -> None:
        """Look after the daemons until cancelled, and repair what can be.

        ``gpus`` are those of the host, in the driver's order. ``tell`` hears what is
        wrong with MPS on one, and an empty text once nothing is any more.
        """
        ...

    def is_own(self, process: ProcessFacts) -> bool:
        """Whether a process is a daemon or server of ours, and so is nobody's work."""
        ...


class CdiStore(Protocol):
    """Where the CDI specs of leases are kept; a part of ``Privileged``.

    Each call raises NotPermittedError or PrivilegedError (see ``privileged``), and may be
    repeated.
    """

    async def write_cdi(self, lease_id: LeaseId, spec: bytes) -> None:
        """Write the lease's spec, or replace it."""
        ...

    async def remove_cdi(self, lease_id: LeaseId) -> None:
        """Remove it, if it is there."""
        ...

    async def cdi_leases(self) -> tuple[LeaseId, ...]:
        """Leases that have a spec."""
        ...


Dial = Callable[[str], grpc.aio.Channel]
"""Opens a channel to an allocator's address; may raise OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Everything that an agent needs of its machine. See ``devices.host`` for real ones.

    ``driver_calls`` and ``disk_calls`` are how it calls what may block. ``cdi`` None: no
    CDI specs are written.
    """

    driver: GpuDriver
    mps: MpsControl
    hcas: HcaReader
    host: HostReader
    processes: ProcessTable
    dial: Dial
    driver_calls: BlockingCalls = field(default_factory=lambda: BlockingCalls("driver"))
    disk_calls: BlockingCalls = field(default_factory=lambda: BlockingCalls("disk"))
    cdi: CdiStore | None = None
    privileged: Privileged | None = None
    """The root helper; None where nothing needs root, as on a described machine."""
    imex_channels: Callable[[], Sequence[int]] = tuple
    """Numbers of the host's IMEX channels, now."""
