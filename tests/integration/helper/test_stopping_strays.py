"""An agent with the real root helper ends processes of other users, and only those."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.agent_allocator import MemoryDriver, RunningAgent, TinyAllocator, until
from tests.agent_bench import assignment
from tests.integration.helper.running import Helper, running

from gpupool.model.assignment import Assignment, ProcessNote, ProcessNoteKind
from gpupool.model.ids import DeviceUuid
from gpupool.model.inventory import Device, StrayProcess
from gpupool.model.lease import DeviceShare
from gpupool_agent.core import stopping
from gpupool_agent.core.readings import DeviceUsage, DriverInventory, GpuProcess
from gpupool_agent.devices.helper_client import HelperClient
from gpupool_agent.devices.processes import ProcProcessTable

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be the helper")

TENANT_UID = 40963
SLEEP = ("sleep", "600")
STUBBORN = ("env", "--ignore-signal=TERM", *SLEEP)


class HelpersDriver(MemoryDriver):
    """The GPUs that the helper's driver has, as the agent reads them."""

    def __init__(self, helper: Helper) -> None:
        super().__init__()
        self._helper = helper

    def inventory(self) -> DriverInventory:
        self._enter()
        return DriverInventory(
            devices=tuple(
                Device(uuid=DeviceUuid(uuid), model="H100", memory_mib=80_000)
                for uuid in self._helper.gpus
            )
        )

    def usage(self) -> tuple[DeviceUsage, ...]:
        self._enter()
        listed = self._helper.node.processes.list()
        return tuple(
            DeviceUsage(
                uuid=DeviceUuid(uuid),
                processes=tuple(
                    GpuProcess(pid=each.pid, memory_mib=each.memory_mib)
                    for each in listed
                    if uuid in each.uuids
                ),
                memory_used_mib=sum(each.memory_mib for each in listed if uuid in each.uuids),
            )
            for uuid in self._helper.gpus
        )


class NotOurs(ProcProcessTable):
    """The processes of this host as an unprivileged agent has them: none is its own."""

    def signal(self, pid: int, start_ticks: int, number: int) -> str:
        return f"Operation not permitted: {number} to {pid}, {start_ticks}"


@pytest.fixture
def helper() -> Iterator[Helper]:
    with running() as started:
        yield started


@pytest.fixture
async def allocator() -> AsyncIterator[TinyAllocator]:
    tiny = TinyAllocator()
    await tiny.start()
    yield tiny
    await tiny.stop()


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "STOP_GRACE_S", 1.0)


