"""The keeper, in a process of its own, over children that each do one thing."""

import contextlib
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

from gpupool_allocator.keeper import PAUSE_S_MAX, PAUSE_S_MIN, pause_s

PATIENCE_S = 30.0

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from gpupool_allocator import logs
from gpupool_allocator.keeper import Ports, keep

logs.set_up("info", "json")
log = Path(sys.argv[1])

def say(line):
    with log.open("a") as file:
        file.write(line + "\\n")

def serve(ports, told):
    number = len(log.read_text().splitlines()) if log.exists() else 0
    say(f"child {os.getpid()} of {os.getppid()} on {ports}")
    return child(number, told)

def rest():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, lambda *_: os._exit(3))
    print("resting", flush=True)
    while True:
        signal.pause()
"""


class Kept:
    """A keeper that runs, and what its children have said."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    def lines(self) -> list[str]:
        """One for each child there was."""
        return self._log.read_text().splitlines()

    def resting(self) -> psutil.Process:
        """The child that has come to rest."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "resting\n"
        found = re.match(r"child (\d+) of (\d+)", self.lines()[-1])
        assert found is not None
        assert int(found[2]) == self.process.pid
        return psutil.Process(int(found[1]))

    def outcome(self) -> int:
        """The keeper's exit code."""
        return self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def kept(tmp_path: Path, child: str) -> Generator[Kept]:
    program = PROGRAM + textwrap.dedent(child) + "\nsys.exit(keep(serve))\n"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Kept(process, tmp_path / "log")
        finally:
            process.kill()


RESTS = """
def child(number, told):
    told(Ports(grpc=7, http=8))
    rest()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 3)])
def test_a_signal_to_stop_reaches_the_child_and_its_outcome_is_the_keepers(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with kept(tmp_path, RESTS) as keeper:
        keeper.resting()
        keeper.process.send_signal(number)
        assert keeper.outcome() == code
        assert len(keeper.lines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_the_child_listens_ends_it_without_a_word(
    tmp_path: Path, number: signal.Signals
) -> None:
    deaf = """
    def child(number, told):
        print("resting", flush=True)
        while True:
            signal.pause()
    """
    with kept(tmp_path, deaf) as keeper:
        keeper.resting()
        keeper.process.send_signal(number)
        assert keeper.outcome() == 0
        assert keeper.process.stderr is not None
        assert keeper.process.stderr.read() == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_child_that_was_killed_is_replaced_on_the_same_ports(
    tmp_path: Path, number: signal.Signals
) -> None:
    with kept(tmp_path, RESTS) as keeper:
        first = keeper.resting()
        first.send_signal(number)
        second = keeper.resting()
        assert second.pid != first.pid
        assert keeper.lines()[0].endswith("on None")
        assert keeper.lines()[1].endswith("on Ports(grpc=7, http=8)")
        # The first of several deaths is answered at once; the next ones may wait a little.
        second.send_signal(number)
        assert keeper.resting().pid not in (first.pid, second.pid)


def test_a_child_that_is_killed_while_it_stops_has_stopped(tmp_path: Path) -> None:
    with kept(tmp_path, RESTS) as keeper:
        child = keeper.resting()
        child.suspend()
        keeper.process.send_signal(signal.SIGTERM)
        child.kill()
        assert keeper.outcome() == 0
        assert len(keeper.lines()) == 1


def test_children_are_seen_to_end_where_their_end_was_ignored_before(tmp_path: Path) -> None:
    with kept(tmp_path, "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n" + RESTS) as keeper:
        keeper.resting().kill()
        keeper.resting()
        assert len(keeper.lines()) == 2


def test_a_child_that_ends_itself_to_start_anew_is_replaced(tmp_path: Path) -> None:
    crashes = """
    def child(number, told):
        told(Ports(grpc=7, http=8))
        if number == 0:
            return 70
        rest()
    """
    with kept(tmp_path, crashes) as keeper:
        keeper.resting()
        assert len(keeper.lines()) == 2


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("return 70", 70),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
        ("return 1", 1),
        ("raise OSError", 1),
    ],
)
def test_a_child_that_ends_before_it_served_ends_the_keeper(
    tmp_path: Path, end: str, code: int
) -> None:
    with kept(tmp_path, f"def child(number, told):\n    {end}") as keeper:
        assert keeper.outcome() == code
        assert len(keeper.lines()) == 1


def test_a_child_that_cannot_go_on_though_it_served_ends_the_keeper(tmp_path: Path) -> None:
    fails = """
    def child(number, told):
        told(Ports(grpc=7, http=8))
        return 1
    """
    with kept(tmp_path, fails) as keeper:
        assert keeper.outcome() == 1
        assert len(keeper.lines()) == 1


def test_the_first_is_replaced_at_once_and_those_that_die_young_ever_more_slowly() -> None:
    waits = [pause_s(died_young) for died_young in range(2000)]
    assert waits[:3] == [0.0, 0.0, PAUSE_S_MIN]
    assert waits == sorted(waits)
    assert waits[-1] == PAUSE_S_MAX


def test_a_stop_ends_the_wait_for_the_next_child(tmp_path: Path) -> None:
    dies = """
    def child(number, told):
        told(Ports(grpc=7, http=8))
        return 70
    """
    with kept(tmp_path, dies) as keeper:
        assert keeper.process.stderr is not None
        for _ in range(7):
            # Said just before the wait, which is 3.2 s after the seventh.
            assert "allocator.starts_anew" in keeper.process.stderr.readline()
        keeper.process.send_signal(signal.SIGTERM)
        assert keeper.outcome() == 0
        assert len(keeper.lines()) == 7


def test_nothing_that_serves_outlives_its_keeper(tmp_path: Path) -> None:
    with kept(tmp_path, RESTS) as keeper:
        child = keeper.resting()
        keeper.process.kill()
        keeper.outcome()
        child.wait(PATIENCE_S)
        assert not child.is_running()


def test_a_keeper_has_no_thread_that_a_fork_would_lose() -> None:
    program = (
        "import gpupool_allocator.daemon, os; print(len(os.listdir('/proc/self/task')), end='')"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout == "1"
