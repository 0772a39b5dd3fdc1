"""The store in a SQLite file keeps the contract, and guards its file."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tests.contract.store_suite import StoreSuite, StoreWithHistory, contents, delete, happened, put

from gpupool_allocator.storage.mark import StoreMark
from gpupool_allocator.storage.sqlite import MIB, SqliteStore
from gpupool_allocator.storage.store import (
    EpochLostError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreUnusableError,
)

SMALL = {"max_bytes": 4 * MIB, "reserve_bytes": 1 * MIB}

OpenSqlite = Callable[..., SqliteStore]


@pytest.fixture
def open_sqlite(tmp_path: Path) -> Iterator[OpenSqlite]:
    with ExitStack() as stores:

        def opened(name: str = "state.db", **settings: int) -> SqliteStore:
            store = SqliteStore(tmp_path / name, **({"max_bytes": 64 * MIB} | settings))
            stores.callback(store.close)
            return store

        yield opened


class TestSqliteStore(StoreSuite):
    @pytest.fixture
    def open_store(self, open_sqlite: OpenSqlite) -> Callable[..., StoreWithHistory]:
        return open_sqlite


def test_every_commit_is_synced_to_a_write_ahead_log(open_sqlite: OpenSqlite) -> None:
    store = open_sqlite()
    assert store._database.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_only_the_owner_may_read_the_files(open_sqlite: OpenSqlite, tmp_path: Path) -> None:
    (tmp_path / "state.db").touch(mode=0o644)
    store = open_sqlite()
    store.commit(store.begin_term(), [put("a")])
    modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
    assert modes == dict.fromkeys(
        [
            "state.db",
            "state.db-shm",
            "state.db-wal",
            "state.db.lock",
            "state.db.mark",
            "state.db.reserve",
        ],
        0o600,
    )


def test_a_second_store_on_the_file_is_refused_with_the_holder(
    open_sqlite: OpenSqlite, tmp_path: Path
) -> None:
    first = open_sqlite()
    epoch = first.begin_term()
    (tmp_path / "alias.db").symlink_to(tmp_path / "state.db")
    for name in ("state.db", "alias.db"):
        with pytest.raises(StoreLockedError) as refusal:
            open_sqlite(name)
        assert str(tmp_path / "state.db") in str(refusal.value)
        assert f"in use by process {os.getpid()}" in str(refusal.value)
    first.commit(epoch, [put("a")])
    first.close()
    assert len(contents(open_sqlite())) == 1


def test_the_lock_of_a_killed_process_is_gone(open_sqlite: OpenSqlite, tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path;"
        "from gpupool_allocator.storage.sqlite import SqliteStore;"
        "store = SqliteStore(Path(sys.argv[1]), max_bytes=2**26); print('open', flush=True);"
        "time.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "state.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(StoreLockedError, match=f"process {holder.pid}:"):
            open_sqlite()
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=30)
    assert open_sqlite().begin_term() == 1


def test_another_writer_that_raised_the_epoch_ends_the_term(
    open_sqlite: OpenSqlite, tmp_path: Path
) -> None:
    store = open_sqlite()
    epoch = store.begin_term()
    with closing(sqlite3.connect(tmp_path / "state.db")) as other, other:
        other.execute("UPDATE state SET epoch = epoch + 1")
    with pytest.raises(EpochLostError, match="the store is at epoch 2"):
        store.commit(epoch, [put("a")])


def test_calls_may_come_from_any_thread(open_sqlite: OpenSqlite) -> None:
    store = open_sqlite()
    done: list[int] = []

    def work() -> None:
        epoch = store.begin_term()
        store.commit(epoch, [put("a")], [happened(1)])
        done.extend([len(list(store.load())), store.bounds()[1]])

    worker = threading.Thread(target=work)
    worker.start()
    worker.join(timeout=30)
    assert done == [1, 1]
    assert len(contents(store)) == 1


@pytest.mark.parametrize("damage", ["header", "records", "truncated"])
def test_a_damaged_file_is_refused(open_sqlite: OpenSqlite, tmp_path: Path, damage: str) -> None:
    store = open_sqlite()
    epoch = store.begin_term()
    for number in range(20):
        store.commit(epoch, [put(f"{number}-{each}", b"x" * 500) for each in range(100)])
    store.close()
    file = tmp_path / "state.db"
    content = bytearray(file.read_bytes())
    match damage:
        case "header":
            content[:100] = b"\x55" * 100
        case "records":
            middle = len(content) // 2 // 4096 * 4096
            content[middle : middle + 40_960] = bytes(range(256)) * 160
        case _:
            del content[len(content) // 2 :]
    file.write_bytes(content)
    with pytest.raises(StoreUnusableError, match=f"{file} is damaged"):
        open_sqlite()


def test_a_file_that_is_no_store_is_refused_and_left_alone(
    open_sqlite: OpenSqlite, tmp_path: Path
) -> None:
    file = tmp_path / "state.db"
    with closing(sqlite3.connect(file)) as other, other:
        other.execute("CREATE TABLE songs (name TEXT)")
    before = file.read_bytes()
    with pytest.raises(StoreUnusableError, match="not a store of this program"):
        open_sqlite()
    assert file.read_bytes() == before


def test_a_newer_schema_is_refused(open_sqlite: OpenSqlite, tmp_path: Path) -> None:
    open_sqlite().close()
    with closing(sqlite3.connect(tmp_path / "state.db")) as other, other:
        other.execute("UPDATE state SET schema = 2")
    with pytest.raises(StoreUnusableError, match="schema version 2, this program knows 1"):
        open_sqlite()


def test_a_half_made_file_is_made_anew(open_sqlite: OpenSqlite, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "state.db")) as other:
        other.execute("PRAGMA journal_mode = WAL")
    assert open_sqlite().begin_term() == 1


def lose(file: Path, how: str) -> None:
    """What an operator or a full disk may leave of a closed store."""
    match how:
        case "gone":
            file.unlink()
        case "emptied":
            file.write_bytes(b"")
        case _:
            file.unlink()
            with closing(sqlite3.connect(file)) as other:
                other.execute("PRAGMA journal_mode = WAL")


@pytest.mark.parametrize("release", ["0.1.0", "this"])
@pytest.mark.parametrize("how", ["gone", "emptied", "without tables"])
def test_a_store_that_was_emptied_or_lost_is_no_new_store(
    open_sqlite: OpenSqlite, tmp_path: Path, how: str, release: str
) -> None:
    store = open_sqlite()
    store.commit(store.begin_term(), [put("a")])
    store.close()
    file = tmp_path / "state.db"
    if release == "0.1.0":
        (tmp_path / "state.db.mark").unlink()
    lose(file, how)
    left = file.read_bytes() if file.exists() else None
    for _ in range(2):
        with pytest.raises(StoreUnusableError, match=f"{file} is empty or gone") as refusal:
            open_sqlite()
        assert "backup" in str(refusal.value)
        assert "new_store" in str(refusal.value)
        assert (file.read_bytes() if file.exists() else None) == left
    store = open_sqlite(new_store=True)
    assert (store.begin_term(), contents(store)) == (1, {})
    store.close()
    assert open_sqlite().begin_term() == 2


def test_the_log_of_an_emptied_store_is_left_to_its_operator(
    open_sqlite: OpenSqlite, tmp_path: Path
) -> None:
    store = open_sqlite()
    store.commit(store.begin_term(), [put("a")])
    files = {name: (tmp_path / name).read_bytes() for name in ("state.db", "state.db-wal")}
    store.close()
    (tmp_path / "state.db").write_bytes(b"")
    (tmp_path / "state.db-wal").write_bytes(files["state.db-wal"])
    with pytest.raises(StoreUnusableError, match="empty or gone"):
        open_sqlite()
    (tmp_path / "state.db").write_bytes(files["state.db"])
    assert len(contents(open_sqlite())) == 1


def test_a_store_of_the_release_before_is_marked_when_it_is_opened(
    open_sqlite: OpenSqlite, tmp_path: Path
) -> None:
    open_sqlite().close()
    beside = [tmp_path / f"state.db.{name}" for name in ("mark", "reserve")]
    for file in beside:
        file.unlink()
    store = open_sqlite()
    assert store.begin_term() == 1
    store.close()
    beside[1].unlink()  # as on a full disk
    (tmp_path / "state.db").write_bytes(b"")
    with pytest.raises(StoreUnusableError, match="empty or gone"):
        open_sqlite()


def test_a_first_start_that_was_cut_short_may_be_tried_again(
    open_sqlite: OpenSqlite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: StoreMark) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StoreMark, "set", killed)
        with pytest.raises(KeyboardInterrupt):
            open_sqlite()
    assert (tmp_path / "state.db").exists()
    assert open_sqlite().begin_term() == 1


def test_a_failed_store_does_nothing_more(open_sqlite: OpenSqlite) -> None:
    store = open_sqlite()
    epoch = store.begin_term()
    store._database.execute("DROP TABLE records")
    with pytest.raises(StoreError, match="its outcome is unknown: no such table"):
        store.commit(epoch, [put("a")], [happened(1)])
    for call in (
        lambda: store.commit(epoch, []),
        store.begin_term,
        store.bounds,
        lambda: list(store.load()),
        lambda: list(store.watch(0)),
    ):
        with pytest.raises(StoreError, match="outcome is unknown"):
            call()
    assert "outcome is unknown" in store.accepts_writes()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"reserve_bytes": -1}, "reserve_bytes: -1, must be 0 or more"),
        ({"max_bytes": MIB, "reserve_bytes": 1}, f"max_bytes: {MIB}, must be {MIB + 1} or more"),
        ({"history_max": 0}, "history_max: 0, must be 1 or more"),
        ({"deletions_max": -5}, "deletions_max: -5, must be 1 or more"),
    ],
)
def test_a_setting_out_of_range_is_refused_before_anything_is_made(
    open_sqlite: OpenSqlite, tmp_path: Path, settings: dict[str, int], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        open_sqlite(**settings)
    assert list(tmp_path.iterdir()) == []


def fill(store: SqliteStore, epoch: int) -> int:
    """Commits until the store is full; the number of commits that it took."""
    for taken in range(1000):
        try:
            store.commit(epoch, [put(f"k{taken}", b"x" * 50_000)])
        except StoreFullError:
            return taken
    pytest.fail("the store never was full")


def test_a_store_at_its_size_refuses_and_its_reserve_lets_leases_end(
    open_sqlite: OpenSqlite,
) -> None:
    store = open_sqlite(**SMALL)
    epoch = store.begin_term()
    taken = fill(store, epoch)
    before = list(store.load())
    assert len(before) == taken
    assert "of 3.0 MiB (max_bytes less the reserve)" in store.accepts_writes()
    assert store.free_reserve()
    store.commit(epoch, [put("the one that was refused", b"x" * 50_000)])
    assert not store.free_reserve()
    for number in range(taken):
        store.commit(epoch, [delete(f"k{number}")])
    assert store.accepts_writes() == ""
    assert fill(store, epoch) >= taken - 2
    assert store.free_reserve()


def test_history_makes_room_for_records(open_sqlite: OpenSqlite) -> None:
    store = open_sqlite(**SMALL)
    epoch = store.begin_term()
    for sequence in range(1, 40_001, 100):
        store.commit(epoch, [], [happened(sequence + each) for each in range(100)])
    oldest, newest = store.bounds()
    assert newest == 40_000
    assert 1 < oldest <= newest
    assert store.accepts_writes() == ""


def test_the_log_stays_short(open_sqlite: OpenSqlite, tmp_path: Path) -> None:
    store = open_sqlite()
    epoch = store.begin_term()
    for number in range(100):
        store.commit(epoch, [put(f"k{number % 7}", b"x" * 500_000)])
    assert (tmp_path / "state.db-wal").stat().st_size < 16 * MIB


def test_the_reserve_is_made_again_at_the_next_start(
    open_sqlite: OpenSqlite, tmp_path: Path
) -> None:
    store = open_sqlite(**SMALL)
    reserve = tmp_path / "state.db.reserve"
    assert reserve.stat().st_blocks * 512 >= MIB
    assert store.free_reserve()
    assert not reserve.exists()
    store.close()
    open_sqlite(**SMALL)
    assert reserve.stat().st_blocks * 512 >= MIB


def test_forgotten_deletions_take_no_space(open_sqlite: OpenSqlite) -> None:
    store = open_sqlite(deletions_max=50)
    epoch = store.begin_term()
    for _ in range(10):
        keys = [f"k{each}" for each in range(100)]
        store.commit(epoch, [put(key) for key in keys])
        store.commit(epoch, [delete(key) for key in keys])
    assert store._database.execute("SELECT count(*) FROM deletions").fetchone() == (50,)
