"""Processes on the GPUs of a simulated node: one small file a process.

A CUDA-client stand-in writes its file when it has got its memory and is listed
for as long as it lives: the reader drops files whose process is gone or is
another one with the same pid (start ticks differ), so that kill -9 needs no
clean-up. A lock on the directory makes "is there room, then take it" one step.
"""

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OPEN_MODE = 0o1777
PROCESSES_MAX = 4096
"""Files that are read in one directory; a node has fewer processes than that."""

_MTIME_STEP_NS = 100_000_000
# Two changes within one tick of the kernel's clock have the same time; a tick is 10 ms
# at the most.


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that holds ``memory_mib`` on each of its GPUs.

    ``pipe`` is the MPS pipe directory that it came through, empty: unconfined.
    """

    pid: int
    start_ticks: int
    uid: int
    uuids: tuple[str, ...]
    memory_mib: int
    pipe: str = ""


def start_ticks_of(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command may hold spaces and brackets: fields count from the last bracket.
    state, *rest = stat[stat.rindex(")") + 2 :].split()
    return None if state in {"Z", "X"} else int(rest[18])


class GpuProcesses:
    """The processes of one node, in one directory that clients of any user may write."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._name = str(directory)
        self._empty_since_ns = -1
        self._seen: Sequence[GpuProcess] | None = None
        self._looks_once = False

    def create(self) -> None:
        """Make the directory."""
        self.directory.mkdir(parents=True, exist_ok=True)
        # As /tmp: holders run as their own users, and may remove only their own files.
        if stat.S_IMODE(self.directory.stat().st_mode) != OPEN_MODE:
            self.directory.chmod(OPEN_MODE)

    @contextlib.contextmanager
    def at_one_moment(self) -> Generator[None]:
        """Have ``list`` look once and repeat itself until the end of the block."""
        self._looks_once = True
        try:
            yield
        finally:
            self._looks_once = False
            self._seen = None

    def list(self) -> Sequence[GpuProcess]:
        """Every living process, by pid. Files of dead ones are removed."""
        if self._seen is not None:
            return self._seen
        living = self._look()
        if self._looks_once:
            self._seen = living
        return living

    def _look(self) -> Sequence[GpuProcess]:
        # Drivers ask this again and again, and most nodes are idle: as long as an
        # empty directory has not changed it need not be read.
        changed_ns = os.stat(self._name).st_mtime_ns  # noqa: PTH116 half of Path.stat's cost
        if changed_ns == self._empty_since_ns:
            return []
        names = os.listdir(self.directory)[:PROCESSES_MAX]  # noqa: PTH208 likewise
        settled = time.time_ns() - changed_ns > _MTIME_STEP_NS
        self._empty_since_ns = changed_ns if settled and not names else -1
        living: list[GpuProcess] = []
        for name in names:
            if not name.isdecimal():
                continue
            path = self.directory / name
            process = _read(path)
            if process is None:
                continue
            if start_ticks_of(process.pid) == process.start_ticks:
                living.append(process)
            else:
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    path.unlink()
        return sorted(living, key=lambda process: process.pid)

    def add(self, process: GpuProcess) -> None:
        """List a process; atomic."""
        path = self.directory / str(process.pid)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(process)))
        temporary.replace(path)

    def remove(self, pid: int) -> None:
        """Drop a process; no error when it is not there."""
        (self.directory / str(pid)).unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Keep other clients from taking memory meanwhile."""
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _read(path: Path) -> GpuProcess | None:
    """Read one file; None when its process has just removed it."""
    try:
        row: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    row["uuids"] = tuple(row["uuids"])
    return GpuProcess(**row)
