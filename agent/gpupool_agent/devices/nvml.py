"""The GPUs through NVML (nvidia-ml-py).

A failing query hides nothing else: each is asked on its own and gives None where the
device cannot say, or says what cannot be (see ``core.plausible``). A lost device is
named, by what the last good enumeration knew of it. The library is initialised anew for
every enumeration: handles do not survive a hot swap, and the driver counts GPUs when it
is initialised.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import pynvml  # pyright: ignore[reportMissingTypeStubs] - it has none, see below

from gpupool.model.assignment import DeviceTelemetry
from gpupool.model.ids import DeviceUuid
from gpupool.model.inventory import Device
from gpupool_agent.core.plausible import (
    MEMORY_BYTES_MAX,
    POWER_MW,
    TEMPERATURE_C,
    UTILIZATION_PCT,
    memory_doubt,
    process_doubt,
    range_doubt,
)
from gpupool_agent.core.readings import DeviceUsage, DriverInventory, FailedDevice, GpuProcess
from gpupool_agent.devices.interfaces import DriverUnavailableError
from gpupool_agent.devices.nvlink import NvlinkReader, pci_address, read_fabric
from gpupool_agent.devices.pci import local_cpus, numa_node, pci_device, pci_path

T = TypeVar("T")

# nvidia-ml-py has no types; this is the edge.
nvml: Any = pynvml

MIB = 2**20
MIG_ENABLED = 1
DOUBTS_MAX = 8
"""Impossible values of one device that are told at a time."""

RANGES = {
    "utilization_pct": UTILIZATION_PCT,
    "temperature_c": TEMPERATURE_C,
    "power_mw": POWER_MW,
}

FAILURES = {
    15: ("gpu_lost", "the driver has lost it"),
    16: ("gpu_reset_required", "it needs a reset"),
    11: ("gpu_irq", "the kernel saw an interrupt problem"),
    8: ("gpu_power", "its external power is not connected"),
}
"""NVML return codes after which a device is of no use, by what they mean."""

CORES_PER_SM = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
"""By compute capability, where it is not 128: NVML counts cores, not multiprocessors."""


class _DeviceFailedError(Exception):
    """The device of a query is of no use any more."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(slots=True)
class _Listed:
    """A device of the last enumeration with its handle; None: it has failed."""

    device: Device
    handle: Any


