"""What an agent reads from its machine, as plain values."""

from dataclasses import dataclass

from gpupool.model.ids import DeviceUuid
from gpupool.model.inventory import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedDevice:
    """A device that is there and cannot be used; ``code`` is a stable word."""

    uuid: DeviceUuid
    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverInventory:
    """What the driver enumerated.

    ``failed`` names devices of ``devices`` that the driver has lost; a device that
    was never readable is only counted in ``unreadable``, with the evidence.
    """

    devices: tuple[Device, ...]
    failed: tuple[FailedDevice, ...] = ()
    unreadable: tuple[str, ...] = ()
    driver_version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortCounters:
    """Counters of an adapter's port by name; data in bytes.

    ``saturated`` names those that have reached their end and count no further.
    """

    hca: str
    port: int
    values: dict[str, int]
    saturated: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process on a device; ``memory_mib`` 0: unknown.

    ``through_mps``: whether it is a client of an MPS server; None: nobody can say.
    """

    pid: int
    memory_mib: int = 0
    through_mps: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    """What runs on a device.

    ``processes`` None: the driver cannot list them now. ``memory_used_mib`` is
    without the driver's own reserve, None where unknown. ``failed``: lost. ``doubt``:
    what the driver said that cannot be, and so was dropped; empty: nothing.
    """

    uuid: DeviceUuid
    processes: tuple[GpuProcess, ...] | None
    memory_used_mib: int | None
    failed: FailedDevice | None = None
    doubt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProcess:
    """A process on a device, with what tells whose it is.

    ``lease_id`` is the one in its environment, or else that of its cgroup: empty for
    none, None where the environment may not be read or was written over. ``ancestors``
    are pids, nearest first. ``through_mps`` is as in GpuProcess.
    """

    pid: int
    start_ticks: int = 0
    uid: int = 0
    user: str = ""
    command: str = ""
    memory_mib: int = 0
    lease_id: str | None = ""
    ancestors: tuple[int, ...] = ()
    through_mps: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """``DeviceUsage`` with its processes described. None as there."""

    uuid: DeviceUuid
    processes: tuple[DeviceProcess, ...] | None
    memory_used_mib: int | None
    failed: FailedDevice | None = None
    doubt: str = ""
