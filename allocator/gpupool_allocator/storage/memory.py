"""A store in memory, for tests and simulation, that can fail on request.

A ``MemoryDisk`` outlives the stores that are opened on it, as a file or an etcd
cluster does; several stores may be open on one, and the epoch tells their terms apart.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from gpupool.model.event import Event
from gpupool_allocator.storage.checks import (
    check_above,
    check_events,
    check_operations,
    check_read,
)
from gpupool_allocator.storage.store import (
    EpochLostError,
    Operation,
    StoredValue,
    StoreError,
    StoreFullError,
)


class Failure(Enum):
    """What the next write does instead of succeeding."""

    FULL = "nothing is written, and it says so"
    LOST = "nothing is written, and nobody can know"
    ANSWER_LOST = "all is written, and nobody can know"


@dataclass(slots=True, kw_only=True)
class MemoryDisk:
    """What stays when a store is closed or its process dies.

    ``failures`` are met by the next writes, one each. ``refusal`` is what
    ``accepts_writes`` answers. ``reserve`` is given up once.
    """

    history_max: int = 1_000_000
    deletions_max: int = 10_000
    reserve: bool = True
    refusal: str = ""
    failures: deque[Failure] = field(default_factory=deque[Failure])
    epoch: int = 0
    revision: int = 0
    forgotten: int = 0
    records: dict[tuple[str, str], StoredValue] = field(
        default_factory=dict[tuple[str, str], StoredValue]
    )
    deletions: deque[StoredValue] = field(default_factory=deque[StoredValue])
    history: deque[Event] = field(default_factory=deque[Event])


class MemoryStore:
    """Store and History on a ``MemoryDisk``."""

    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self.disk = MemoryDisk() if disk is None else disk
        self._failed = False

    def begin_term(self, *, above: int = 0) -> int:
        """See Store."""
        check_above(above)
        failure = self._next_failure()
        if failure is not Failure.LOST:
            self.disk.epoch = max(self.disk.epoch, above) + 1
        self._answer(failure)
        return self.disk.epoch

    def load(self) -> Iterator[StoredValue]:
        """See Store."""
        self._check_usable()
        records = self.disk.records
        return iter([records[name] for name in sorted(records)])

    def commit(
        self, epoch: int, operations: Sequence[Operation], events: Sequence[Event] = ()
    ) -> None:
        """See Store."""
        writes = check_operations(operations)
        self._check_usable()
        if epoch != self.disk.epoch:
            raise EpochLostError(f"epoch {epoch} is over: the store is at epoch {self.disk.epoch}")
        check_events(events, self.bounds()[1])
        failure = self._next_failure()
        if failure is not Failure.LOST:
            self._write(writes)
            self._append(events)
        self._answer(failure)

    def watch(self, after_revision: int) -> Iterator[StoredValue]:
        """See Store."""
        self._check_usable()
        disk = self.disk
        if not disk.forgotten <= after_revision <= disk.revision:
            raise LookupError(
                f"after_revision: {after_revision}, changes are kept after "
                f"{disk.forgotten} to {disk.revision}"
            )
        changes = [
            each
            for each in (*disk.records.values(), *disk.deletions)
            if each.revision > after_revision
        ]
        return iter(sorted(changes, key=lambda each: (each.revision, each.kind, each.key)))

    def free_reserve(self) -> bool:
        """See Store."""
        given, self.disk.reserve = self.disk.reserve, False
        return given

    def accepts_writes(self) -> str:
        """See Store."""
        return "the store failed" if self._failed else self.disk.refusal

    def read(self, *, after_sequence: int, limit: int, subject: str = "") -> list[Event]:
        """See History."""
        check_read(after_sequence, limit)
        self._check_usable()
        found = [
            event
            for event in self.disk.history
            if event.sequence > after_sequence and subject in ("", event.subject)
        ]
        return found[:limit]

    def bounds(self) -> tuple[int, int]:
        """See History."""
        self._check_usable()
        history = self.disk.history
        return (history[0].sequence, history[-1].sequence) if history else (0, 0)

    def close(self) -> None:
        """See Store."""

    def _write(self, writes: Sequence[Operation]) -> None:
        disk = self.disk
        if not writes:
            return
        disk.revision += 1
        for each in writes:
            name = (each.kind, each.key)
            change = StoredValue(
                kind=each.kind, key=each.key, value=each.value, revision=disk.revision
            )
            if each.value is not None:
                disk.records[name] = change
            elif disk.records.pop(name, None) is not None:
                disk.deletions.append(change)
        while len(disk.deletions) > disk.deletions_max:
            disk.forgotten = disk.deletions.popleft().revision

    def _append(self, events: Sequence[Event]) -> None:
        self.disk.history.extend(events)
        while len(self.disk.history) > self.disk.history_max:
            self.disk.history.popleft()

    def _check_usable(self) -> None:
        if self._failed:
            raise StoreError("the store failed, the outcome of its last write is unknown")

    def _next_failure(self) -> Failure | None:
        self._check_usable()
        failure = self.disk.failures.popleft() if self.disk.failures else None
        if failure is Failure.FULL:
            raise StoreFullError("no room for a commit")
        return failure

    def _answer(self, failure: Failure | None) -> None:
        if failure is not None:
            self._failed = True
            self._check_usable()
