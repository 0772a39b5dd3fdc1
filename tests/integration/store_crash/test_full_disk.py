"""A disk that is really full: changes are refused, leases can still end, then it goes on."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path

import pytest

from gpupool.model.event import Event
from gpupool_allocator.storage.sqlite import MIB, SqliteStore
from gpupool_allocator.storage.store import Operation, StoreFullError

DISK_BYTES = 24 * MIB
RESERVE_BYTES = 4 * MIB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no small disk here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def open_store(disk: Path) -> SqliteStore:
    return SqliteStore(disk / "state.db", max_bytes=1024 * MIB, reserve_bytes=RESERVE_BYTES)


def put(key: str, size: int) -> Operation:
    return Operation(kind="lease", key=key, value=b"x" * size)


def event(sequence: int) -> Event:
    return Event(sequence=sequence, unix_s=1.0, kind="k", subject="s", cause="c")


def _write_for_ever(file: RawIOBase) -> None:
    while True:
        file.write(b"l" * 4096)


def fill_with_other_data(disk: Path) -> Path:
    """Takes every free byte, as somebody else's log file does."""
    other = disk / "other.log"
    full = pytest.raises(OSError, match="No space left on device")
    with other.open("wb", buffering=0) as file, full:
        _write_for_ever(file)
    assert shutil.disk_usage(disk).free == 0
    return other


def commit_until_full(store: SqliteStore, epoch: int) -> int:
    """Commits with an event each; how many were taken. The log has some room left."""
    for taken in range(1000):
        try:
            store.commit(epoch, [put(f"k{taken}", 100_000)], [event(taken + 1)])
        except StoreFullError:
            return taken
    pytest.fail("the disk never was full")


def test_a_full_disk_refuses_changes_until_there_is_room_again(small_disk: Path) -> None:
    store = open_store(small_disk)
    epoch = store.begin_term()
    assert store.accepts_writes() == ""
    other = fill_with_other_data(small_disk)
    assert store.accepts_writes().startswith("0.0 MiB free on the disk of ")
    taken = commit_until_full(store, epoch)
    before = list(store.load())
    assert len(before) == taken
    assert store.bounds()[1] == taken

    assert store.free_reserve()
    store.commit(epoch, [put("the refused one", 100_000)], [event(taken + 1)])
    assert len(list(store.load())) == taken + 1
    assert not store.free_reserve()
    assert "at least 4.0 MiB needed" in store.accepts_writes()

    other.unlink()
    assert store.accepts_writes() == ""
    assert (small_disk / "state.db.reserve").stat().st_size == RESERVE_BYTES
    store.commit(epoch, [put("after", 100_000)], [event(taken + 2)])
    store.close()
    store = open_store(small_disk)
    assert len(list(store.load())) == taken + 2
    assert store.bounds() == (1, taken + 2)
    store.close()


def test_some_room_is_not_enough_to_keep_space_back_again(small_disk: Path) -> None:
    store = open_store(small_disk)
    store.begin_term()
    assert store.free_reserve()
    free = shutil.disk_usage(small_disk).free
    (small_disk / "other.log").write_bytes(b"l" * (free - RESERVE_BYTES * 3 // 2))
    assert "8.0 MiB needed to keep space back again" in store.accepts_writes()
    store.close()


def begin_term(store: SqliteStore) -> int:
    """Begins a term, with the reserve if need be (opening may have used it already)."""
    try:
        return store.begin_term()
    except StoreFullError:
        assert store.free_reserve()
        return store.begin_term()


@pytest.mark.parametrize("ending", ["store.close()", "os._exit(0)"])
def test_a_store_opens_on_a_full_disk(root: Path, small_disk: Path, ending: str) -> None:
    script = (
        "import os, sys; from pathlib import Path;"
        "from tests.integration.store_crash.test_full_disk import event, open_store, put;"
        "store = open_store(Path(sys.argv[1]));"
        "store.commit(store.begin_term(), [put('a', 10)], [event(1)]);"
    )
    command = [sys.executable, "-c", script + ending, str(small_disk)]
    subprocess.run(command, cwd=root, check=True, timeout=60)
    fill_with_other_data(small_disk)
    store = open_store(small_disk)
    assert [each.key for each in store.load()] == ["a"]
    assert begin_term(store) == 2
    assert "at least 4.0 MiB needed" in store.accepts_writes()
    store.close()
