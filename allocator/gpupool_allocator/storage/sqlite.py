"""The store in one SQLite file: the default, for one allocator on one host.

A commit is one transaction in SQLite's write-ahead log, synced before it returns.
The errors at a commit tell two cases apart. SQLITE_FULL is met while pages are
written, before the log can hold the commit's last frame, and the transaction is
rolled back: nothing was written, for certain. After any other error the frames may
be on disk or not, so the store refuses to go on, and the next start reads the truth.
"""

import json
import sqlite3
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gpupool.model.event import Event
from gpupool_allocator.storage.checks import (
    check_above,
    check_events,
    check_operations,
    check_read,
)
from gpupool_allocator.storage.database import (
    PAGE_BYTES,
    connect_reader,
    open_database,
    reading,
)
from gpupool_allocator.storage.lock import StoreLock
from gpupool_allocator.storage.mark import StoreMark
from gpupool_allocator.storage.reserve import Reserve
from gpupool_allocator.storage.store import (
    EpochLostError,
    Operation,
    StoredValue,
    StoreError,
    StoreFullError,
    StoreUnusableError,
)

MIB = 1024 * 1024

RESERVE_BYTES_DEFAULT = 8 * MIB
HISTORY_MAX_DEFAULT = 1_000_000
DELETIONS_MAX_DEFAULT = 10_000

STORE_BYTES_MIN = 1 * MIB
"""Least that ``max_bytes`` leaves beside the reserve."""

_PRUNE_STEP = 200
"""Old rows that one commit removes beside as many as it adds: its time stays bounded."""

_HISTORY_YIELDS_AT = 0.75
"""Part of the space from which on old history makes room for records."""

_REFUSE_AT = 0.95
"""Part of the space from which on changes are refused; the rest lets leases end."""

_details = json.JSONEncoder(separators=(",", ":")).encode

_READ = """
SELECT sequence, unix_s, kind, subject, cause, details FROM history
WHERE sequence > ? ORDER BY sequence LIMIT ?"""

_READ_SUBJECT = """
SELECT sequence, unix_s, kind, subject, cause, details FROM history
WHERE sequence > ? AND subject = ? ORDER BY sequence LIMIT ?"""


