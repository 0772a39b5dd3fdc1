"""Running a program: bounded in time and in what it prints, with nothing of ours in it."""

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpupool_agent.helper.refusal import FailedError

OUTPUT_BYTES_MAX = 12 * 1024
"""Of each stream; JSON may take six times as much to write it down."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended, and what it printed."""

    exit_code: int
    output: str
    errors: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAs:
    """A user with its groups."""

    uid: int
    gid: int
    groups: tuple[int, ...]


def run_as(uid: int) -> RunAs:
    """The user of a uid, with all groups; FailedError where the host knows no such user."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError as error:
        raise FailedError(f"the host knows no user with uid {uid}") from error
    return RunAs(
        uid=uid,
        gid=user.pw_gid,
        groups=tuple(os.getgrouplist(user.pw_name, user.pw_gid)),
    )


def find(program: str) -> str:
    """The path of a program given by name or path; FailedError where there is none."""
    found = program if "/" in program else shutil.which(program, path=PATH)
    if found is None or not os.access(found, os.X_OK):
        raise FailedError(f"the program {program} is not installed")
    return found


async def run(
    command: Sequence[str],
    *,
    deadline_s: float,
    environment: Mapping[str, str] | None = None,
    text: str = "",
    user: RunAs | None = None,
) -> Ended:
    """Run a program to its end, with ``text`` as its input; FailedError.

    It has the variables given and a plain PATH, and is killed with all that it started
    in its session when its time is over.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            find(command[0]),
            *command[1:],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={"PATH": PATH, **(environment or {})},
            start_new_session=True,
            user=None if user is None else user.uid,
            group=None if user is None else user.gid,
            extra_groups=None if user is None else user.groups,
        )
    except OSError as error:
        raise FailedError(f"{command[0]} cannot be started: {error.strerror}") from error
    assert process.stdin is not None  # noqa: S101 - it is a pipe, as asked
    reading = asyncio.gather(_read(process.stdout), _read(process.stderr))
    try:
        async with asyncio.timeout(deadline_s):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(text.encode())
                await process.stdin.drain()
            process.stdin.close()
            output, errors = await reading
            exit_code = await process.wait()
    except TimeoutError as error:
        raise FailedError(f"{command[0]} took longer than {deadline_s:g} s") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        reading.cancel()
        # Something of it that lives on may hold the pipes open, and asyncio has no other
        # way to close our ends of them.
        vars(process)["_transport"].close()
        await process.wait()
    return Ended(exit_code=exit_code, output=output, errors=errors)


async def _read(stream: asyncio.StreamReader | None) -> str:
    """Read to the end; what is beyond the bound is read and dropped."""
    assert stream is not None  # noqa: S101 - it is a pipe, as asked
    kept = bytearray()
    while piece := await stream.read(65536):
        kept += piece[: OUTPUT_BYTES_MAX - len(kept)]
    return kept.decode(errors="replace")
