"""The store's process dies, or its disk fails, at every single write: nothing is lost.

strace stops the writer at the Nth write, sync, cut or removal of a file, for each N.
What its process had written by then is what the next start finds.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.integration.store_crash.scripted_writer import COMMITS, committed, open_store

CALLS = ("pwrite64", "fdatasync", "fsync", "ftruncate", "unlink")

PARALLEL = 3


def run_writer(root: Path, folder: Path, *strace_options: str) -> tuple[list[str], str]:
    """What the scripted writer said, and what strace saw."""
    folder.mkdir()
    command = [
        *("strace", "-f", "-qq", "-o", str(folder / "trace")),
        *("-e", f"trace={','.join(CALLS)}", *strace_options, sys.executable),
        *("-m", "tests.integration.store_crash.scripted_writer", str(folder / "state.db")),
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, timeout=60, check=False)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done.stdout.decode().splitlines(), (folder / "trace").read_text()


def acknowledged(said: list[str]) -> int:
    return sum(line.startswith("acknowledged") for line in said)


@pytest.fixture(scope="module")
def boundaries(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How often the undisturbed writer makes each call."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    if subprocess.run(["strace", "-qq", "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace may not trace processes here")
    said, trace = run_writer(root, tmp_path_factory.mktemp("whole") / "run")
    assert said[-1] == "closed well"
    return {call: len(re.findall(rf"\b{call}\(", trace)) for call in CALLS}


def each_boundary(
    root: Path, folder: Path, injection: str, points: list[tuple[str, int]]
) -> Iterator[tuple[str, list[str], Path]]:
    """Runs the writer once for each point with ``injection`` there."""

    def run(point: tuple[str, int]) -> tuple[str, list[str], Path]:
        call, number = point
        name = f"{call}-{number}"
        option = f"inject={call}:{injection}:when={number}"
        said, _ = run_writer(root, folder / name, "-e", option)
        return name, said, folder / name / "state.db"

    with ThreadPoolExecutor(PARALLEL) as pool:
        yield from pool.map(run, points)


def test_nothing_is_acknowledged_before_the_log_is_synced(
    root: Path, tmp_path: Path, boundaries: dict[str, int]
) -> None:
    calls = f"trace={','.join((*CALLS, 'write'))}"
    _, trace = run_writer(root, tmp_path / "run", "-e", calls)
    log = ""
    unsynced: set[str] = set()
    answers = 0
    for call, file, what in re.findall(r"(\w+)\((\d+)(?:, \"(.{0,15}))?", trace):
        if call == "pwrite64":
            unsynced.add(file)
            if what.startswith(r"7\177\6\202"):
                log = file
        elif call == "fdatasync":
            unsynced.discard(file)
        elif call == "write" and what.startswith("acknowledged"):
            answers += 1
            assert log
            assert log not in unsynced
    assert answers == COMMITS


def test_what_was_acknowledged_survives_a_kill_at_every_write(
    root: Path, tmp_path: Path, boundaries: dict[str, int]
) -> None:
    points = [(call, each + 1) for call in CALLS for each in range(boundaries[call])]
    assert len(points) > 100
    seen: set[int] = set()
    for name, said, path in each_boundary(root, tmp_path, "signal=KILL", points):
        assert said[-1:] != ["closed well"], name
        store = open_store(path)
        count = committed(store)
        assert acknowledged(said) <= count <= acknowledged(said) + 1, name
        epoch = store.begin_term()
        assert epoch >= 1 + ("opened" in said), name
        store.commit(epoch, [], [])
        store.close()
        seen.add(count)
    assert seen == set(range(COMMITS + 1))


def test_a_disk_that_is_full_for_one_write_loses_and_invents_nothing(
    root: Path, tmp_path: Path, boundaries: dict[str, int]
) -> None:
    # Every third: the time is better spent on the kills above.
    points = [("pwrite64", each + 1) for each in range(0, boundaries["pwrite64"], 3)]
    refusals = 0
    for name, said, path in each_boundary(root, tmp_path, "error=ENOSPC", points):
        # The writer itself asserts after each refusal that nothing was written.
        refusals += any(line.startswith("full") for line in said)
        store = open_store(path)
        count = committed(store)
        unknown = any(line.startswith("unknown") for line in said)
        assert acknowledged(said) <= count <= acknowledged(said) + unknown, name
        if "opened" in said and not unknown:
            assert count == COMMITS, name
        store.close()
    assert refusals > 10


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_a_sync_that_fails_has_an_unknown_outcome_and_ends_the_store(
    root: Path, tmp_path: Path, boundaries: dict[str, int], error: str
) -> None:
    points = [("fdatasync", each + 1) for each in range(boundaries["fdatasync"])]
    unknown = 0
    for name, said, path in each_boundary(root, tmp_path, f"error={error}", points):
        store = open_store(path)
        count = committed(store)
        assert acknowledged(said) <= count <= acknowledged(said) + 1, name
        if said[-1].startswith("unknown"):
            unknown += 1
            assert acknowledged(said) < COMMITS, name
        store.close()
    assert unknown >= COMMITS
