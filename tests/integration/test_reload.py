"""SIGHUP: the log level is read anew; the rest is named, and nothing ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 20.0
PROGRAMS = {
    "agent": (
        "gpupool_agent",
        'allocators = ["127.0.0.1:9"]\nmetrics_port = -1\nsocket = ""\nhelper_socket = ""\n',
        "usage_period_s",
    ),
    "allocator": (
        "gpupool_allocator",
        'grpc_address = "127.0.0.1:0"\nhttp_address = "127.0.0.1:0"\n',
        "aging_s",
    ),
}


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {DEADLINE_S} s for: {what}"
        time.sleep(0.01)
    return found


class Program:
    """One of the programs with a settings file and a service manager's socket."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.module, self.settings, self.key = PROGRAMS[name]
        self.folder = folder
        self.file = folder / "settings.toml"
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(folder / "notify"))
        self.manager.setblocking(False)
        self.told: list[str] = []
        self.write('log_level = "info"')
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, "--config", str(self.file)],
                stderr=log,
                env={
                    **os.environ,
                    "NOTIFY_SOCKET": str(folder / "notify"),
                    "WATCHDOG_USEC": "300000",
                },
            )
        until(lambda: any("READY=1" in each for each in self.listen()), "the program")

    def write(self, *lines: str) -> None:
        text = f'state_dir = "{self.folder / "state"}"\n{self.settings}'
        self.file.write_text(text + "\n".join(lines))

    def listen(self) -> list[str]:
        while True:
            try:
                self.told.append(self.manager.recv(4096).decode())
            except BlockingIOError:
                return self.told

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self.folder / "log").read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in found if line["event"] == f"{self.name}.{name}"]

    def reload(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(DEADLINE_S)
        self.manager.close()
        return code


@pytest.fixture(params=sorted(PROGRAMS))
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Program]:
    made = Program(request.param, tmp_path)
    yield made
    assert made.end() == 0


def test_a_reload_takes_over_the_log_level_and_names_what_needs_a_restart(
    program: Program,
) -> None:
    program.write('log_level = "warning"', f"{program.key} = 77.0")
    program.reload()
    (line,) = until(lambda: program.events("reloaded"), "the reload")
    assert (line["log_level"], line["needs_restart"]) == ("warning", [program.key])
    told = program.listen()
    begin = next(index for index, each in enumerate(told) if each.startswith("RELOADING=1"))
    assert "READY=1" in told[begin:]
    # What is less severe is not written any more, what is not stays.
    program.write('log_level = "error"')
    program.reload()
    until(lambda: sum(each.startswith("RELOADING=1") for each in program.listen()) == 2, "another")
    assert len(program.events("reloaded")) == 1


def test_a_reload_of_wrong_settings_changes_nothing(program: Program) -> None:
    program.write('log_level = "loud"')
    program.reload()
    (line,) = until(lambda: program.events("not_reloaded"), "the refusal")
    assert "log_level" in line["reason"]
    assert program.process.poll() is None


def test_a_program_gives_signs_of_life_while_it_works(program: Program) -> None:
    until(lambda: program.listen().count("WATCHDOG=1") >= 3, "signs of life")
