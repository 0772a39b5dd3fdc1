"""Turns what the core wants kept into transactions, and commits them in order.

A transaction holds the changes of as many core events as fit (group commit). The
changes of one core event are kept together while they fit into one transaction.
An event with more than that (a thousand leases that expire at once) is cut between
its effects: each record is complete in itself, so a crash in between leaves some
leases changed and others as they were. The core names records before history, so
such a crash loses history lines of what did happen and never invents one.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gpupool.model.event import Event
from gpupool_allocator.core.effects import Delete, Put, Record
from gpupool_allocator.storage import records
from gpupool_allocator.storage.store import (
    COMMIT_BYTES_MAX,
    OPERATIONS_MAX,
    Operation,
    Store,
    StoreFullError,
)

Change = Put | Delete | Record


@dataclass(slots=True)
class Transaction:
    """What is committed at once; a record changed twice is written once."""

    operations: dict[tuple[str, str], Operation] = field(
        default_factory=dict[tuple[str, str], Operation]
    )
    events: list[Event] = field(default_factory=list[Event])
    size: int = 0

    def takes(self, other: "Transaction") -> bool:
        """Whether ``other`` fits in as well (counting a repeated record twice)."""
        return (
            len(self.operations) + len(other.operations) <= OPERATIONS_MAX
            and self.size + other.size <= COMMIT_BYTES_MAX
        )

    def add(self, other: "Transaction") -> None:
        """Appends the changes of ``other``."""
        self.operations |= other.operations
        self.events += other.events
        self.size += other.size


def _encoded(change: Change) -> Transaction:
    match change:
        case Record(event=event):
            return Transaction(events=[event])
        case Put(record=record):
            operation = records.encode(record)
        case Delete(record=record):
            operation = records.deletion(record)
    return Transaction(
        operations={(operation.kind, operation.key): operation},
        size=len(operation.value or b""),
    )


def pack(groups: Iterable[Sequence[Change]]) -> Iterator[Transaction]:
    """Packs the changes of core events, in order, into as few transactions as they need."""
    current = Transaction()
    for group in groups:
        parts = _parts(group)
        for part in parts:
            if not current.takes(part):
                yield current
                current = Transaction()
            current.add(part)
    if current.operations or current.events:
        yield current


def _parts(group: Sequence[Change]) -> list[Transaction]:
    """One event's changes: a single part where it fits into one transaction."""
    parts = [Transaction()]
    for change in group:
        encoded = _encoded(change)
        if not parts[-1].takes(encoded):
            parts.append(Transaction())
        parts[-1].add(encoded)
    return parts


class Committer:
    """Commits batches in the store's thread and remembers how far it came.

    Blocking; all calls come from that one thread.
    """

    def __init__(self, store: Store, epoch: int) -> None:
        self._store = store
        self._epoch = epoch
        self.reserve_used = False
        self._remaining: deque[Transaction] = deque()

    def commit(self, groups: Iterable[Sequence[Change]]) -> int:
        """Makes all changes durable; returns the number of transactions.

        StoreFullError: what is left is kept for ``resume``; the rest raise as the
        store's commit does.
        """
        self._remaining.extend(pack(groups))
        return self.resume()

    def resume(self) -> int:
        """Commits what is left of a batch that met a full store."""
        committed = 0
        while self._remaining:
            self._commit_first()
            self._remaining.popleft()
            committed += 1
        return committed

    def _commit_first(self) -> None:
        first = self._remaining[0]
        operations = tuple(first.operations.values())
        try:
            self._store.commit(self._epoch, operations, first.events)
        except StoreFullError:
            # The space kept for this moment lets what was decided become true;
            # from then on changes are refused until there is room.
            if not self._store.free_reserve():
                raise
            self.reserve_used = True
            self._store.commit(self._epoch, operations, first.events)
