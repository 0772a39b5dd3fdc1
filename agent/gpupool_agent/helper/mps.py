"""MPS daemons: one for each slot, kept by systemd or in a session of its own.

A daemon outlives the helper. What the helper knows of it lies in files of its own, which
only root can write; the pid file among them holds the start time too, since pids are given
out again.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpupool_agent.helper.cdi import SLOT
from gpupool_agent.helper.files import make_directory, make_for_user, remove_tree, write_file
from gpupool_agent.helper.processes import held, send, start_ticks
from gpupool_agent.helper.programs import PATH, find, run
from gpupool_agent.helper.refusal import FailedError
from gpupool_agent.helper.settings import HelperSettings

BOOTED = Path("/run/systemd/system")
"""Is there where systemd runs the host, sd_booted(3)."""

START = """\
umask 077
program=$1 file=$2
read -r line < "/proc/$$/stat"
set -- ${line##*) }
echo "$$ ${20}" > "$file.new" && mv "$file.new" "$file" && exec "$program" -f
"""
"""A daemon writes its own pid file, with its start time, before it is one: a helper that is
killed in the middle leaves none that the next one does not find."""

POLL_S = 0.01
LOG_CHARS_MAX = 300
_VARIABLE = re.compile(r"([A-Z_]+)=([ -~]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """A daemon that runs."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a slot was made for."""

    gpu: str
    uid: int


class Supervisor(Protocol):
    """Who keeps daemons. FailedError."""

    async def start(self, slot: str, environment: Mapping[str, str], log: Path) -> None:
        """Start the slot's daemon; its environment lies in the slot's file already."""
        ...

    async def find(self, slot: str) -> Daemon | None:
        """The slot's daemon, None where none runs."""
        ...

    async def stop(self, slot: str) -> None:
        """End it, and forget it."""
        ...


class MpsDaemons:
    """Every slot's daemon, its directories and its record."""

    def __init__(self, settings: HelperSettings) -> None:
        self._settings = settings
        by_systemd = settings.mps_supervisor == "systemd" or (
            settings.mps_supervisor == "auto" and BOOTED.is_dir()
        )
        self._supervisor: Supervisor = (
            SystemdSupervisor(settings) if by_systemd else SessionSupervisor(settings)
        )

    def pipe(self, slot: str) -> Path:
        """Where clients and the control program reach the slot's daemon."""
        return self._settings.mps_dir / slot / "pipe"

    def record(self, slot: str) -> Record | None:
        """What the slot was made for, None where it was not made."""
        return _read_record(self._file(slot))

    def slots(self) -> dict[str, Record]:
        """Every slot that was made."""
        names = (each.stem[4:] for each in self._settings.run_dir.glob("mps-*.env"))
        found = {name: self.record(name) for name in names}
        return {name: record for name, record in found.items() if record is not None}

    async def find(self, slot: str) -> Daemon | None:
        """The slot's daemon, None where none runs."""
        return await self._supervisor.find(slot)

    async def sweep(self) -> None:
        """Remove what is left of slots without a daemon: a helper was killed in the middle.

        FailedError.
        """
        for pattern in (".mps-*.new", "mps-*.pid.new"):
            for each in self._settings.run_dir.glob(pattern):
                each.unlink(missing_ok=True)
        made = {each.name for each in self._settings.mps_dir.glob("*") if each.is_dir()}
        for slot in sorted(made | set(self.slots())):
            if SLOT.fullmatch(slot) and await self.find(slot) is None:
                await self.stop(slot)

    async def start(self, slot: str, record: Record) -> Daemon:
        """Have the slot's daemon; it takes commands afterwards. FailedError: nothing is left."""
        found = await self.find(slot)
        if found is not None:
            return found
        await self.stop(slot)
        try:
            await self._start(slot, record)
            return await self._ready(slot)
        except BaseException:
            await self.stop(slot)
            raise

    async def stop(self, slot: str) -> None:
        """End the slot's daemon, and remove all that it has. FailedError."""
        await self._supervisor.stop(slot)
        try:
            remove_tree(self._settings.mps_dir / slot)
            self._file(slot).unlink(missing_ok=True)
        except OSError as error:
            raise FailedError(f"{slot}: its directory is not removed: {error}") from error

    async def _start(self, slot: str, record: Record) -> None:
        log = self._settings.mps_dir / slot / "log"
        environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe(slot)),
            "CUDA_MPS_LOG_DIRECTORY": str(log),
            "CUDA_VISIBLE_DEVICES": record.gpu,
        }
        try:
            make_directory(self._settings.run_dir, 0o755)
            make_directory(self._settings.mps_dir, 0o711)
            make_directory(self._settings.mps_dir / slot, 0o711)
            make_for_user(self.pipe(slot), record.uid)
            log.mkdir(mode=0o700)
            lines = [f"{name}={value}\n" for name, value in environment.items()]
            write_file(self._file(slot), "".join([*lines, f"GPUPOOL_UID={record.uid}\n"]), 0o600)
        except (OSError, KeyError) as error:
            raise FailedError(f"{slot}: its directories cannot be made: {error}") from error
        await self._supervisor.start(slot, environment, log / "control.log")

    async def _ready(self, slot: str) -> Daemon:
        """Wait for the daemon's socket, which is there once it takes commands."""
        control = self.pipe(slot) / "control"
        end_s = time.monotonic() + self._settings.start_deadline_s
        while True:
            daemon = await self.find(slot)
            if daemon is None:
                raise FailedError(f"{slot}: its MPS daemon ended at once: {self._last(slot)}")
            if control.exists():
                return daemon
            if time.monotonic() > end_s:
                limit_s = self._settings.start_deadline_s
                raise FailedError(
                    f"{slot}: its MPS daemon took longer than {limit_s:g} s: {self._last(slot)}"
                )
            await asyncio.sleep(POLL_S)

    def _last(self, slot: str) -> str:
        try:
            text = (self._settings.mps_dir / slot / "log" / "control.log").read_text(
                "utf-8", "replace"
            )
        except OSError:
            return f"see the journal of gpupool-mps@{slot}.service"
        return " ".join(text.split())[-LOG_CHARS_MAX:]

    def _file(self, slot: str) -> Path:
        return self._settings.run_dir / f"mps-{slot}.env"


