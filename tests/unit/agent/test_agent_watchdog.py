"""Signs of life: given while the agent works, not given when it does not, and why."""

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.agent_allocator import MemoryDriver, RunningAgent, until

from gpupool_agent.watchdog import feed, interval_s


class Manager:
    """systemd's end of $NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._channel.bind(str(path))
        self._channel.setblocking(False)
        self.heard: list[str] = []

    def listen(self) -> list[str]:
        while True:
            try:
                self.heard.append(self._channel.recv(4096).decode())
            except BlockingIOError:
                return self.heard

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    made = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "30000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    yield made
    made.close()


def test_the_interval_is_for_this_process_only() -> None:
    me = str(os.getpid())
    assert interval_s({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": me}) == 2.0
    assert interval_s({"WATCHDOG_USEC": "2000000"}) == 2.0
    assert interval_s({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}) is None
    assert interval_s({"WATCHDOG_USEC": "x"}) is None
    assert interval_s({}) is None


async def test_signs_of_life_end_with_a_reason_and_go_on_without_it(manager: Manager) -> None:
    reason = ""
    feeding = asyncio.create_task(feed(lambda: reason, lambda: "fine"))
    await until(lambda: manager.listen().count("WATCHDOG=1") >= 3, "signs of life")
    assert manager.heard.count("STATUS=fine") == 1
    reason = "nothing moves"
    await until(lambda: "STATUS=stuck: nothing moves" in manager.listen(), "the reason")
    before = manager.listen().count("WATCHDOG=1")
    await until(lambda: manager.listen()[-3:] == ["STATUS=stuck: nothing moves"] * 3, "silence")
    assert manager.heard.count("WATCHDOG=1") == before
    reason = ""
    await until(lambda: manager.listen()[-1] == "WATCHDOG=1", "life again")
    feeding.cancel()


async def test_a_driver_that_hangs_is_told_and_no_reason_to_start_anew(tmp_path: Path) -> None:
    driver = MemoryDriver()
    running = RunningAgent(tmp_path, driver=driver)
    await until(lambda: "2 devices" in running.agent.status(), "the devices")
    driver.gate.clear()
    await until(lambda: "driver: " in running.agent.status(), "the driver to hang")
    assert "has not answered" in running.agent.status()
    # As if it had been hanging for an hour.
    running.agent._poller._due_s = time.monotonic() - 3600
    assert running.agent.stuck() == ""
    driver.gate.set()
    await until(lambda: "2 devices" in running.agent.status(), "the driver to come back")
    await running.stop()


async def test_reading_that_does_not_go_on_is_a_reason_to_start_anew(tmp_path: Path) -> None:
    running = RunningAgent(tmp_path)
    await until(lambda: "2 devices" in running.agent.status(), "the devices")
    assert running.agent.stuck() == ""

    entered = asyncio.Event()

    async def never(_devices: object) -> None:
        entered.set()
        await asyncio.Event().wait()

    running.agent._poller._with_leases = never  # type: ignore[assignment, method-assign]
    await until(entered.is_set, "the next reading")
    await until(lambda: not running.agent._poller._calls.hangs, "the driver's answer")
    running.agent._poller._due_s = time.monotonic() - 3600
    assert "were to be read" in running.agent.stuck()
    await running.stop()
