"""The store contract, small enough for SQLite and etcd alike.

A store holds records by (kind, key). One commit is one transaction: all of it is
durable when ``commit`` returns, or none of it ever is. Each commit compares the
epoch, so that an allocator whose term has ended cannot write.

What each call promises if it is late or lost is stated at the call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpupool.model.event import Event

OPERATIONS_MAX = 100
"""Operations in one commit; what etcd takes in one transaction with margin (128)."""

COMMIT_BYTES_MAX = 1024 * 1024
"""Bytes of values in one commit; etcd's request limit is 1.5 MiB."""

EPOCH_MAX = 2**62
"""Highest epoch that a node may report; it leaves room to rise above it in 64 bits."""

HISTORY_READ_MAX = 10_000
"""Most events that one read of the history gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Write ``value`` under (kind, key), or delete it where ``value`` is None."""

    kind: str
    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredValue:
    """A record as loaded or watched; ``value`` None: it was deleted."""

    kind: str
    key: str
    value: bytes | None
    revision: int


class StoreError(Exception):
    """The store cannot go on. The outcome of the call is unknown: exit and restart."""


class StoreUnusableError(StoreError):
    """The store cannot be opened (corrupt, foreign, or newer): restarting does not help."""


class StoreFullError(Exception):
    """The store refuses writes. Nothing of the commit was written."""


class EpochLostError(Exception):
    """Another term has begun. Nothing of the commit was written: exit."""


class StoreLockedError(Exception):
    """A second allocator is on the same store."""


class Store(Protocol):
    """Blocking calls; the engine runs them in its own thread, one at a time."""

    def begin_term(self, *, above: int = 0) -> int:
        """Raises the stored epoch above itself and ``above``, durably; returns it.

        ValueError unless 0 <= above <= EPOCH_MAX. Raises StoreFullError, StoreError.
        If the answer is lost, a later call only gives a higher epoch.
        """
        ...

    def load(self) -> Iterator[StoredValue]:
        """Streams every record, by kind and key; never the whole store in memory."""
        ...

    def commit(
        self, epoch: int, operations: Sequence[Operation], events: Sequence[Event] = ()
    ) -> None:
        """Writes all operations and appends all events, durably, or nothing.

        At most OPERATIONS_MAX operations and COMMIT_BYTES_MAX bytes of values; of two
        operations on one record the later counts. Events continue the history's
        sequence without a gap. ValueError otherwise, and nothing was written.
        Raises EpochLostError, StoreFullError: nothing was written. StoreError: unknown.
        """
        ...

    def watch(self, after_revision: int) -> Iterator[StoredValue]:
        """Yields the changes after ``after_revision`` that there are, oldest first.

        Deletions included; of a record that changed several times only the last value
        may come. All changes of one commit have one revision. Returns when it has
        caught up; LookupError when the changes after that revision are no longer kept,
        or the store never had it (a restored one): load anew.
        """
        ...

    def free_reserve(self) -> bool:
        """Gives up space kept back for the moment the disk is full.

        True when the refused commit may be tried once more.
        """
        ...

    def accepts_writes(self) -> str:
        """Empty, or why changes should be refused now (disk nearly full)."""
        ...

    def close(self) -> None:
        """Releases the store; what was committed stays."""
        ...


class History(Protocol):
    """Every state change with its cause: bounded, append-only."""

    def read(self, *, after_sequence: int, limit: int, subject: str = "") -> list[Event]:
        """Events after a sequence number, oldest first, at most ``limit``.

        ValueError unless 0 <= after_sequence and 1 <= limit <= HISTORY_READ_MAX.
        An empty ``subject`` means all.
        """
        ...

    def bounds(self) -> tuple[int, int]:
        """Sequence numbers of the oldest and the newest event kept; (0, 0) when none."""
        ...
