"""The processes of this host, through /proc and pidfds.

A pid alone names nobody: it is given out again. So every process is named by its
start time too, and is watched and signalled through a pidfd, which stays with the
process that it was opened for.
"""

import asyncio
import os
import pwd
import re
import select
import signal
from collections.abc import Callable
from pathlib import Path

from gpupool_agent.devices.interfaces import ProcessFacts, ProcessIdentity
from gpupool_agent.devices.sysfs import read_file

ANCESTORS_MAX = 64
COMMAND_CHARS_MAX = 253
LEASE_ID = b"GPUPOOL_LEASE_ID="
LEASE_ID_FORM = re.compile(rb"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
"""What a lease id looks like; a tenant's process may say anything of any length."""

ENVIRONMENT_BEGIN = re.compile(rb"[^\s=\0]+=")
"""How an environment begins, unless its process wrote its title over it, as setproctitle does."""

LEASE_CGROUP = re.compile(r"/gpupool-lease-([A-Za-z0-9_-]{1,128})(?:\.(?:scope|service))?(?:/|$)")
"""A lease's cgroup, as ``systemd-run --scope --unit=gpupool-lease-LEASE`` makes one."""


class PidfdWatch:
    """A watched process. The event loop calls back when its pidfd turns readable."""

    def __init__(self, pidfd: int, on_end: Callable[[str], None]) -> None:
        self._pidfd = pidfd
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._ended)

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _ended(self) -> None:
        self.close()
        self._on_end("exited")


class ProcProcessTable:
    """``ProcessTable`` over /proc."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def describe(self, pid: int) -> ProcessFacts | None:
        """Facts of a process, None when there is no such process (any more)."""
        directory = self._proc / str(pid)
        try:
            parent, ticks = self._stat(pid)
            uid = directory.stat().st_uid
            command = (directory / "cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return ProcessFacts(
            pid=pid,
            start_ticks=ticks,
            uid=uid,
            user=user_name(uid),
            command=_printable(command),
            lease_id=self._lease_id(directory),
            ancestors=self._ancestors(parent),
        )

    def identify(self, pid: int) -> ProcessIdentity | None:
        """Start time and user of a process, read while a pidfd holds it; None: there is none."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            # A thread has a number too, but it is no process.
            return None
        try:
            found = ProcessIdentity(start_ticks=self._stat(pid)[1], uid=self._uid(pid))
            # Readable: it has ended, and what was read may be another's.
            ended, _, _ = select.select([pidfd], [], [], 0)
        except (OSError, ValueError, IndexError):
            return None
        finally:
            os.close(pidfd)
        return None if ended else found

    def start_ticks(self, pid: int) -> int | None:
        """Start time of a process in clock ticks since boot, None when there is none."""
        try:
            return self._stat(pid)[1]
        except (OSError, ValueError):
            return None

    def watch(self, pid: int, start_ticks: int, on_end: Callable[[str], None]) -> PidfdWatch | None:
        """Call ``on_end("exited")`` once the process is gone; None: there is none."""
        pidfd = self._open(pid, start_ticks)
        return None if pidfd is None else PidfdWatch(pidfd, on_end)

    def signal(self, pid: int, start_ticks: int, number: int) -> str:
        """Send a signal to exactly this process; why not, where that fails."""
        pidfd = self._open(pid, start_ticks)
        if pidfd is None:
            return ""
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return ""
        except PermissionError as error:
            return str(error)
        finally:
            os.close(pidfd)
        return ""

    def _open(self, pid: int, start_ticks: int) -> int | None:
        """Open a pidfd of this very process: opened first, compared after."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        if self.start_ticks(pid) != start_ticks:
            os.close(pidfd)
            return None
        return pidfd

    def _stat(self, pid: int) -> tuple[int, int]:
        """Parent and start time. The name in brackets may hold blanks and brackets."""
        fields = read_file(f"{self._proc}/{pid}/stat").rpartition(")")[2].split()
        return int(fields[1]), int(fields[19])

    def _uid(self, pid: int) -> int | None:
        """The user of a process, where its real, effective and saved one are the same."""
        lines = (self._proc / str(pid) / "status").read_text(errors="replace").splitlines()
        line = next((each for each in lines if each.startswith("Uid:")), "")
        real, *others = line.split()[1:]
        return int(real) if all(each == real for each in others) else None

    def _ancestors(self, parent: int) -> tuple[int, ...]:
        line: list[int] = []
        while parent > 0 and len(line) < ANCESTORS_MAX:
            line.append(parent)
            try:
                parent = self._stat(parent)[0]
            except (OSError, ValueError, IndexError):
                break
        return tuple(line)

    def _lease_id(self, directory: Path) -> str | None:
        """By its environment, else by its cgroup; None where the former cannot be told."""
        by_cgroup = _lease_of_cgroup(directory)
        try:
            environment = (directory / "environ").read_bytes()
        except OSError:
            return by_cgroup or None
        for entry in environment.split(b"\0"):
            if entry.startswith(LEASE_ID):
                found = entry.removeprefix(LEASE_ID)
                return found.decode("ascii") if LEASE_ID_FORM.fullmatch(found) else by_cgroup
        return by_cgroup or ("" if ENVIRONMENT_BEGIN.match(environment) else None)


def _lease_of_cgroup(directory: Path) -> str:
    try:
        text = (directory / "cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = (LEASE_CGROUP.search(line) for line in text.splitlines())
    return next((each[1] for each in found if each is not None), "")


def user_name(uid: int) -> str:
    """Name of a user, empty where the host knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def _printable(command: bytes) -> str:
    text = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return "".join(each if each.isprintable() else "?" for each in text)[:COMMAND_CHARS_MAX]
