"""The programs of the demo: started, waited for, and ended by the process id we got."""

from __future__ import annotations

import json
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
    """A program that we started."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def check_alive(self) -> None:
        """DemoError with the end of its log when it has ended."""
        status = self.process.poll()
        if status is not None:
            tail = self.log.read_text(errors="replace").splitlines()[-15:]
            lines = "\n    ".join(tail)
            raise DemoError(f"{self.name} ended with status {status}; {self.log}:\n    {lines}")


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

    def forget(self, program: Program) -> None:
        """Takes a program that the demo itself has ended off the list."""
        self._running.remove(program)

    def stop(self) -> list[str]:
        """Ends all, the last first; returns the names of those that had to be killed."""
        killed: list[str] = []
        for program in reversed(self._running):
            program.process.send_signal(signal.SIGTERM)
            try:
                program.process.wait(STOP_PATIENCE_S)
            except subprocess.TimeoutExpired:
                program.process.kill()
                program.process.wait()
                killed.append(program.name)
        self._running.clear()
        return killed