class NvmlDriver:
    """``GpuDriver`` over NVML. ``sysfs`` is where /sys is, for NUMA nodes."""

    def __init__(self, sysfs: Path = Path("/sys")) -> None:
        self._sysfs = sysfs
        self._initialised = False
        self._listed: dict[DeviceUuid, _Listed] = {}
        self._failed: dict[DeviceUuid, FailedDevice] = {}
        self._memory_mib: dict[DeviceUuid, int] = {}
        self._doubts: dict[DeviceUuid, str] = {}
        self._nvlinks = NvlinkReader(_ask)

    def inventory(self) -> DriverInventory:
        """Every GPU and MIG instance, freshly enumerated."""
        self.close()
        self._demand(nvml.nvmlInit)
        self._initialised = True
        count = self._demand(nvml.nvmlDeviceGetCount)
        if not count:
            self.close()
            raise DriverUnavailableError("the driver lists no devices")
        before, self._listed, self._failed = self._listed, {}, {}
        unreadable: list[str] = []
        for index in range(count):
            try:
                handle = _query(nvml.nvmlDeviceGetHandleByIndex, index)
                self._list(index, handle)
            except _DeviceFailedError as failure:
                self._list_failed(index, before, failure)
                if not any(each.device.index == index for each in self._listed.values()):
                    unreadable.append(f"GPU {index}: {failure.reason}")
            except nvml.NVMLError as error:
                unreadable.append(f"GPU {index}: {error}")
        self._nvlinks.keep(set(self._listed))
        return DriverInventory(
            devices=tuple(each.device for each in self._listed.values()),
            failed=tuple(self._failed.values()),
            unreadable=tuple(unreadable),
            driver_version=_text(_ask(nvml.nvmlSystemGetDriverVersion)),
        )

    def usage(self) -> tuple[DeviceUsage, ...]:
        """Processes and memory of every device of the last inventory."""
        self._need_inventory()
        return tuple(self._usage(uuid, each) for uuid, each in self._listed.items())

    def telemetry(self) -> tuple[DeviceTelemetry, ...]:
        """Measurements of every device of the last inventory that has not failed."""
        self._need_inventory()
        found: list[DeviceTelemetry] = []
        doubts: dict[DeviceUuid, str] = {}
        for uuid, each in self._listed.items():
            if uuid in self._failed:
                continue
            try:
                measured, doubt = _telemetry(uuid, each.handle)
            except _DeviceFailedError as failure:
                self._fail(uuid, failure)
                continue
            found.append(measured)
            doubts[uuid] = doubt
        self._doubts = doubts
        return tuple(found)

    def close(self) -> None:
        """Give the library back."""
        if self._initialised:
            self._initialised = False
            _ask(nvml.nvmlShutdown)

    def _need_inventory(self) -> None:
        if not self._initialised:
            raise DriverUnavailableError("the driver has not been enumerated")

    def _demand(self, query: Callable[..., T]) -> T:
        try:
            return query()
        except nvml.NVMLError as error:
            raise DriverUnavailableError(str(error)) from error

    def _list(self, index: int, handle: Any) -> None:
        device = self._device(index, handle)
        mig = _ask(nvml.nvmlDeviceGetMigMode, handle)
        if not mig or mig[0] != MIG_ENABLED:
            self._listed[device.uuid] = _Listed(device, handle)
            return
        for instance in range(_ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            instance_handle = _ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, instance)
            if instance_handle is not None:
                mig_device = self._mig_device(device, instance_handle)
                self._listed[mig_device.uuid] = _Listed(mig_device, instance_handle)

    def _list_failed(
        self, index: int, before: dict[DeviceUuid, _Listed], failure: _DeviceFailedError
    ) -> None:
        """Keep listing what was at this index, as failed."""
        for uuid, each in before.items():
            if each.device.index == index:
                self._listed[uuid] = each
                self._fail(uuid, failure)

    def _fail(self, uuid: DeviceUuid, failure: _DeviceFailedError) -> FailedDevice:
        failed = FailedDevice(uuid=uuid, code=failure.code, reason=failure.reason)
        self._failed[uuid] = failed
        return failed

    def _device(self, index: int, handle: Any) -> Device:
        uuid = DeviceUuid(_text(_query(nvml.nvmlDeviceGetUUID, handle)))
        pci = _ask(nvml.nvmlDeviceGetPciInfo, handle)
        address = pci_address(_text(pci.busId)) if pci is not None else ""
        slot = pci_device(self._sysfs, address)
        fabric, links = read_fabric(handle, _ask), self._nvlinks.read(uuid, handle)
        capability = cast(
            "tuple[int, int] | None", _ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        )
        cores = _ask(nvml.nvmlDeviceGetNumGpuCores, handle) or 0
        return Device(
            uuid=uuid,
            model=_text(_ask(nvml.nvmlDeviceGetName, handle)),
            pci_address=address,
            memory_mib=self._usable_memory_mib(uuid, handle),
            index=index,
            numa_node=numa_node(slot) if address else -1,
            pci_path=pci_path(slot) if address else "",
            cpus=local_cpus(slot) if address else "",
            fabric_state=fabric.fabric_state,
            fabric_status=fabric.fabric_status,
            cluster_uuid=fabric.cluster_uuid,
            clique_id=fabric.clique_id,
            nvlink_domain=fabric.nvlink_domain,
            nvlinks_active=links.nvlinks_active,
            nvlinks_expected=links.nvlinks_expected,
            nvlink_peers=links.nvlink_peers,
            sm_count=cores // CORES_PER_SM.get(capability, 128) if capability else 0,
            compute_capability=f"{capability[0]}.{capability[1]}" if capability else "",
            serial=_text(_ask(nvml.nvmlDeviceGetSerial, handle)),
        )

    def _mig_device(self, parent: Device, handle: Any) -> Device:
        uuid = DeviceUuid(_text(_query(nvml.nvmlDeviceGetUUID, handle)))
        attributes = _ask(nvml.nvmlDeviceGetAttributes_v2, handle)
        return Device(
            uuid=uuid,
            model=_text(_ask(nvml.nvmlDeviceGetName, handle)) or parent.model,
            pci_address=parent.pci_address,
            memory_mib=self._usable_memory_mib(uuid, handle),
            index=parent.index,
            numa_node=parent.numa_node,
            pci_path=parent.pci_path,
            cpus=parent.cpus,
            sm_count=attributes.multiprocessorCount if attributes is not None else 0,
            sliceable=False,
            parent_uuid=parent.uuid,
            compute_capability=parent.compute_capability,
            serial=parent.serial,
        )

    def _usable_memory_mib(self, uuid: DeviceUuid, handle: Any) -> int | None:
        """Total less reserved; a reading that fails once does not make it unknown."""
        memory, _ = _memory(handle)
        if memory is None:
            return self._memory_mib.get(uuid)
        usable_mib: int = (memory.total - getattr(memory, "reserved", 0)) // MIB
        self._memory_mib[uuid] = usable_mib
        return usable_mib

    def _usage(self, uuid: DeviceUuid, each: _Listed) -> DeviceUsage:
        failed = self._failed.get(uuid)
        if failed is None:
            try:
                memory, doubt = _memory(each.handle)
                processes, of_processes = _processes(
                    each.handle, MEMORY_BYTES_MAX if memory is None else memory.total
                )
                doubts = (doubt, *of_processes, self._doubts.get(uuid, ""))
                return DeviceUsage(
                    uuid=uuid,
                    processes=processes,
                    memory_used_mib=None if memory is None else memory.used // MIB,
                    doubt="; ".join(filter(None, doubts[:DOUBTS_MAX])),
                )
            except _DeviceFailedError as failure:
                failed = self._fail(uuid, failure)
        return DeviceUsage(uuid=uuid, processes=None, memory_used_mib=None, failed=failed)


