"""The node's devices: present or lost, what runs on them, and their memory.

A device is clean when nothing runs on it outside assignments and, where nobody has
it, its memory is free to its baseline: the least that was ever seen in use on it
while nothing ran, since an idle driver keeps some for itself.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gpupool.model.assignment import AssignmentState
from gpupool.model.ids import DeviceUuid
from gpupool.model.inventory import Device
from gpupool_agent.core.assignments import Kept
from gpupool_agent.core.readings import DeviceProcess, DeviceState, DriverInventory, FailedDevice

IDLE_MEMORY_MIB_MAX = 1024
"""More than any driver keeps on an idle device: above it somebody unseen holds memory."""

MEMORY_SLACK_MIB = 64
"""Baselines wander a little, by page tables and the like."""

IMPOSSIBLE = "its driver tells what cannot be"

ABSENT_KEPT_S = 300.0
"""A device that is gone stays listed, as lost, for so long: a driver reload takes less."""


@dataclass(slots=True)
class KnownDevice:
    """A device with its last reading. ``absent_since_s`` None: the driver lists it."""

    device: Device
    failed: FailedDevice | None = None
    absent_since_s: float | None = None
    state: DeviceState | None = None
    read_started_s: float = float("-inf")
    baseline_mib: int = IDLE_MEMORY_MIB_MAX


class Devices:
    """Every device of the node that the driver lists, or listed a short while ago."""

    def __init__(self) -> None:
        self.known: dict[DeviceUuid, KnownDevice] = {}
        self.silent = ""
        self.mps_troubles: dict[DeviceUuid, str] = {}

    def enumerate(self, inventory: DriverInventory, now: float) -> None:
        """Take over a fresh enumeration; it ends a silence of the driver."""
        self.silent = ""
        failed = {entry.uuid: entry for entry in inventory.failed}
        listed = {device.uuid for device in inventory.devices}
        order: dict[DeviceUuid, KnownDevice] = {}
        for device in inventory.devices:
            known = self.known.get(device.uuid) or KnownDevice(device)
            known.device = device
            known.absent_since_s = None
            known.failed = failed.get(device.uuid)
            order[device.uuid] = known
        for uuid, known in self.known.items():
            if uuid not in listed:
                if known.absent_since_s is None:
                    known.absent_since_s = now
                    known.state = None
                known.failed = FailedDevice(
                    uuid=uuid, code="gpu_absent", reason="the driver lists it no more"
                )
                order[uuid] = known
        self.known = order

    def forget_absent(self, now: float, in_use: frozenset[DeviceUuid]) -> bool:
        """Drop devices that have been gone for long and are of no use to anyone.

        While the driver lists nothing at all it is more likely reloading than emptied.
        """
        if all(known.absent_since_s is not None for known in self.known.values()):
            return False
        gone = [
            uuid
            for uuid, known in self.known.items()
            if known.absent_since_s is not None
            and now >= known.absent_since_s + ABSENT_KEPT_S
            and uuid not in in_use
        ]
        for uuid in gone:
            del self.known[uuid]
        return bool(gone)

    def next_forget_s(self, in_use: frozenset[DeviceUuid]) -> float | None:
        """When ``forget_absent`` may drop something."""
        if all(known.absent_since_s is not None for known in self.known.values()):
            return None
        times = [
            known.absent_since_s + ABSENT_KEPT_S
            for uuid, known in self.known.items()
            if known.absent_since_s is not None and uuid not in in_use
        ]
        return min(times, default=None)

    def read(self, states: Iterable[DeviceState], started_s: float) -> None:
        """Take over readings of processes and memory."""
        self.silent = ""
        for state in states:
            known = self.known.get(state.uuid)
            if known is None or known.absent_since_s is not None:
                continue
            known.failed = state.failed
            if state.failed is None and started_s >= known.read_started_s:
                known.state = state
                known.read_started_s = started_s
                if state.memory_used_mib is not None and state.processes == ():
                    known.baseline_mib = min(known.baseline_mib, state.memory_used_mib)

    def failure(self, uuid: DeviceUuid) -> str:
        """Why a device cannot be used; empty: it can."""
        known = self.known.get(uuid)
        if known is None:
            return "not found on this node"
        if self.silent:
            return self.silent
        return known.failed.reason if known.failed else ""

    def is_lost(self, uuid: DeviceUuid) -> bool:
        """The driver answers, and says that the device is gone: nothing can run there."""
        known = self.known.get(uuid)
        if self.silent:
            return False
        return known is None or known.failed is not None

    def read_since(self, uuid: DeviceUuid, time_s: float) -> bool:
        """Whether the last reading began at ``time_s`` or later."""
        known = self.known.get(uuid)
        return known is not None and known.read_started_s >= time_s

    def oldest_reading_s(self) -> float:
        """When the oldest began of the readings that show processes; infinity: none does."""
        readings = (k.read_started_s for uuid, k in self.known.items() if self.processes(uuid))
        return min(readings, default=math.inf)

    def processes(self, uuid: DeviceUuid) -> tuple[DeviceProcess, ...]:
        """Processes on a device at its last reading."""
        known = self.known.get(uuid)
        return (known.state.processes if known and known.state else None) or ()

    def degraded(self, kept: Kept) -> str:
        """Why the slices of a prepared assignment do not work as they should."""
        if kept.state is not AssignmentState.PREPARED:
            return ""
        for share in kept.assignment.place.devices:
            trouble = self.mps_troubles.get(share.device_uuid)
            if trouble and not share.whole:
                return f"{share.device_uuid}: {trouble}"
        return ""

    def unreadable(self, uuid: DeviceUuid) -> str:
        """Why it cannot be told what runs on a device; empty: it can."""
        known = self.known.get(uuid)
        if known is None or known.state is None:
            return "not read yet"
        if known.state.processes is None:
            return "the driver cannot list its processes"
        return ""

    def memory_held(self, uuid: DeviceUuid) -> str:
        """What is wrong with the memory of a device that nobody should be on."""
        known = self.known.get(uuid)
        if known is None or known.state is None:
            return ""
        used_mib = known.state.memory_used_mib
        if used_mib is None:
            # Unknown for good is one thing; an impossible value confirms nothing.
            return f"{IMPOSSIBLE}: {known.state.doubt}" if known.state.doubt else ""
        if used_mib <= known.baseline_mib + MEMORY_SLACK_MIB:
            return ""
        return f"{used_mib} MiB are in use, {known.baseline_mib} MiB when idle"
