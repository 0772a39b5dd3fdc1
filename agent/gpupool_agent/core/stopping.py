"""Ending processes that must not go on: asked, after a grace killed, until they are gone.

Three kinds are ended: those of an assignment whose time without an allocator is over,
those that an ended assignment has left behind, and, where the operator wants it, strays.
A process of a running assignment inside its limits is none of them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gpupool.model.assignment import AssignmentState, ProcessNote, ProcessNoteKind
from gpupool.model.ids import DeviceUuid
from gpupool.model.inventory import StrayCause
from gpupool_agent.core.assignments import Kept
from gpupool_agent.core.book import Book
from gpupool_agent.core.devices import Devices
from gpupool_agent.core.events import NodeEffect, ReadUsage, StopProcess
from gpupool_agent.core.membership import Bonds, stray_process
from gpupool_agent.core.readings import DeviceProcess

STOP_GRACE_S = 10.0
"""From SIGTERM to SIGKILL, and between tries where one does not help."""

RETRY_S_MAX = 60.0
"""Longest time added to that, while signals cannot be sent."""

LOOK_S_MIN = 0.25
LOOK_S_MAX = 2.0
ProcessName = tuple[int, int]
"""Pid and start time: one process for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPolicy:
    """What is ended besides work whose time is over.

    ``leftovers``: what ended assignments leave behind, which takes a root helper.
    ``strays``: every process that should not be on its device.
    """

    leftovers: bool = False
    strays: bool = False


