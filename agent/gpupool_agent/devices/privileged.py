"""What only root may do on a host, as the agent asks for it.

The agent runs unprivileged. A small root helper carries these actions out and nothing
else; it checks every argument again. ``helper_client`` speaks to it; ``NoHelper`` is an
agent without one, which reads only and says what it cannot do.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from gpupool.model.ids import DeviceUuid, LeaseId


class NotPermittedError(Exception):
    """There is no helper, or it has refused the action; the text is for people."""


class PrivilegedError(Exception):
    """The helper tried, and it did not work; the text is for people."""


class ComputeMode(StrEnum):
    """Who may make contexts on a GPU."""

    DEFAULT = "default"
    EXCLUSIVE_PROCESS = "exclusive_process"
    PROHIBITED = "prohibited"


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsSlot:
    """The MPS daemon of one physical GPU.

    ``name`` is 8 lower case hex digits made from the UUID; directories and the systemd
    unit (``gpupool-mps@<name>.service``) are called after it. ``uid`` is the one user
    whom its server serves; ``default_share_pct`` 1..100 and ``default_memory_mib``
    (0: none) are set before the first client.
    """

    name: str
    gpu: DeviceUuid
    uid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonFacts:
    """A daemon that runs: its process, told apart from a later one by its start time."""

    pid: int
    start_ticks: int
    pipe_directory: str = ""
    """CUDA_MPS_PIPE_DIRECTORY of its clients: the helper makes it, and alone names it."""

    uid: int = -1
    """User that it was started for; -1: not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutcome:
    """What a program printed and how it ended."""

    exit_code: int
    output: str
    errors: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """A probe program, run as the lease's user under the lease's environment."""

    slot: str
    uid: int
    environment: dict[str, str] = field(default_factory=dict[str, str])
    deadline_s: float = 10.0


class Privileged(Protocol):
    """The closed list. Each raises NotPermittedError or PrivilegedError.

    Each is repeatable: asked twice it does nothing the second time.
    """

    async def set_compute_mode(self, gpu: DeviceUuid, mode: ComputeMode) -> None:
        """Sets a GPU's compute mode."""
        ...

    async def start_mps(self, slot: MpsSlot) -> DaemonFacts:
        """Makes the slot's directories and starts its daemon, in its own unit or session."""
        ...

    async def mps_daemon(self, slot: str) -> DaemonFacts | None:
        """The slot's daemon by its pid file, None when it does not run."""
        ...

    async def stop_mps(self, slot: str) -> None:
        """Kills the daemon by its pid file where it still runs; removes directories, unit."""
        ...

    async def mps_commands(self, slot: str, lines: tuple[str, ...]) -> CommandOutcome:
        """Gives commands of a closed list to the slot's control program."""
        ...

    async def probe(self, request: ProbeRequest) -> CommandOutcome:
        """Runs the probe program as a user, under an environment of listed names only."""
        ...

    async def end_process(self, gpu: DeviceUuid, pid: int, start_ticks: int, number: int) -> None:
        """Signals (TERM or KILL) exactly this process, if the driver lists it on the GPU."""
        ...

    async def lease_of(self, gpu: DeviceUuid, pid: int, start_ticks: int) -> str:
        """GPUPOOL_LEASE_ID of the environment of a process on the GPU; empty: none."""
        ...

    async def write_cdi(self, lease_id: LeaseId, spec: bytes) -> None:
        """Writes the lease's CDI spec."""
        ...

    async def remove_cdi(self, lease_id: LeaseId) -> None:
        """Removes it."""
        ...

    async def cdi_leases(self) -> tuple[LeaseId, ...]:
        """Leases that have a spec."""
        ...

    async def reset_gpu(self, gpu: DeviceUuid) -> None:
        """Resets a GPU that nothing runs on."""
        ...

    async def rescan_pci(self) -> None:
        """Has the kernel look for devices that were put in."""
        ...
