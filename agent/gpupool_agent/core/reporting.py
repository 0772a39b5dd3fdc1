"""What the allocator is told: what changed, and in between everything anew.

A full account begins each connection and comes again at a steady pace. The allocator
holds its book against it, so that whatever either side has lost is found within
minutes and not only at the next connection.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from gpupool.model.assignment import (
    AssignmentReport,
    DeviceReport,
    FaultReport,
    ProcessNote,
    Report,
)
from gpupool.model.ids import DeviceUuid
from gpupool.model.inventory import NodeInventory
from gpupool_agent.core.assignments import AssignmentName
from gpupool_agent.core.book import Book
from gpupool_agent.core.devices import Devices
from gpupool_agent.core.holders import Holders
from gpupool_agent.core.membership import Bonds
from gpupool_agent.core.texts import sendable, sendable_name

ACCOUNT_INTERVALS = 12
"""A full account comes once in so many report intervals: every minute by default."""

ACCOUNT_S_MIN = 1.0
ACCOUNT_S_MAX = 300.0
"""However short or long the report interval is."""

STRAYS_MAX = 64
"""Strays named on one device; a fork bomb must not fill the wire."""

NOTES_MAX = 256
"""What was done to processes, waiting to be told however long nobody listens."""

MPS_FAULT = "mps_trouble"
DOUBT_FAULT = "impossible_reading"

FaultName = tuple[str, DeviceUuid | None]


class Faults:
    """Open findings of this agent about the node and its devices."""

    def __init__(self) -> None:
        self.open: dict[FaultName, FaultReport] = {}
        # The last word on each: bounded however long nobody listens.
        self._untold: dict[FaultName, FaultReport] = {}

    def update(self, devices: Devices, unix_s: float) -> None:
        """Open and close device faults after a reading."""
        found = {
            (known.failed.code, uuid): known.failed.reason
            for uuid, known in devices.known.items()
            if known.failed is not None
        }
        found |= {(MPS_FAULT, uuid): why for uuid, why in devices.mps_troubles.items()}
        found |= {
            (DOUBT_FAULT, uuid): known.state.doubt
            for uuid, known in devices.known.items()
            if known.state is not None and known.state.doubt
        }
        for name in [name for name in self.open if name[1] is not None and name not in found]:
            self.close(*name, unix_s)
        for (code, uuid), evidence in found.items():
            self.raise_(code, uuid, evidence, unix_s)

    def raise_(self, code: str, uuid: DeviceUuid | None, evidence: str, unix_s: float) -> None:
        """Open a fault, once."""
        if (code, uuid) not in self.open:
            fault = FaultReport(
                code=code, device_uuid=uuid, evidence=sendable(evidence), open=True, unix_s=unix_s
            )
            self.open[code, uuid] = self._untold[code, uuid] = fault

    def close(self, code: str, uuid: DeviceUuid | None, unix_s: float) -> None:
        """Close a fault that is open."""
        fault = self.open.pop((code, uuid), None)
        if fault is not None:
            closed = FaultReport(
                code=code, device_uuid=uuid, evidence=fault.evidence, open=False, unix_s=unix_s
            )
            self._untold[code, uuid] = closed

    def take_untold(self) -> tuple[FaultReport, ...]:
        """Changes since the last report."""
        untold = tuple(self._untold.values())
        self._untold.clear()
        return untold

    def account(self) -> tuple[FaultReport, ...]:
        """Every open fault, and before them those closed since the last report."""
        closed = tuple(fault for fault in self.take_untold() if not fault.open)
        return (*closed, *self.open.values())


class Outbox:
    """Compares what is with what the allocator has heard on this connection."""

    def __init__(
        self,
        book: Book,
        devices: Devices,
        holders: Holders,
        faults: Faults,
        bonds: Callable[[], Bonds],
    ) -> None:
        self._bonds = bonds
        self._notes: deque[ProcessNote] = deque(maxlen=NOTES_MAX)
        self._book = book
        self._devices = devices
        self._holders = holders
        self._faults = faults
        self._assignments: dict[AssignmentName, AssignmentReport] = {}
        self._reports: dict[DeviceUuid, DeviceReport] = {}
        self._inventory: NodeInventory | None = None
        self._account_every_s = ACCOUNT_S_MAX
        self.account_due_s = 0.0
        """When the next full account is due, while there is a connection."""

    def said_in_hello(self, inventory: NodeInventory) -> None:
        """The connection that is being opened need not hear this inventory again."""
        self._inventory = inventory

    def note(self, note: ProcessNote) -> None:
        """The next report tells of it, whenever that is; the oldest are forgotten first."""
        self._notes.append(
            replace(note, reason=sendable_name(note.reason), actor=sendable_name(note.actor))
        )

    def _take_notes(self) -> tuple[ProcessNote, ...]:
        notes = tuple(self._notes)
        self._notes.clear()
        return notes

    def begin(self, report_interval_s: float, now: float) -> None:
        """A connection begins, with a full account."""
        every_s = ACCOUNT_INTERVALS * report_interval_s
        self._account_every_s = min(max(every_s, ACCOUNT_S_MIN), ACCOUNT_S_MAX)
        self.account_due_s = now
        # What was closed while nobody listened is history.
        self._faults.take_untold()

    def end(self) -> None:
        """The connection is over: the next one has heard nothing yet."""
        self._inventory = None

    def report(self, inventory: NodeInventory, revision: int, now: float) -> Report | None:
        """What is to be said now; None: nothing."""
        if now >= self.account_due_s:
            self.account_due_s = now + self._account_every_s
            return self._account(inventory, revision)
        return self._delta(inventory, revision)

    def _account(self, inventory: NodeInventory, revision: int) -> Report:
        """Everything; only the inventory, which is big, is left out where it was said."""
        self._holders.tell_all()
        self._assignments, self._reports = self._assignments_now(), self.devices_now()
        report = Report(
            full=True,
            inventory=None if inventory == self._inventory else inventory,
            assignments=tuple(kept.report(with_place=True) for kept in self._book.kept.values()),
            devices=tuple(self._reports.values()),
            alive_holders=self._holders.alive(),
            ended_holders=self._holders.take_untold(),
            accepted_revision=revision,
            faults=self._faults.account(),
            process_notes=self._take_notes(),
        )
        self._inventory = inventory
        return report

    def _delta(self, inventory: NodeInventory, revision: int) -> Report | None:
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
            process_notes=self._take_notes(),
        )
        self._inventory, self._assignments, self._reports = inventory, assignments, devices
        changed = (
            report.inventory,
            report.assignments,
            report.devices,
            report.ended_holders,
            report.faults,
            report.process_notes,
        )
        return report if any(changed) else None

    def devices_now(self) -> dict[DeviceUuid, DeviceReport]:
        """State of every known device."""
        bonds = self._bonds()
        return {uuid: self._device(uuid, bonds) for uuid in self._devices.known}

    def _assignments_now(self) -> dict[AssignmentName, AssignmentReport]:
        return {
            name: kept.report(degraded=self._devices.degraded(kept))
            for name, kept in self._book.kept.items()
        }

    def _device(self, uuid: DeviceUuid, bonds: Bonds) -> DeviceReport:
        failure = self._devices.failure(uuid)
        if failure:
            return DeviceReport(uuid=uuid, clean=False, failed=True, reason=sendable(failure))
        unreadable = self._devices.unreadable(uuid)
        if unreadable:
            return DeviceReport(uuid=uuid, clean=False, reason=sendable(unreadable))
        strays = self._book.strays(uuid, bonds)
        reason = str(strays[0]) if strays else ""
        if len(strays) > 1:
            reason = f"{reason}; {len(strays) - 1} more should not be there"
        reason = reason or self._devices.mps_troubles.get(uuid, "")
        if not reason and not self._book.on_device(uuid):
            reason = self._devices.memory_held(uuid)
        return DeviceReport(
            uuid=uuid,
            clean=not reason,
            strays=tuple(stray.reported() for stray in strays[:STRAYS_MAX]),
            reason=sendable(reason),
        )