OUT_OF_TIME_ONLY = StopPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A process to be ended, and why, for people."""

    uuid: DeviceUuid
    process: DeviceProcess
    why: str
    cause: str = ""
    lease_id: str = ""


@dataclass(slots=True)
class _Stopping:
    """A process on its way out. ``next_s``: when the next signal is due."""

    target: _Target
    next_s: float
    look_s: float
    look_delay_s: float = LOOK_S_MIN
    force: bool = False
    failed: bool = False
    failures: int = 0


class Stopper:
    """Processes that are being ended. ``may_strays``: whose is what is known by now."""

    def __init__(self, policy: StopPolicy) -> None:
        self.may_strays = False
        self.stopped = 0
        """Processes that were ended since the agent's start."""

        self._policy = policy
        self._notes: list[ProcessNote] = []
        self._under_way: dict[ProcessName, _Stopping] = {}
        self._spared: Counter[int] = Counter()
        # When a stray was first seen on a device, by the start of the reading.
        self._seen: dict[tuple[DeviceUuid, ProcessName], float] = {}

    def settle(self, book: Book, devices: Devices, now: float, bonds: Bonds) -> list[NodeEffect]:
        """Tell each process that is to end, once gently, then not; note those that are gone."""
        wanted: dict[ProcessName, _Target] = {}
        for target in self._targets(book, devices, bonds):
            wanted.setdefault(_name(target.process), target)
        self._note_gone(devices, wanted)
        effects: list[NodeEffect] = []
        for name, target in wanted.items():
            effects += self._signal(name, target, now)
        if self._look_is_due(now):
            effects.append(ReadUsage())
        return effects

    def _look_is_due(self, now: float) -> bool:
        due = [each for each in self._under_way.values() if now >= each.look_s]
        for each in due:
            each.look_s = now + each.look_delay_s
            each.look_delay_s = min(2 * each.look_delay_s, LOOK_S_MAX)
        return bool(due)

    def spare(self, pid: int, *, over: bool) -> None:
        """Let a process be that may be adopted at once; ``over``: no longer."""
        self._spared[pid] += -1 if over else 1
        self._spared = +self._spared

    def is_ending(self, pid: int, start_ticks: int) -> bool:
        """Whether a process has been told to end."""
        return (pid, start_ticks) in self._under_way

    def failed(self, pid: int, start_ticks: int) -> None:
        """A signal was not sent: it is tried again, after a delay that grows."""
        found = self._under_way.get((pid, start_ticks))
        if found is not None:
            found.failed = True
            found.next_s += min(STOP_GRACE_S * (2**found.failures - 1), RETRY_S_MAX)
            found.failures = min(found.failures + 1, 16)

    def deadlines(self) -> Iterator[float]:
        """When a process is to be told again, or looked for."""
        for each in self._under_way.values():
            yield min(each.next_s, each.look_s)

    def take_notes(self) -> tuple[ProcessNote, ...]:
        """What was done to processes since the last time."""
        notes, self._notes = tuple(self._notes), []
        return notes

    # -- whom ----------------------------------------------------------------

    def _targets(self, book: Book, devices: Devices, bonds: Bonds) -> Iterator[_Target]:
        yield from self._leftovers(book, devices, bonds)
        yield from self._strays(book, devices, bonds)

    def _leftovers(self, book: Book, devices: Devices, bonds: Bonds) -> Iterator[_Target]:
        """Of an ended assignment: what it has on its devices although it is cleaned up."""
        for kept in book.kept.values():
            if kept.state is not AssignmentState.ENDING:
                continue
            for share in kept.assignment.place.devices:
                uuid = share.device_uuid
                out_of_time = kept.stop_since_s is not None
                if not out_of_time and not self._is_left(kept, uuid, devices):
                    continue
                lease_id = kept.assignment.key.lease_id
                for process, sure in book.members(kept, uuid, bonds):
                    if sure or out_of_time:
                        yield _Target(
                            uuid=uuid,
                            process=process,
                            why=f"its lease {lease_id} has ended",
                            cause=StrayCause.OUTLIVED,
                            lease_id=lease_id,
                        )

    def _is_left(self, kept: Kept, uuid: DeviceUuid, devices: Devices) -> bool:
        """Whether what a device still shows of an assignment is what that leaves behind."""
        return (
            self._policy.leftovers
            and kept.cleaned_s is not None
            and devices.read_since(uuid, kept.cleaned_s)
        )

    def _strays(self, book: Book, devices: Devices, bonds: Bonds) -> Iterator[_Target]:
        """Seen at two readings at least: one may have met a process half way."""
        if not (self._policy.strays and self.may_strays) or devices.silent:
            return
        seen: dict[tuple[DeviceUuid, ProcessName], float] = {}
        for uuid, known in devices.known.items():
            for stray in book.strays(uuid, bonds) if devices.processes(uuid) else ():
                name = uuid, _name(stray.process)
                first_s = seen[name] = self._seen.get(name, known.read_started_s)
                again = first_s < known.read_started_s
                spared = name[1] not in self._under_way and stray.process.pid in self._spared
                if again and stray.certain and stray.process.start_ticks and not spared:
                    yield _Target(
                        uuid=uuid,
                        process=stray.process,
                        why=str(stray),
                        cause=stray.cause,
                        lease_id=stray.lease_id,
                    )
        self._seen = seen

    # -- how -----------------------------------------------------------------

    def _signal(self, name: ProcessName, target: _Target, now: float) -> list[NodeEffect]:
        found = self._under_way.get(name)
        if found is None:
            found = self._under_way[name] = _Stopping(
                target=target, next_s=now, look_s=now + LOOK_S_MIN
            )
        elif now >= found.next_s and not found.failed:
            found.force, found.failures = True, 0
        if now < found.next_s:
            return []
        found.target, found.failed, found.next_s = target, False, now + STOP_GRACE_S
        process = target.process
        return [
            StopProcess(
                pid=process.pid,
                start_ticks=process.start_ticks,
                force=found.force,
                gpu=target.uuid,
                reason=target.why,
                user=process.user or str(process.uid),
                command=process.command,
                lease_id=target.lease_id,
            )
        ]

    def _note_gone(self, devices: Devices, wanted: dict[ProcessName, _Target]) -> None:
        """Those that are gone were ended; those that may stay after all are left alone."""
        for name, each in list(self._under_way.items()):
            if name in wanted:
                continue
            del self._under_way[name]
            uuid = each.target.uuid
            listed = any(_name(process) == name for process in devices.processes(uuid))
            unheard = each.failed and not each.force
            unknown = devices.failure(uuid) or devices.unreadable(uuid)
            if listed or unheard or unknown:
                continue
            self.stopped += 1
            how = "SIGKILL" if each.force and not each.failed else "SIGTERM"
            self._notes.append(_note(each.target, how))


def _note(target: _Target, how: str) -> ProcessNote:
    return ProcessNote(
        kind=ProcessNoteKind.STOPPED,
        device_uuid=target.uuid,
        process=stray_process(target.process, target.lease_id, target.cause),
        reason=how,
    )


def _name(process: DeviceProcess) -> ProcessName:
    return process.pid, process.start_ticks