class SystemdSupervisor:
    """Daemons as units, gpupool-mps@SLOT.service, which read the slot's file."""

    def __init__(self, settings: HelperSettings) -> None:
        self._deadline_s = settings.command_deadline_s

    async def start(self, slot: str, environment: Mapping[str, str], log: Path) -> None:
        """Start the unit."""
        del environment, log
        await self._systemctl("start", _unit(slot))

    async def find(self, slot: str) -> Daemon | None:
        """The unit's main process."""
        shown = await self._systemctl("show", "--property=MainPID", "--value", _unit(slot))
        pid = int(shown.strip() or 0)
        ticks = start_ticks(pid) if pid else None
        return None if ticks is None else Daemon(pid=pid, start_ticks=ticks)

    async def stop(self, slot: str) -> None:
        """Stop the unit: its whole cgroup."""
        await self._systemctl("stop", _unit(slot))

    async def _systemctl(self, *arguments: str) -> str:
        ended = await run(
            ("systemctl", "--no-ask-password", *arguments), deadline_s=self._deadline_s
        )
        if ended.exit_code:
            raise FailedError(f"systemctl {arguments[0]}: {ended.errors.strip()[:LOG_CHARS_MAX]}")
        return ended.output


class SessionSupervisor:
    """Daemons in sessions of their own, found again by a pid file with the start time."""

    def __init__(self, settings: HelperSettings) -> None:
        self._settings = settings
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    async def start(self, slot: str, environment: Mapping[str, str], log: Path) -> None:
        """Start the daemon; it does not end with the helper."""
        self._reap()
        program = find(self._settings.mps_control)
        try:
            with log.open("ab") as output:
                child = subprocess.Popen(  # noqa: ASYNC220 - it returns once it runs
                    ("sh", "-c", START, "sh", program, self._file(slot)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd="/",
                    env={"PATH": PATH, **environment},
                    start_new_session=True,
                )
        except OSError as error:
            raise FailedError(f"{program} cannot be started: {error.strerror}") from error
        self._children[child.pid] = child
        end_s = time.monotonic() + self._settings.command_deadline_s
        while child.poll() is None and not self._file(slot).exists():
            if time.monotonic() > end_s:
                child.kill()
                raise FailedError(f"{slot}: its MPS daemon did not write its pid file")
            await asyncio.sleep(POLL_S)

    async def find(self, slot: str) -> Daemon | None:
        """The process of the pid file, if it is still the same one."""
        self._reap()
        try:
            pid, ticks = map(int, self._file(slot).read_text(encoding="ascii").split())
        except (OSError, ValueError):
            return None
        return Daemon(pid=pid, start_ticks=ticks) if start_ticks(pid) == ticks else None

    async def stop(self, slot: str) -> None:
        """Ask the daemon to end, and kill its session where it does not."""
        daemon = await self.find(slot)
        if daemon is not None:
            with held(daemon.pid, daemon.start_ticks) as pidfd:
                if pidfd is not None:
                    send(pidfd, signal.SIGTERM)
                    if not await self._gone(slot, self._settings.stop_deadline_s):
                        # The daemon leads its session and process group; servers are in it.
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(daemon.pid, signal.SIGKILL)
            if not await self._gone(slot, self._settings.stop_deadline_s):
                raise FailedError(f"{slot}: its MPS daemon {daemon.pid} cannot be killed")
        self._file(slot).unlink(missing_ok=True)

    async def _gone(self, slot: str, within_s: float) -> bool:
        end_s = time.monotonic() + within_s
        while await self.find(slot) is not None:
            if time.monotonic() > end_s:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def _reap(self) -> None:
        """Take note of daemons of this process that have ended, so that they go away."""
        for pid, child in list(self._children.items()):
            if child.poll() is not None:
                del self._children[pid]

    def _file(self, slot: str) -> Path:
        return self._settings.run_dir / f"mps-{slot}.pid"


def _unit(slot: str) -> str:
    return f"gpupool-mps@{slot}.service"


def _read_record(file: Path) -> Record | None:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    matches = filter(None, map(_VARIABLE.fullmatch, lines))
    found = {match[1]: match[2] for match in matches}
    try:
        return Record(gpu=found["CUDA_VISIBLE_DEVICES"], uid=int(found["GPUPOOL_UID"]))
    except (KeyError, ValueError):
        return None
