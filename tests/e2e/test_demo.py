"""The demo is what a newcomer runs first: it must do what it says, and leave nothing."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpupool_agent.devices.processes import user_name

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "scripts" / "demo.py"


def started_from(folder: Path) -> list[str]:
    """Command lines of all processes that name the folder, but for the demo itself."""
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if any(str(folder) in word for word in line) and str(DEMO) not in line:
            found.append(" ".join(line))
    return found


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo that stays up; ended whatever happens."""
    process = subprocess.Popen(
        [sys.executable, "-u", DEMO, "--state", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.mark.timeout(300)
def test_demo_check_verifies_every_step_and_leaves_no_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, DEMO, "--check", "--state", tmp_path],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a gang of 16 GPUs" in done.stdout
    assert "CUDA_VISIBLE_DEVICES=GPU-" in done.stdout
    assert "confirmed clean and free again" in done.stdout
    assert re.search(
        rf"process \d+ of {re.escape(user_name(os.getuid()))} \(\S+python\S* .*cuda_client.*\) "
        "is on it and belongs to no lease",
        done.stdout,
    )
    assert "killed after its grace; the GPU is free again" in done.stdout
    assert "refused by the GPU, which is exclusive" in done.stdout
    assert "no MPS daemon is left" in done.stdout
    assert started_from(tmp_path) == []


@pytest.mark.timeout(300)
def test_ctrl_c_ends_the_demo_and_all_that_it_started(
    demo: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert demo.stdout is not None
    printed: list[str] = []
    for line in demo.stdout:
        printed.append(line)
        if "stays up until Ctrl-C" in line:
            break
    assert demo.poll() is None, "".join(printed)
    assert started_from(tmp_path), "the pool should be up"
    os.kill(demo.pid, signal.SIGINT)
    rest, _ = demo.communicate(timeout=60)
    assert demo.returncode == 0, rest
    assert started_from(tmp_path) == []


@pytest.mark.timeout(120)
def test_a_demo_interrupted_while_it_starts_leaves_nothing(
    demo: subprocess.Popen[str], tmp_path: Path
) -> None:
    deadline = time.monotonic() + 60
    while not started_from(tmp_path / "allocator"):
        assert time.monotonic() < deadline, "the allocator was never started"
        assert demo.poll() is None
        time.sleep(0.02)
    os.kill(demo.pid, signal.SIGINT)
    demo.communicate(timeout=60)
    assert started_from(tmp_path) == []
