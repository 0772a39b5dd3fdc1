"""The SQLite file: its schema, its settings, and the checks at opening."""

import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

from gpupool_allocator.storage.store import StoreError, StoreFullError, StoreUnusableError

SCHEMA_VERSION = 1

APPLICATION_ID = 0x67707570
"""Says in the file's header whose it is ("gpup"), so that no other file is taken for one."""

PAGE_BYTES = 4096

_CHECKPOINT_PAGES = 1000
"""A commit that finds more pages in the log moves them; about 4 MiB, some 10 ms."""

_LOG_BYTES_KEPT = 16 * 1024 * 1024
"""The log file is cut to this after a long reader made it grow."""

# state: one row. forgotten: the revision of the newest deletion no longer kept.
# records has a rowid although (kind, key) is its key: values may be 1 MiB, and
# rows that big would make a tree by key deep and slow.
# deletions is what watch needs of records that are gone; old ones are forgotten.
_SCHEMA = """
CREATE TABLE state (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    schema INTEGER NOT NULL, epoch INTEGER NOT NULL,
    revision INTEGER NOT NULL, forgotten INTEGER NOT NULL);
CREATE TABLE records (
    kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, revision INTEGER NOT NULL,
    PRIMARY KEY (kind, key));
CREATE TABLE deletions (
    position INTEGER PRIMARY KEY,
    kind TEXT NOT NULL, key TEXT NOT NULL, revision INTEGER NOT NULL);
CREATE TABLE history (
    sequence INTEGER PRIMARY KEY, unix_s REAL NOT NULL, kind TEXT NOT NULL,
    subject TEXT NOT NULL, cause TEXT NOT NULL, details TEXT NOT NULL);
CREATE INDEX history_subject ON history (subject);
"""


def open_database(path: Path, *, missed: StoreUnusableError | None = None) -> sqlite3.Connection:
    """Opens the store's file for writing, and makes it where there is none.

    ``missed``: a store has been here, and this is raised where it is empty or gone. Raises
    StoreUnusableError for a file that is damaged, is not a store, or is of a newer
    program; StoreFullError when the disk has no room to open it.
    """
    # Before SQLite looks at it: the log of an emptied file is the last that is left of it.
    if missed is not None and not (path.exists() and path.stat().st_size):
        raise missed
    _make_file(path)
    database = connect(path)
    try:
        with _opening(path):
            _check_owner(path, database, missed)
            _configure(path, database)
            _make_schema(database)
            _check_version(path, database)
            _check_integrity(path, database)
    except BaseException:
        database.close()
        raise
    return database


def connect(path: Path) -> sqlite3.Connection:
    """A connection in autocommit mode, for one thread at a time, whichever it is."""
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    database.execute("PRAGMA trusted_schema = OFF")
    return database


def connect_reader(path: Path) -> sqlite3.Connection:
    """A connection that sees what was committed and cannot write."""
    database = connect(path)
    database.execute("PRAGMA query_only = ON")
    return database


@contextmanager
def reading(path: Path) -> Generator[sqlite3.Connection]:
    """A reader's connection inside one transaction: it sees the store at one moment."""
    with closing(connect_reader(path)) as database:
        database.execute("BEGIN")
        yield database


def _make_file(path: Path) -> None:
    """Makes the file for its owner alone; SQLite gives its log the same mode."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.fchmod(file, 0o600)
    finally:
        os.close(file)
    # The new name must survive a power cut as surely as the first commit.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _opening(path: Path) -> Generator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = error.sqlite_errorcode
        # The log's index is a file too, and its growth has an error of its own.
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE):
            raise StoreFullError(f"no room on the disk to open {path}: {error}") from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            raise StoreUnusableError(f"{path} is damaged or no database: {error}") from error
        raise StoreError(f"{path} cannot be opened: {error}") from error


def _check_owner(
    path: Path, database: sqlite3.Connection, missed: StoreUnusableError | None
) -> None:
    (tables,) = database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (owner,) = database.execute("PRAGMA application_id").fetchone()
    if tables and owner != APPLICATION_ID:
        raise StoreUnusableError(f"{path} is a database, but not a store of this program")
    if not tables and missed is not None:
        raise missed


def _configure(path: Path, database: sqlite3.Connection) -> None:
    database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    (mode,) = database.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise StoreUnusableError(f"{path}: its file system cannot hold a write-ahead log ({mode})")
    # FULL: the log is synced before a commit returns. Everything rests on it.
    database.execute("PRAGMA synchronous = FULL")
    database.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    database.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES_KEPT}")
    database.execute("PRAGMA cache_size = -16384")
    # Overwriting pruned history with zeros would double what pruning writes; the
    # store holds no secrets (no environments).
    database.execute("PRAGMA secure_delete = OFF")


def _make_schema(database: sqlite3.Connection) -> None:
    (tables,) = database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if not tables:
        database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA}")
        database.execute("INSERT INTO state VALUES (1, ?, 0, 0, 0)", (SCHEMA_VERSION,))
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute("COMMIT")


def _check_version(path: Path, database: sqlite3.Connection) -> None:
    (version,) = database.execute("SELECT schema FROM state").fetchone()
    if version != SCHEMA_VERSION:
        raise StoreUnusableError(
            f"{path} has schema version {version}, this program knows {SCHEMA_VERSION}: "
            "run the program that wrote it, or a newer one"
        )


def _check_integrity(path: Path, database: sqlite3.Connection) -> None:
    # Not the history: it is the bulk of the file, no decision rests on it, and
    # reading it all would make a restart slow.
    for table in ("state", "records", "deletions"):
        (finding,) = database.execute(f"PRAGMA quick_check('{table}')").fetchone()
        if finding != "ok":
            raise StoreUnusableError(f"{path} is damaged ({table}): {finding}")
