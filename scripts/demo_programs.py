"""The programs of the demo: started, waited for, and ended by the process id we got."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

BIN = Path(sys.executable).parent
STOP_PATIENCE_S = 15.0
POLL_S = 0.1

Found = TypeVar("Found")


class DemoError(Exception):
    """Something is not as the demo says; the text tells what and where to look."""


def until(what: str, look: Callable[[], Found | None], *, limit_s: float = 30.0) -> Found:
    """Looks again and again until there is an answer; DemoError after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise DemoError(f"waited {limit_s:.0f} s in vain for: {what}")
        time.sleep(POLL_S)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program that we started, the leader of a session of its own.

    It is not reaped before ``end``, so that until then neither its process id nor its
    group's can be anybody else's.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def check_alive(self) -> None:
        """DemoError with the end of its log when it has ended."""
        status = self.status()
        if status is not None:
            tail = self.log.read_text(errors="replace").splitlines()[-15:]
            lines = "\n    ".join(tail)
            raise DemoError(f"{self.name} ended with status {status}; {self.log}:\n    {lines}")

    def end(self) -> bool:
        """Ends it and all that it left in its group; False when it had to be killed."""
        os.kill(self.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_PATIENCE_S
        while self.status() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        in_time = self.status() is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return in_time


class Programs:
    """Everything that the demo started; ``stop`` ends it in reverse order."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self._logs = logs
        self._environment = dict(environment)
        self._running: list[Program] = []

    def start(self, name: str, command: Sequence[str | Path]) -> Program:
        """Starts a program of our environment; its output goes to a log file."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(BIN / command[0]), *[str(word) for word in command[1:]]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                # Ctrl-C reaches the demo alone, which then stops them in order.
                start_new_session=True,
            )
        program = Program(name=name, process=process, log=log)
        self._running.append(program)
        return program

    def ready(self, program: Program, file: Path, *, limit_s: float = 60.0) -> dict[str, Any]:
        """What the program wrote into its ready file, once it is there."""

        def look() -> dict[str, Any] | None:
            program.check_alive()
            return json.loads(file.read_text()) if file.exists() else None

        return until(f"{program.name} to be ready, see {program.log}", look, limit_s=limit_s)

    def check_alive(self) -> None:
        """DemoError when one of them has ended by itself."""
        for program in self._running:
            program.check_alive()

    def end(self, program: Program) -> None:
        """Ends one of them before the others."""
        self._running.remove(program)
        program.end()

    def stop(self) -> list[str]:
        """Ends all, the last first; returns the names of those that had to be killed."""
        killed: list[str] = []
        while self._running:
            program = self._running.pop()
            if not program.end():
                killed.append(program.name)
        return killed