class SqliteStore:
    """Store and History in the file ``path``, which is made where there has been none.

    Where one has been and is empty or gone, ``new_store`` says that a new one may begin.

    The store takes at most ``max_bytes`` of which ``reserve_bytes`` are kept back for
    a full disk (8 MiB; the file's write-ahead log, some MiB, comes on top). The newest
    ``history_max`` events are kept, fewer when space runs short, and the newest
    ``deletions_max`` deletions for ``watch``.

    Blocking calls, one at a time, from whichever thread; reads of the history may
    overlap them. Raises ValueError for a setting out of range, StoreLockedError,
    StoreUnusableError, StoreFullError, StoreError, OSError.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        reserve_bytes: int = RESERVE_BYTES_DEFAULT,
        history_max: int = HISTORY_MAX_DEFAULT,
        deletions_max: int = DELETIONS_MAX_DEFAULT,
        new_store: bool = False,
    ) -> None:
        _check_settings(max_bytes, reserve_bytes, history_max, deletions_max)
        self._path = path.resolve()
        self._max_bytes = max_bytes
        self._reserve_bytes = reserve_bytes
        self._history_max = history_max
        self._deletions_max = deletions_max
        self._failure = ""
        with ExitStack() as resources:
            lock = StoreLock(self._path)
            resources.callback(lock.release)
            self._reserve = Reserve(
                self._path.with_name(self._path.name + ".reserve"), reserve_bytes
            )
            mark = StoreMark(self._path)
            self._database = self._open(mark.missed() if mark.is_there and not new_store else None)
            resources.callback(self._database.close)
            mark.set()
            self._reader = connect_reader(self._path)
            resources.callback(self._reader.close)
            self._limit_file()
            # Keeps the reserve back; a reason against writes is nothing to fail for.
            self.accepts_writes()
            self._resources = resources.pop_all()

    def begin_term(self, *, above: int = 0) -> int:
        """See Store."""
        check_above(above)
        with self._transaction() as database:
            (epoch,) = database.execute(
                "UPDATE state SET epoch = max(epoch, ?) + 1 RETURNING epoch", (above,)
            ).fetchone()
        return int(epoch)

    def load(self) -> Iterator[StoredValue]:
        """See Store. The log grows while a load is open: read it through, or close it."""
        with self._translated(), reading(self._path) as database:
            rows = database.execute(
                "SELECT kind, key, value, revision FROM records ORDER BY kind, key"
            )
            for kind, key, value, revision in rows:
                yield StoredValue(kind=kind, key=key, value=value, revision=revision)

    def commit(
        self, epoch: int, operations: Sequence[Operation], events: Sequence[Event] = ()
    ) -> None:
        """See Store."""
        writes = check_operations(operations)
        with self._transaction() as database:
            stored, revision = database.execute("SELECT epoch, revision FROM state").fetchone()
            if stored != epoch:
                raise EpochLostError(f"epoch {epoch} is over: the store is at epoch {stored}")
            if writes:
                self._write(database, writes, revision + 1)
            if writes or events:
                self._append(database, events)

    def watch(self, after_revision: int) -> Iterator[StoredValue]:
        """See Store. Reads all records once, whatever the revision.

        The file has no index by revision: every commit would pay for it, and the
        second allocator that it would serve cannot be on this store.
        """
        with self._translated(), reading(self._path) as database:
            newest, forgotten = database.execute("SELECT revision, forgotten FROM state").fetchone()
            if not forgotten <= after_revision <= newest:
                raise LookupError(
                    f"after_revision: {after_revision}, changes are kept after "
                    f"{forgotten} to {newest}"
                )
            rows = database.execute(
                "SELECT revision, kind, key, value FROM records WHERE revision > ?1 UNION ALL "
                "SELECT revision, kind, key, NULL FROM deletions WHERE revision > ?1 "
                "ORDER BY revision, kind, key",
                (after_revision,),
            )
            for revision, kind, key, value in rows:
                yield StoredValue(kind=kind, key=key, value=value, revision=revision)

    def free_reserve(self) -> bool:
        """See Store. Raises OSError when the file cannot be removed."""
        given = self._reserve.give_up()
        with self._translated():
            self._limit_file()
        return given

    def accepts_writes(self) -> str:
        """See Store. Keeps the reserve back again as soon as there is room for it."""
        if self._failure:
            return self._failure
        try:
            free = self._reserve.free_bytes()
            if free < self._reserve_bytes:
                return (
                    f"{_mib(free)} free on the disk of {self._path}, "
                    f"at least {_mib(self._reserve_bytes)} needed"
                )
            if not self._reserve.held:
                if free < 2 * self._reserve_bytes:
                    return (
                        f"{_mib(free)} free on the disk of {self._path}, "
                        f"{_mib(2 * self._reserve_bytes)} needed to keep space back again"
                    )
                self._reserve.restore()
        except OSError as error:
            return f"no space can be kept back on the disk of {self._path}: {error}"
        with self._translated():
            self._limit_file()
            used = _used_bytes(self._database)
        room = self._max_bytes - self._reserve_bytes
        if used > _REFUSE_AT * room:
            return f"{self._path} holds {_mib(used)} of {_mib(room)} (max_bytes less the reserve)"
        return ""

    def read(self, *, after_sequence: int, limit: int, subject: str = "") -> list[Event]:
        """See History."""
        check_read(after_sequence, limit)
        with self._translated():
            if subject:
                rows = self._reader.execute(_READ_SUBJECT, (after_sequence, subject, limit))
            else:
                rows = self._reader.execute(_READ, (after_sequence, limit))
            found = rows.fetchall()
        return [
            Event(
                sequence=sequence,
                unix_s=unix_s,
                kind=kind,
                subject=about,
                cause=cause,
                details=json.loads(details),
            )
            for sequence, unix_s, kind, about, cause, details in found
        ]

    def bounds(self) -> tuple[int, int]:
        """See History."""
        with self._translated():
            return _bounds(self._reader)

    def close(self) -> None:
        """See Store."""
        self._resources.close()

    def _open(self, missed: StoreUnusableError | None) -> sqlite3.Connection:
        try:
            return open_database(self._path, missed=missed)
        except StoreFullError:
            # The way out must also be open to a process that starts on a full disk.
            if not self._reserve.give_up():
                raise
            return open_database(self._path, missed=missed)

    def _write(
        self, database: sqlite3.Connection, writes: Sequence[Operation], revision: int
    ) -> None:
        for each in writes:
            if each.value is not None:
                database.execute(
                    "INSERT INTO records VALUES (?, ?, ?, ?) ON CONFLICT (kind, key) "
                    "DO UPDATE SET value = excluded.value, revision = excluded.revision",
                    (each.kind, each.key, each.value, revision),
                )
                continue
            gone = database.execute(
                "DELETE FROM records WHERE kind = ? AND key = ?", (each.kind, each.key)
            )
            if gone.rowcount:
                database.execute(
                    "INSERT INTO deletions (kind, key, revision) VALUES (?, ?, ?)",
                    (each.kind, each.key, revision),
                )
        database.execute("UPDATE state SET revision = ?", (revision,))
        self._forget_deletions(database)

    def _forget_deletions(self, database: sqlite3.Connection) -> None:
        oldest, newest = database.execute(
            "SELECT (SELECT min(position) FROM deletions), (SELECT max(position) FROM deletions)"
        ).fetchone()
        if oldest is None or newest - oldest < self._deletions_max:
            return
        last = min(newest - self._deletions_max, oldest + _PRUNE_STEP)
        database.execute(
            "UPDATE state SET forgotten = (SELECT revision FROM deletions WHERE position = ?)",
            (last,),
        )
        database.execute("DELETE FROM deletions WHERE position <= ?", (last,))

    def _append(self, database: sqlite3.Connection, events: Sequence[Event]) -> None:
        oldest, newest = _bounds(database)
        check_events(events, newest)
        database.executemany(
            "INSERT INTO history VALUES (?, ?, ?, ?, ?, ?)",
            (
                (
                    each.sequence,
                    each.unix_s,
                    each.kind,
                    each.subject,
                    each.cause,
                    _details(each.details),
                )
                for each in events
            ),
        )
        last = newest + len(events) - self._history_max
        if _used_bytes(database) > _HISTORY_YIELDS_AT * (self._max_bytes - self._reserve_bytes):
            # The newest stays, whatever happens: it says where the sequence goes on.
            last = newest + len(events) - 1
        last = min(last, oldest + len(events) + _PRUNE_STEP)
        if last >= oldest:
            database.execute("DELETE FROM history WHERE sequence <= ?", (last,))

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        """One transaction: committed and synced at its end, rolled back by an exception."""
        if self._failure:
            raise StoreError(self._failure)
        database = self._database
        try:
            database.execute("BEGIN IMMEDIATE")
            yield database
            database.execute("COMMIT")
        except sqlite3.Error as error:
            if _code(error) != sqlite3.SQLITE_FULL:
                self._failure = f"{self._path} failed, its outcome is unknown: {error}"
                raise StoreError(self._failure) from error
            self._roll_back()
            raise StoreFullError(f"no room for a commit to {self._path}: {error}") from error
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        # SQLite has rolled back by itself after some errors.
        if self._database.in_transaction:
            with self._translated():
                self._database.execute("ROLLBACK")

    @contextmanager
    def _translated(self) -> Generator[None]:
        """Turns SQLite's errors outside a commit into StoreError, the last of this store."""
        if self._failure:
            raise StoreError(self._failure)
        try:
            yield
        except sqlite3.Error as error:
            self._failure = f"{self._path} cannot go on: {error}"
            raise StoreError(self._failure) from error

    def _limit_file(self) -> None:
        """Lets the file grow into the reserve only while the reserve is given up."""
        kept_back = self._reserve_bytes if self._reserve.held else 0
        pages = (self._max_bytes - kept_back) // PAGE_BYTES
        self._database.execute(f"PRAGMA max_page_count = {pages}")


