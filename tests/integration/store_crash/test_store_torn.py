"""The power goes: what was not synced is cut, zeroed or torn, and the rest must do.

A killed process loses nothing that it wrote. A machine without power does: so the
store's files are put together here as a disk may have them after it, and opened.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.store_crash.scripted_writer import (
    COMMITS,
    committed,
    events,
    open_store,
    operations,
)

PAGE = 4096
LOG_HEADER = 32
FRAME = 24 + PAGE


class Disk:
    """The bytes of a store's files at one moment."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        self.log = path.with_name(path.name + "-wal").read_bytes()


def commits_found(folder: Path, data: bytes, log: bytes) -> int:
    """Opens a store of these bytes; how many commits it has, each of them whole."""
    path = folder / "state.db"
    for stale in folder.iterdir():
        stale.unlink()
    path.write_bytes(data)
    path.with_name("state.db-wal").write_bytes(log)
    store = open_store(path)
    try:
        count = committed(store)
        store.commit(store.begin_term(), [], [])
        return count
    finally:
        store.close()


def cuts(start: int, end: int) -> Iterator[int]:
    """Where a log may end: at each frame's edge, in its header, in and at the end of its page."""
    for edge in range(start, end, FRAME):
        yield from (edge, edge + 11, edge + 24, edge + 24 + 512, edge + FRAME - 1)
    yield end


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "torn").mkdir()
    return tmp_path / "torn"


def test_a_log_cut_anywhere_holds_exactly_the_commits_before_the_cut(
    tmp_path: Path, folder: Path
) -> None:
    store = open_store(tmp_path / "state.db")
    epoch = store.begin_term()
    # Moved out of the log, so that every cut leaves a store to open.
    store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    ends = [0]
    for commit in range(1, COMMITS + 1):
        store.commit(epoch, operations(commit), events(commit))
        ends.append(len(Disk(tmp_path / "state.db").log))
    disk = Disk(tmp_path / "state.db")
    store.close()
    assert (len(disk.log) - LOG_HEADER) % FRAME == 0
    for cut in (0, 1, LOG_HEADER - 1, *cuts(LOG_HEADER, len(disk.log))):
        expected = max(commit for commit, end in enumerate(ends) if end <= cut)
        zeroed = bytes(len(disk.log) - cut)
        assert commits_found(folder, disk.data, disk.log[:cut]) == expected, cut
        if cut % FRAME == LOG_HEADER:
            assert commits_found(folder, disk.data, disk.log[:cut] + zeroed) == expected, cut


def test_a_log_that_started_over_is_never_read_on_into_its_old_frames(
    tmp_path: Path, folder: Path
) -> None:
    store = open_store(tmp_path / "state.db")
    epoch = store.begin_term()
    for commit in range(1, COMMITS):
        store.commit(epoch, operations(commit), events(commit))
    store._database.execute("PRAGMA wal_checkpoint(PASSIVE)")
    old = Disk(tmp_path / "state.db")
    store.commit(epoch, operations(COMMITS), events(COMMITS))
    new = Disk(tmp_path / "state.db")
    store.close()
    assert len(new.log) == len(old.log)
    assert new.data == old.data
    written = max(at for at in range(len(new.log)) if new.log[at] != old.log[at]) + 1
    assert LOG_HEADER < written < len(new.log)
    for cut in cuts(LOG_HEADER, written):
        log = new.log[:cut] + old.log[cut:]
        expected = COMMITS if cut >= written else COMMITS - 1
        assert commits_found(folder, old.data, log) == expected, cut


@pytest.mark.parametrize("torn", [0, 512, 2048])
def test_a_checkpoint_that_was_interrupted_anywhere_loses_nothing(
    tmp_path: Path, folder: Path, torn: int
) -> None:
    store = open_store(tmp_path / "state.db")
    epoch = store.begin_term()
    store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for commit in range(1, COMMITS + 1):
        store.commit(epoch, operations(commit), events(commit))
    before = Disk(tmp_path / "state.db")
    store._database.execute("PRAGMA wal_checkpoint(PASSIVE)")
    after = Disk(tmp_path / "state.db")
    store.close()
    assert len(after.data) > len(before.data)
    for moved in range(0, len(after.data), PAGE):
        data = after.data[: moved + torn] + before.data[moved + torn :]
        assert commits_found(folder, data, before.log) == COMMITS, moved
    # The last page first, as a disk may order what was not yet synced.
    last = before.data + bytes(len(after.data) - len(before.data) - PAGE) + after.data[-PAGE:]
    assert commits_found(folder, last, before.log) == COMMITS
