"""Processes, each named by pid and start time, held by a pidfd while it is looked at."""

import os
import re
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpupool_agent.helper.refusal import FailedError, RefusedError

PROC = Path("/proc")
ENVIRON_BYTES_MAX = 2 * 2**20
LEASE_ID = b"GPUPOOL_LEASE_ID="
LEASE_ID_BYTES_MAX = 128
ENVIRONMENT_BEGIN = re.compile(rb"[^\s=\0]+=")
"""How an environment begins, unless its process wrote its title over it, as setproctitle does."""

COMMAND_BYTES_MAX = 253


def start_ticks(pid: int) -> int | None:
    """Start time in clock ticks since boot; None: there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        # The name in brackets may hold blanks and brackets; fields count from after it.
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "XZ" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def seen(pid: int, ticks: int) -> dict[str, Any] | None:
    """User and command of this very process, for the audit; None: it is gone, or another."""
    directory = PROC / str(pid)
    try:
        uid, command = directory.stat().st_uid, (directory / "cmdline").read_bytes()
    except OSError:
        return None
    if start_ticks(pid) != ticks:
        return None
    text = command[:COMMAND_BYTES_MAX].replace(b"\0", b" ").decode(errors="replace").strip()
    shown = "".join(each if each.isprintable() else "?" for each in text)
    return {"uid": uid, "command": shown}


@contextmanager
def held(pid: int, ticks: int) -> Generator[int | None]:
    """A pidfd of this very process, None where it is gone; RefusedError: it is another.

    Opened first, compared after: a pid that was given out again is never taken for it.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    except OSError as error:
        # A thread has a number too, but it is no process.
        raise RefusedError(f"pid: {pid} is no process") from error
    try:
        found = start_ticks(pid)
        if found is not None and found != ticks:
            raise RefusedError(f"pid: {pid} started at {found} ticks, not at {ticks}")
        yield None if found is None else pidfd
    finally:
        os.close(pidfd)


def send(pidfd: int, number: int) -> None:
    """Send a signal; nothing where the process is gone."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return
    except OSError as error:
        raise FailedError(f"the signal was not sent: {error.strerror}") from error


def lease_of(pid: int) -> str:
    """GPUPOOL_LEASE_ID of a process; empty where it has none that could be one.

    Raises FailedError where the environment cannot be read, or is none any more. Call it
    between two looks at the start time, or under a pidfd that is asked after.
    """
    try:
        with (PROC / str(pid) / "environ").open("rb") as file:
            environment = file.read(ENVIRON_BYTES_MAX)
    except OSError as error:
        raise FailedError(f"its environment cannot be read: {error.strerror}") from error
    for entry in environment.split(b"\0"):
        if entry.startswith(LEASE_ID):
            found = entry.removeprefix(LEASE_ID)
            good = len(found) <= LEASE_ID_BYTES_MAX and found.isascii()
            text = found.decode("ascii") if good else ""
            # What is said here comes from a tenant's process.
            return text if text.isprintable() else ""
    if not ENVIRONMENT_BEGIN.match(environment):
        raise FailedError("its environment was written over, so it says nothing")
    return ""