def _query(query: Callable[..., T], *arguments: Any) -> T:
    """Ask, and tell a device that is of no use from a query that fails."""
    try:
        return query(*arguments)
    except nvml.NVMLError as error:
        if error.value in FAILURES:
            raise _DeviceFailedError(*FAILURES[error.value]) from error
        raise


def _ask(query: Callable[..., T], *arguments: Any) -> T | None:
    """Ask; None where the device or the driver cannot say."""
    try:
        return _query(query, *arguments)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def _memory(handle: Any) -> tuple[Any | None, str]:
    """Memory with its reserve, and why not; an older driver folds the reserve into what is used."""
    memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle) if memory is None else memory
    if memory is None:
        return None, ""
    doubt = memory_doubt(memory.used, memory.total, getattr(memory, "reserved", 0))
    return (None, doubt) if doubt else (memory, "")


def _processes(
    handle: Any, total_bytes: int
) -> tuple[tuple[GpuProcess, ...] | None, tuple[str, ...]]:
    """Compute processes, and what is wrong with their memory.

    Under MPS its clients are listed apart from its server.
    """
    running: list[Any] | None = _ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    if running is None:
        return None, ()
    clients: list[Any] | None = _ask(nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, handle)
    told: dict[int, int] = {
        each.pid: each.usedGpuMemory or 0 for each in [*running, *(clients or [])]
    }
    through_mps = None if clients is None else {each.pid for each in clients}
    doubts = {pid: process_doubt(pid, used, total_bytes) for pid, used in told.items()}
    found = tuple(
        GpuProcess(
            pid=pid,
            # What is there is listed, however much it says it holds.
            memory_mib=0 if doubts[pid] else told[pid] // MIB,
            through_mps=None if through_mps is None else pid in through_mps,
        )
        for pid in sorted(told)
    )
    return found, tuple(filter(None, doubts.values()))


def _telemetry(uuid: DeviceUuid, handle: Any) -> tuple[DeviceTelemetry, str]:
    """Measurements, and what of them cannot be; memory is doubted where usage is read."""
    memory, _ = _memory(handle)
    rates = _ask(nvml.nvmlDeviceGetUtilizationRates, handle)
    values = {
        "utilization_pct": None if rates is None else rates.gpu,
        "temperature_c": _ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "power_mw": _ask(nvml.nvmlDeviceGetPowerUsage, handle),
    }
    doubts = {name: range_doubt(name, values[name], RANGES[name]) for name in values}
    sound = {name: None if doubts[name] else value for name, value in values.items()}
    measured = DeviceTelemetry(
        uuid=uuid, memory_used_mib=None if memory is None else memory.used // MIB, **sound
    )
    return measured, "; ".join(filter(None, doubts.values()))
