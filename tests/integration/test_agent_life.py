"""A real agent against a real gRPC server, over a machine in memory."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.agent_allocator import MemoryDriver, RunningAgent, TinyAllocator, until
from tests.agent_bench import assignment, part, whole

from gpupool.model.assignment import HolderWatch, Report
from gpupool.model.caller import ProcessRef
from gpupool.model.ids import LeaseId, NodeId
from gpupool_agent.checkpoint import CheckpointError, StateLockedError
from gpupool_agent.core.readings import GpuProcess
from gpupool_agent.devices.processes import ProcProcessTable


@pytest.fixture
async def allocator() -> AsyncIterator[TinyAllocator]:
    tiny = TinyAllocator()
    await tiny.start()
    yield tiny
    await tiny.stop()


def address(allocator: TinyAllocator) -> str:
    return f"127.0.0.1:{allocator.port}"


def sleep_under_lease(lease: str, seconds: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", str(seconds)], env={**os.environ, "GPUPOOL_LEASE_ID": lease})


async def test_an_agent_introduces_its_node_and_carries_out_what_is_wanted(
    allocator: TinyAllocator, tmp_path: Path
) -> None:
    running = RunningAgent(tmp_path, address(allocator), labels={"zone": "a"})
    await until(lambda: allocator.devices, "the first report")
    hello = allocator.hellos[0]
    assert hello.node_id == "n1"
    assert hello.boot_id == "boot-1"
    assert [device.uuid for device in hello.inventory.devices] == ["GPU-0", "GPU-1"]
    assert hello.inventory.labels == {"zone": "a"}
    assert all(device.clean for device in hello.devices)
    await allocator.want(assignment("a", 1, whole(0)), assignment("b", 2, part(1, 10)))
    await until(lambda: allocator.state("a") == allocator.state("b") == "prepared", "prepared")
    environment = allocator.assignments["b"].environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "10"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "GPU-1=8000M"
    assert environment["CUDA_MPS_PIPE_DIRECTORY"].startswith(str(tmp_path))
    await allocator.want()
    await until(lambda: allocator.state("a") == allocator.state("b") == "ended", "ended")
    await until(lambda: allocator.telemetry > 1, "telemetry")
    await running.stop()


async def test_full_accounts_come_while_a_connection_lasts_and_repeat_no_inventory(
    allocator: TinyAllocator, tmp_path: Path
) -> None:
    running = RunningAgent(tmp_path, address(allocator))
    await allocator.want(assignment("a", 1, whole(0)))
    await until(lambda: allocator.state("a") == "prepared", "prepared")

    def accounts() -> list[Report]:
        return [report for _, report in allocator.reports if report.full]

    # The first is from before the assignment was heard of.
    await until(lambda: len(accounts()) >= 3, "two more accounts")
    assert len(allocator.hellos) == 1
    for account in accounts():
        assert account.inventory is None
        assert [device.uuid for device in account.devices] == ["GPU-0", "GPU-1"]
    latest = accounts()[-1]
    assert latest.accepted_revision == 1
    (ran,) = latest.assignments
    assert ran.place == assignment("a", 1, whole(0)).place
    await running.stop()


async def test_a_driver_that_hangs_delays_no_heartbeat_and_recovers(
    allocator: TinyAllocator, tmp_path: Path
) -> None:
    running = RunningAgent(tmp_path, address(allocator))
    await until(lambda: len(allocator.devices) == 2, "the devices")
    await allocator.want(assignment("a", 1, whole(0)))
    await until(lambda: allocator.state("a") == "prepared", "prepared")
    running.driver.gate.clear()
    await until(lambda: allocator.devices["GPU-0"].failed, "the devices to fail")
    assert "has not answered" in allocator.devices["GPU-0"].reason
    calls = running.driver.calls
    heard = len(allocator.reports)
    await until(lambda: len(allocator.reports) >= heard + 20, "twenty heartbeats")
    times = [time for time, _ in allocator.reports[heard:]]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert max(gaps) < 2.0, "a heartbeat was held up by the driver"
    assert running.driver.calls == calls, "a hung driver was called again"
    assert allocator.state("a") == "prepared"
    running.driver.gate.set()
    await until(lambda: allocator.devices["GPU-0"].clean, "the devices to come back")
    await running.stop()


async def test_an_agent_starts_beside_a_driver_that_hangs_or_lists_nothing(
    allocator: TinyAllocator, tmp_path: Path
) -> None:
    driver = MemoryDriver()
    driver.gate.clear()
    running = RunningAgent(tmp_path, address(allocator), driver=driver)
    await until(lambda: allocator.hellos, "Hello")
    assert allocator.hellos[0].inventory.devices == ()
    driver.gate.set()
    await until(lambda: len(allocator.devices) == 2, "the devices")
    await running.stop()


async def test_a_restarted_agent_adopts_what_runs_without_a_visible_change(
    allocator: TinyAllocator, tmp_path: Path
) -> None:
    first = RunningAgent(tmp_path, address(allocator))
    wanted = (assignment("a", 1, whole(0)), assignment("b", 2, part(1, 30)))
    await allocator.want(*wanted)
    await until(lambda: allocator.state("a") == allocator.state("b") == "prepared", "prepared")
    before = dict(allocator.assignments)
    await first.stop()
    seen = len(allocator.reports)
    second = RunningAgent(tmp_path, address(allocator))
    await until(lambda: len(allocator.hellos) == 2, "the second Hello")
    await until(lambda: len(allocator.reports) > seen + 5, "reports")
    told = [each for _, report in allocator.reports[seen:] for each in report.assignments]
    assert {each.state.value for each in told} == {"prepared"}
    # Full accounts alone name places.
    assert {
        lease: replace(each, place=None, uid=0) for lease, each in allocator.assignments.items()
    } == before
    assert [each.state.value for each in allocator.hellos[1].assignments] == ["prepared"] * 2
    assert allocator.hellos[1].highest_epoch == 1
    assert allocator.hellos[1].agent_instance_id != allocator.hellos[0].agent_instance_id
    status = await second.mps.status(wanted[1].place.devices[0].device_uuid)
    assert [each.share_pct for each in status.slices] == [30]
    await second.stop()


async def test_a_reboot_ends_holders_and_prepares_anew_what_is_still_wanted(
    allocator: TinyAllocator, tmp_path: Path
) -> None:
    ticks = ProcProcessTable().start_ticks(os.getpid())
    assert ticks is not None
    watch = HolderWatch(
        lease_id=LeaseId("a"),
        process=ProcessRef(node_id=NodeId("n1"), pid=os.getpid(), start_ticks=ticks),
    )
    first = RunningAgent(tmp_path, address(allocator))
    await allocator.want(assignment("a", 1, whole(0)), holders=(watch,))
    await until(
        lambda: any(report.alive_holders == ("a",) for _, report in allocator.reports),
        "an alive holder",
    )
    await first.stop()
    seen = len(allocator.reports)
    second = RunningAgent(tmp_path, address(allocator), boot_id="boot-2")
    await until(lambda: len(allocator.hellos) == 2, "the second Hello")
    assert allocator.hellos[1].assignments == ()
    await until(
        lambda: (
            [
                (end.lease_id, end.reason)
                for _, report in allocator.reports[seen:]
                for end in report.ended_holders
            ][:1]
            == [("a", "reboot")]
        ),
        "the end of the holder",
    )
    await until(lambda: allocator.state("a") == "prepared", "prepared anew")
    await second.stop()


async def test_a_late_desired_state_brings_nothing_back(
    allocator: TinyAllocator, tmp_path: Path
) -> None:
    running = RunningAgent(tmp_path, address(allocator))
    await allocator.want(assignment("a", 1, whole(0)))
    late = allocator._desired
    await until(lambda: allocator.state("a") == "prepared", "prepared")
    await allocator.want()
    await until(lambda: allocator.state("a") == "ended", "ended")
    await allocator.send(late)
    await allocator.want(assignment("b", 2, whole(0)))
    await until(lambda: allocator.state("b") == "prepared", "the next lease")
    assert [each.key.lease_id for each in running.agent.node.assignments()] == ["b"]
    await running.stop()


async def test_an_agent_reconnects_to_whichever_allocator_serves(tmp_path: Path) -> None:
    first, second = TinyAllocator(), TinyAllocator(epoch=2)
    addresses = (await first.start(), await second.start())
    running = RunningAgent(tmp_path, *addresses)
    await until(lambda: first.hellos, "the first allocator")
    await first.stop()
    await until(lambda: second.hellos, "the second allocator")
    assert second.hellos[0].highest_epoch == 1
    await running.stop()
    await second.stop()


async def test_an_allocator_that_hangs_up_is_tried_again(
    allocator: TinyAllocator, tmp_path: Path
) -> None:
    allocator.hang_up = True
    running = RunningAgent(tmp_path, address(allocator))
    await until(lambda: len(allocator.hellos) >= 5, "five tries")
    allocator.hang_up = False
    await allocator.want(assignment("a", 1, whole(0)))
    await until(lambda: allocator.state("a") == "prepared", "prepared")
    await running.stop()


async def test_an_allocator_of_an_earlier_term_is_not_obeyed(tmp_path: Path) -> None:
    later, earlier = TinyAllocator(epoch=5), TinyAllocator(epoch=4)
    addresses = (await later.start(), await earlier.start())
    running = RunningAgent(tmp_path, *addresses)
    await until(lambda: later.hellos, "the allocator of epoch 5")
    await later.stop()
    await earlier.want(assignment("a", 1, whole(0)))
    await until(lambda: len(earlier.hellos) >= 2, "a second try")
    assert earlier.reports == []
    assert running.agent.node.assignments() == ()
    assert earlier.hellos[-1].highest_epoch == 5
    await running.stop()
    await earlier.stop()


async def test_a_killed_holder_is_reported_and_its_orphan_keeps_the_device(
    allocator: TinyAllocator, tmp_path: Path
) -> None:
    running = RunningAgent(tmp_path, address(allocator))
    holder = sleep_under_lease("a", 60)
    orphan = sleep_under_lease("a", 61)
    try:
        ticks = ProcProcessTable().start_ticks(holder.pid)
        assert ticks is not None
        watch = HolderWatch(
            lease_id=LeaseId("a"),
            process=ProcessRef(node_id=NodeId("n1"), pid=holder.pid, start_ticks=ticks),
        )
        await allocator.want(assignment("a", 1, whole(0)), holders=(watch,))
        await until(lambda: allocator.state("a") == "prepared", "prepared")
        running.driver.processes["GPU-0"] = (GpuProcess(pid=orphan.pid, memory_mib=700),)
        holder.send_signal(signal.SIGKILL)
        await until(
            lambda: [end for _, report in allocator.reports for end in report.ended_holders],
            "the holder's end",
        )
        await allocator.want()
        await until(lambda: not allocator.devices["GPU-0"].clean, "the orphan to be named")
        assert [each.pid for each in allocator.devices["GPU-0"].strays] == [orphan.pid]
        assert "sleep 61" in allocator.devices["GPU-0"].reason
        assert allocator.state("a") == "ending"
        running.driver.processes.clear()
        await until(lambda: allocator.state("a") == "ended", "the end")
        await until(lambda: allocator.devices["GPU-0"].clean, "a clean device")
    finally:
        for process in (holder, orphan):
            process.kill()
            process.wait()
    await running.stop()


async def test_a_holder_that_is_not_there_is_reported_at_once(
    allocator: TinyAllocator, tmp_path: Path
) -> None:
    running = RunningAgent(tmp_path, address(allocator))
    watch = HolderWatch(
        lease_id=LeaseId("a"),
        process=ProcessRef(node_id=NodeId("n1"), pid=os.getpid(), start_ticks=1),
    )
    await allocator.want(holders=(watch,))
    await until(
        lambda: [end.reason for _, report in allocator.reports for end in report.ended_holders],
        "the end",
    )
    ends = [end.reason for _, report in allocator.reports for end in report.ended_holders]
    assert set(ends) == {"not found"}
    await running.stop()


async def test_a_cut_off_agent_stops_the_processes_when_its_own_clock_is_over(
    allocator: TinyAllocator, tmp_path: Path
) -> None:
    running = RunningAgent(tmp_path, address(allocator))
    work = sleep_under_lease("a", 60)
    try:
        running.driver.processes["GPU-0"] = (GpuProcess(pid=work.pid, memory_mib=700),)
        await until(lambda: len(allocator.devices) == 2, "the devices")
        running.driver.processes.clear()
        await until(lambda: allocator.devices["GPU-0"].clean, "a clean device")
        await allocator.want(assignment("a", 1, whole(0), disconnect_s=1.0))
        await until(lambda: allocator.state("a") == "prepared", "prepared")
        running.driver.processes["GPU-0"] = (GpuProcess(pid=work.pid, memory_mib=700),)
        await allocator.stop()
        assert await asyncio.to_thread(work.wait, 20) == -signal.SIGTERM
        running.driver.processes.clear()
        await until(lambda: running.agent.node.assignments() == (), "the end")
    finally:
        work.kill()
        work.wait()
    await running.stop()


async def test_a_second_agent_on_the_same_state_is_refused(tmp_path: Path) -> None:
    first = RunningAgent(tmp_path, "127.0.0.1:1")
    await first.agent.started.wait()
    with pytest.raises(StateLockedError, match=f"in use by the agent with pid {os.getpid()}"):
        RunningAgent(tmp_path, "127.0.0.1:1")
    await first.stop()
    second = RunningAgent(tmp_path, "127.0.0.1:1")
    await second.agent.started.wait()
    await second.stop()


async def test_a_damaged_checkpoint_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "checkpoint.json").write_text('{"version": 1')
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged"):
        RunningAgent(tmp_path, "127.0.0.1:1")


async def test_a_disk_that_refuses_is_a_fault_and_the_agent_goes_on(
    allocator: TinyAllocator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = RunningAgent(tmp_path, address(allocator))
    await until(lambda: len(allocator.devices) == 2, "the devices")
    (tmp_path / "state" / "checkpoint.new").mkdir()
    await allocator.want(assignment("a", 1, whole(0)))
    await until(lambda: allocator.state("a") == "prepared", "prepared")
    faults = [each.code for _, report in allocator.reports for each in report.faults]
    assert "checkpoint_failed" in faults
    (tmp_path / "state" / "checkpoint.new").rmdir()
    await allocator.want()
    await until(lambda: allocator.state("a") == "ended", "ended")
    await until(
        lambda: (
            [
                each.open
                for _, report in allocator.reports
                for each in report.faults
                if each.code == "checkpoint_failed"
            ][-1]
            is False
        ),
        "the fault to close",
    )
    await running.stop()


def test_sigterm_ends_the_program_cleanly_and_bad_settings_exit_78(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    program = [sys.executable, "-m", "gpupool_agent"]
    flags = ["--node-id", "n1", "--allocators", "127.0.0.1:1", "--metrics-port", "0"]
    folders = ["--state-dir", str(tmp_path / "s"), "--socket", str(tmp_path / "agent.sock")]
    agent = subprocess.Popen(
        [*program, *flags, *folders, "--ready-file", str(ready)], stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(2000):
            if ready.exists():
                break
            try:
                agent.wait(0.01)
            except subprocess.TimeoutExpired:
                continue
        record = json.loads(ready.read_text())
        assert record["pid"] == agent.pid
        assert record["node_id"] == "n1"
        second = subprocess.run(
            [*program, *flags, *folders], capture_output=True, text=True, timeout=60, check=False
        )
        assert second.returncode == 1
        assert f"in use by the agent with pid {agent.pid}" in second.stderr
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(20) == 0
    finally:
        agent.kill()
        agent.wait()
    bad = subprocess.run(
        [*program, "--usage-period-s", "0"], capture_output=True, text=True, timeout=60, check=False
    )
    assert bad.returncode == 78
    assert "usage_period_s: 0.0 is not accepted, it must be 0.1..3600" in bad.stderr
