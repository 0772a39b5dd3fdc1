"""gpupool run while the pool is gone: it says what it waits for, not for long, and can be ended."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tests.unit.client.conftest import PoolThread

RUN = (sys.executable, "-m", "gpupool.cli.main", "run", "--gpus", "1")

AT_ONCE_S = 6.0
"""For a process to end at a signal, on a machine with much else to do; far below what the
command would try for by itself."""


@pytest.fixture
def pool_thread() -> Iterator[PoolThread]:
    served = PoolThread()
    yield served
    served.stop()


def start(address: str, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*RUN, "--address", address, "--", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line_with(process: subprocess.Popen[str], words: str) -> str:
    """The next line of standard error that has these words."""
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return line
    pytest.fail(f"it never said {words!r}")


def test_a_pool_that_is_not_there_is_told_while_it_is_waited_for() -> None:
    process = start("127.0.0.1:1", "true")
    told = line_with(process, "no pool can be reached at 127.0.0.1:1")
    assert told.endswith("tried again for 30 s, Ctrl-C ends that\n")
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - asked < AT_ONCE_S
    assert "Traceback" not in errors


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_pool_that_is_gone_at_the_end_does_not_keep_the_command(
    pool_thread: PoolThread, interrupted: bool
) -> None:
    process = start(pool_thread.pool.address, "sh", "-c", "echo runs; read line; exit 7")
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    pool_thread.run(pool_thread.pool.stop)
    process.stdin.close()
    told = line_with(process, "no pool can be reached")
    assert told.endswith("tried again for 10 s, Ctrl-C ends that\n")
    asked = time.monotonic()
    if interrupted:
        process.send_signal(signal.SIGINT)
    process.stdin = None
    _, errors = process.communicate(timeout=60)
    took_s = time.monotonic() - asked
    if interrupted:
        assert (process.returncode, took_s < AT_ONCE_S) == (130, True)
    else:
        assert (process.returncode, took_s < 25) == (7, True)
        assert "was not released and ends by itself" in errors