@contextmanager
def tenant(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of another user; it sleeps unless told otherwise."""
    process = subprocess.Popen(
        command or SLEEP,
        env={"PATH": os.environ["PATH"], **environment},
        user=TENANT_UID,
        group=TENANT_UID,
        extra_groups=[],
        cwd="/",
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def agent(
    folder: Path, allocator: TinyAllocator, helper: Helper, client: HelperClient, **settings: Any
) -> RunningAgent:
    return RunningAgent(
        folder,
        f"127.0.0.1:{allocator.port}",
        driver=HelpersDriver(helper),
        privileged=client,
        processes=NotOurs(),
        **settings,
    )


@pytest.fixture
async def client(helper: Helper) -> AsyncIterator[HelperClient]:
    made = HelperClient(helper.socket)
    yield made
    await made.close()


def gpu_lease(lease: str, token: int, gpu: str) -> Assignment:
    share = DeviceShare(device_uuid=DeviceUuid(gpu), share_pct=100, memory_mib=80_000, whole=True)
    return assignment(lease, token, share, uid=TENANT_UID)


def notes(allocator: TinyAllocator) -> list[ProcessNote]:
    return [note for _, report in allocator.reports for note in report.process_notes]


def named(allocator: TinyAllocator, gpu: DeviceUuid) -> list[StrayProcess]:
    """Every stray that was ever told on a GPU."""
    hello = [each for told in allocator.hellos for each in told.devices]
    reports = [each for _, report in allocator.reports for each in report.devices]
    return [stray for each in [*hello, *reports] if each.uuid == gpu for stray in each.strays]


def ended_by_helper(helper: Helper, pid: int) -> list[tuple[int, str]]:
    """Signals that the helper was asked to send to a process, as its audit has them."""
    return [
        (line["arguments"]["number"], line["outcome"])
        for line in helper.audit()
        if line["action"] == "end_process" and line["arguments"]["pid"] == pid
    ]


async def test_a_trespasser_is_named_ended_through_the_helper_and_its_gpu_comes_back(
    helper: Helper, client: HelperClient, allocator: TinyAllocator, tmp_path: Path
) -> None:
    gpu = DeviceUuid(helper.gpus[0])
    with tenant() as trespasser:
        helper.list_on_gpu(trespasser.pid, gpu)
        ran = agent(tmp_path, allocator, helper, client, strays="stop")
        await until(lambda: named(allocator, gpu), "its name")
        stray = named(allocator, gpu)[0]
        assert (stray.pid, stray.uid) == (trespasser.pid, TENANT_UID)
        assert stray.command == "sleep 600"
        assert await asyncio.to_thread(trespasser.wait, 20) == -signal.SIGTERM
        await until(lambda: allocator.devices[gpu].clean, "a clean GPU")
    assert ended_by_helper(helper, trespasser.pid) == [(signal.SIGTERM, "done")]
    (note,) = notes(allocator)
    assert (note.kind, note.reason) == (ProcessNoteKind.STOPPED, "SIGTERM")
    await ran.stop()


async def test_one_that_does_not_go_is_killed_after_its_grace(
    helper: Helper, client: HelperClient, allocator: TinyAllocator, tmp_path: Path
) -> None:
    gpu = DeviceUuid(helper.gpus[0])
    with tenant(*STUBBORN) as trespasser:
        helper.list_on_gpu(trespasser.pid, gpu)
        ran = agent(tmp_path, allocator, helper, client, strays="stop")
        await allocator.want()
        assert await asyncio.to_thread(trespasser.wait, 20) == -signal.SIGKILL
        await until(lambda: allocator.devices[gpu].clean, "a clean GPU")
    signals = [number for number, _ in ended_by_helper(helper, trespasser.pid)]
    assert signals[0] == signal.SIGTERM
    assert set(signals[1:]) == {signal.SIGKILL}
    await ran.stop()


async def test_where_strays_are_reported_the_helper_is_never_asked(
    helper: Helper, client: HelperClient, allocator: TinyAllocator, tmp_path: Path
) -> None:
    gpu = DeviceUuid(helper.gpus[0])
    with tenant() as trespasser:
        helper.list_on_gpu(trespasser.pid, gpu)
        ran = agent(tmp_path, allocator, helper, client)
        await allocator.want()
        await until(lambda: named(allocator, gpu), "its name")
        calls = ran.driver.calls
        await until(lambda: ran.driver.calls > calls + 10, "more readings")
        assert trespasser.poll() is None
        assert ended_by_helper(helper, trespasser.pid) == []
        await ran.stop()


async def test_a_leases_own_process_is_ended_at_its_end_and_only_then(
    helper: Helper, client: HelperClient, allocator: TinyAllocator, tmp_path: Path
) -> None:
    gpu = DeviceUuid(helper.gpus[0])
    # Only root can read whose it is: the helper does.
    with tenant(*STUBBORN, GPUPOOL_LEASE_ID="l-a") as work:
        ran = agent(tmp_path, allocator, helper, client, strays="stop")
        await allocator.want(gpu_lease("l-a", 1, gpu))
        await until(lambda: allocator.state("l-a") == "prepared", "the lease")
        helper.list_on_gpu(work.pid, gpu)
        calls = ran.driver.calls
        await until(lambda: ran.driver.calls > calls + 10, "more readings")
        assert work.poll() is None
        assert allocator.devices[gpu].clean
        await allocator.want()
        assert await asyncio.to_thread(work.wait, 20) == -signal.SIGKILL
        await until(lambda: allocator.state("l-a") == "ended", "the end")
        await until(lambda: allocator.devices[gpu].clean, "a clean GPU")
    assert ended_by_helper(helper, work.pid)[0] == (signal.SIGTERM, "done")
    assert [(note.process.lease_id, note.reason) for note in notes(allocator)] == [
        ("l-a", "SIGKILL")
    ]
    await ran.stop()


async def test_while_the_helper_is_away_nothing_is_ended_and_then_it_is(
    helper: Helper,
    client: HelperClient,
    allocator: TinyAllocator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpupool_agent.privileges.CHECK_S", 0.1)
    gpu = DeviceUuid(helper.gpus[0])
    with tenant() as trespasser:
        helper.list_on_gpu(trespasser.pid, gpu)
        await asyncio.to_thread(helper.stop)
        ran = agent(tmp_path, allocator, helper, client, strays="stop")
        await until(lambda: named(allocator, gpu), "its name")
        calls = ran.driver.calls
        await until(lambda: ran.driver.calls > calls + 10, "more readings")
        assert trespasser.poll() is None
        await asyncio.to_thread(helper.start)
        assert await asyncio.to_thread(trespasser.wait, 20) == -signal.SIGTERM
        assert {number for number, _ in ended_by_helper(helper, trespasser.pid)} == {signal.SIGTERM}
        await ran.stop()
