"""What the allocator is told: everything once, then only what changed."""

from gpupool.model.assignment import (
    AssignmentReport,
    DeviceReport,
    FaultReport,
    Report,
)
from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool.model.inventory import NodeInventory
from gpupool_agent.core.assignments import AssignmentName
from gpupool_agent.core.book import Book
from gpupool_agent.core.devices import Devices, describe, stray
from gpupool_agent.core.holders import Holders

STRAYS_MAX = 64
"""Strays named on one device; a fork bomb must not fill the wire."""

MPS_FAULT = "mps_trouble"

FaultName = tuple[str, DeviceUuid | None]


class Faults:
    """Open findings of this agent about the node and its devices."""

    def __init__(self) -> None:
        self.open: dict[FaultName, FaultReport] = {}
        self._untold: list[FaultReport] = []

    def update(self, devices: Devices, unix_s: float) -> None:
        """Open and close device faults after a reading."""
        found = {
            (known.failed.code, uuid): known.failed.reason
            for uuid, known in devices.known.items()
            if known.failed is not None
        }
        found |= {(MPS_FAULT, uuid): why for uuid, why in devices.mps_troubles.items()}
        for name in [name for name in self.open if name[1] is not None and name not in found]:
            self.close(*name, unix_s)
        for (code, uuid), evidence in found.items():
            self.raise_(code, uuid, evidence, unix_s)

    def raise_(self, code: str, uuid: DeviceUuid | None, evidence: str, unix_s: float) -> None:
        """Open a fault, once."""
        if (code, uuid) not in self.open:
            fault = FaultReport(
                code=code, device_uuid=uuid, evidence=evidence, open=True, unix_s=unix_s
            )
            self.open[code, uuid] = fault
            self._untold.append(fault)

    def close(self, code: str, uuid: DeviceUuid | None, unix_s: float) -> None:
        """Close a fault that is open."""
        fault = self.open.pop((code, uuid), None)
        if fault is not None:
            closed = FaultReport(
                code=code, device_uuid=uuid, evidence=fault.evidence, open=False, unix_s=unix_s
            )
            self._untold.append(closed)

    def take_untold(self) -> tuple[FaultReport, ...]:
        """Changes since the last report."""
        untold, self._untold = tuple(self._untold), []
        return untold

    def all(self) -> tuple[FaultReport, ...]:
        """Every open fault, for a full report; closed ones are then history."""
        self._untold = []
        return tuple(self.open.values())


class Outbox:
    """Compares what is with what the allocator has heard on this connection."""

    def __init__(self, book: Book, devices: Devices, holders: Holders, faults: Faults) -> None:
        self._book = book
        self._devices = devices
        self._holders = holders
        self._faults = faults
        self._assignments: dict[AssignmentName, AssignmentReport] = {}
        self._reports: dict[DeviceUuid, DeviceReport] = {}
        self._inventory: NodeInventory | None = None

    def full(self, inventory: NodeInventory, revision: int) -> Report:
        """The snapshot that a connection begins with."""
        self._holders.tell_all()
        self._inventory = inventory
        self._assignments = self._assignments_now()
        self._reports = self.devices_now()
        return Report(
            full=True,
            inventory=inventory,
            assignments=tuple(self._assignments.values()),
            devices=tuple(self._reports.values()),
            alive_holders=self._holders.alive(),
            ended_holders=self._holders.take_untold(),
            accepted_revision=revision,
            faults=self._faults.all(),
        )

    def delta(self, inventory: NodeInventory, revision: int) -> Report | None:
        """What changed since the last report; None: nothing."""
        assignments, devices = self._assignments_now(), self.devices_now()
        report = Report(
            inventory=None if inventory == self._inventory else inventory,
            assignments=tuple(
                each for name, each in assignments.items() if self._assignments.get(name) != each
            ),
            devices=tuple(
                each for uuid, each in devices.items() if self._reports.get(uuid) != each
            ),
            alive_holders=self._holders.alive(),
            ended_holders=self._holders.take_untold(),
            accepted_revision=revision,
            faults=self._faults.take_untold(),
        )
        self._inventory, self._assignments, self._reports = inventory, assignments, devices
        changed = (
            report.inventory,
            report.assignments,
            report.devices,
            report.ended_holders,
            report.faults,
        )
        return report if any(changed) else None

    def devices_now(self) -> dict[DeviceUuid, DeviceReport]:
        """State of every known device."""
        pids = self._holders.pids()
        return {uuid: self._device(uuid, pids) for uuid in self._devices.known}

    def _assignments_now(self) -> dict[AssignmentName, AssignmentReport]:
        return {
            name: kept.report(degraded=self._devices.degraded(kept))
            for name, kept in self._book.kept.items()
        }

    def _device(self, uuid: DeviceUuid, pids: dict[LeaseId, int]) -> DeviceReport:
        failure = self._devices.failure(uuid)
        if failure:
            return DeviceReport(uuid=uuid, clean=False, failed=True, reason=failure)
        unreadable = self._devices.unreadable(uuid)
        if unreadable:
            return DeviceReport(uuid=uuid, clean=False, reason=unreadable)
        strays = self._book.strays(uuid, pids)
        reason = f"{describe(strays[0])} is on it" if strays else ""
        reason = reason or self._devices.mps_troubles.get(uuid, "")
        if not reason and not self._book.on_device(uuid):
            reason = self._devices.memory_held(uuid)
        return DeviceReport(
            uuid=uuid,
            clean=not reason,
            strays=tuple(stray(process) for process in strays[:STRAYS_MAX]),
            reason=reason,
        )