def _check_settings(
    max_bytes: int, reserve_bytes: int, history_max: int, deletions_max: int
) -> None:
    if reserve_bytes < 0:
        raise ValueError(f"reserve_bytes: {reserve_bytes}, must be 0 or more")
    least = reserve_bytes + STORE_BYTES_MIN
    if max_bytes < least:
        raise ValueError(
            f"max_bytes: {max_bytes}, must be {least} or more (reserve_bytes and {STORE_BYTES_MIN})"
        )
    for name, count in (("history_max", history_max), ("deletions_max", deletions_max)):
        if count < 1:
            raise ValueError(f"{name}: {count}, must be 1 or more")


def _bounds(database: sqlite3.Connection) -> tuple[int, int]:
    # Two selects: SQLite finds min and max at once only when each stands alone.
    oldest, newest = database.execute(
        "SELECT (SELECT min(sequence) FROM history), (SELECT max(sequence) FROM history)"
    ).fetchone()
    return (oldest or 0, newest or 0)


def _used_bytes(database: sqlite3.Connection) -> int:
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    (free,) = database.execute("PRAGMA freelist_count").fetchone()
    return int(pages - free) * PAGE_BYTES


def _code(error: sqlite3.Error) -> int | None:
    # Errors that Python's module itself makes (a closed connection) have no code.
    return getattr(error, "sqlite_errorcode", None)


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"
