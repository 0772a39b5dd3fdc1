"""An agent with and without its root helper: whose processes are, ending them, saying so."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
import structlog
from tests.agent_allocator import RunningAgent, until

from gpupool.model.ids import DeviceUuid
from gpupool_agent.core.events import NodeEvent, NodeFault, StopProcess
from gpupool_agent.core.readings import DeviceProcess, DeviceState
from gpupool_agent.devices.helper_client import NoHelper
from gpupool_agent.devices.privileged import NotPermittedError, PrivilegedError
from gpupool_agent.devices.processes import ProcProcessTable
from gpupool_agent.privileges import Privileges

GPU = DeviceUuid("GPU-0")


class PlayedHelper(NoHelper):
    """Answers what the agent asks for here."""

    def __init__(self) -> None:
        self.there = True
        self.hangs = False
        self.asked: list[int] = []
        self.ended: list[tuple[Any, ...]] = []
        self.looks = 0

    async def cdi_leases(self) -> tuple[Any, ...]:
        self.looks += 1
        if not self.there:
            raise NotPermittedError("no root helper answers")
        return ()

    async def lease_of(self, gpu: DeviceUuid, pid: int, start_ticks: int) -> str:
        assert (gpu, start_ticks in (1, 2)) == (GPU, True)
        self.asked.append(pid)
        if self.hangs:
            await asyncio.Event().wait()
        if pid == 13:
            raise PrivilegedError("process 13 is gone")
        return f"l-{pid}"

    async def end_process(self, gpu: DeviceUuid, pid: int, start_ticks: int, number: int) -> None:
        self.ended.append((gpu, pid, start_ticks, number))


def device(*processes: DeviceProcess) -> tuple[DeviceState, ...]:
    return (DeviceState(uuid=GPU, processes=processes, memory_used_mib=1),)


def process(pid: int, lease_id: str | None = None, start_ticks: int = 1) -> DeviceProcess:
    return DeviceProcess(pid=pid, start_ticks=start_ticks, uid=1000, lease_id=lease_id)


def leases(devices: tuple[DeviceState, ...]) -> list[str | None]:
    return [each.lease_id for each in devices[0].processes or ()]


async def test_leases_that_only_root_can_read_are_filled_in_and_asked_for_once() -> None:
    helper = PlayedHelper()
    privileges = Privileges(helper, lambda _: None)
    for _ in range(2):
        found = await privileges.with_leases(device(process(7), process(8, "l-x"), process(9, "")))
        assert leases(found) == ["l-7", "l-x", ""]
    assert helper.asked == [7]
    # The same pid with another start is another process.
    assert leases(await privileges.with_leases(device(process(7, start_ticks=2)))) == ["l-7"]
    assert helper.asked == [7, 7]


async def test_what_cannot_be_told_stays_unknown_and_is_asked_again() -> None:
    helper = PlayedHelper()
    privileges = Privileges(helper, lambda _: None)
    for _ in range(2):
        found = await privileges.with_leases(device(process(13), process(7)))
        assert leases(found) == [None, "l-7"]
    assert helper.asked == [13, 7, 13]


async def test_a_helper_that_hangs_holds_up_no_report_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpupool_agent.privileges.READ_S", 0.05)
    helper = PlayedHelper()
    helper.hangs = True
    privileges = Privileges(helper, lambda _: None)
    async with asyncio.timeout(10):
        assert leases(await privileges.with_leases(device(process(7)))) == [None]


async def test_an_agent_says_once_that_it_only_reads_and_once_that_it_no_longer_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpupool_agent.privileges.CHECK_S", 0.01)
    helper = PlayedHelper()
    helper.there = False
    events: list[NodeEvent] = []
    with structlog.testing.capture_logs() as lines:
        privileges = Privileges(helper, events.append)
        watching = asyncio.create_task(privileges.watch())
        await until(lambda: privileges.missing, "the missing helper")
        await until(lambda: helper.looks >= 4, "more looks")
        helper.there = True
        await until(lambda: not privileges.missing, "the helper")
        seen = helper.looks
        await until(lambda: helper.looks >= seen + 3, "more looks")
        watching.cancel()
    assert [line["event"] for line in lines] == ["agent.read_only", "agent.helper_found"]
    assert "reset GPUs" in lines[0]["cannot"]
    assert [(each.code, each.open) for each in events if isinstance(each, NodeFault)] == [
        ("no_root_helper", True),
        ("no_root_helper", False),
    ]


async def test_an_agent_that_was_told_to_have_none_says_how_to_get_one() -> None:
    events: list[NodeEvent] = []
    privileges = Privileges(NoHelper(), events.append)
    watching = asyncio.create_task(privileges.watch())
    await until(lambda: events, "the fault")
    watching.cancel()
    assert "docs/install.md" in privileges.missing
    # It does not ask what is sure to be refused.
    assert leases(await privileges.with_leases(device(process(7)))) == [None]


async def test_a_machine_that_needs_no_root_is_told_nothing() -> None:
    events: list[NodeEvent] = []
    privileges = Privileges(None, events.append)
    await privileges.watch()
    assert events == []


async def test_ending_a_process_gives_the_reason_where_it_is_refused() -> None:
    helper = PlayedHelper()
    assert await Privileges(helper, lambda _: None).end_process(GPU, 7, 1, 15) == ""
    assert helper.ended == [(GPU, 7, 1, 15)]
    why = await Privileges(NoHelper(), lambda _: None).end_process(GPU, 7, 1, 15)
    assert "cannot end other users' processes" in why


class ForbiddenTable(ProcProcessTable):
    """The processes of this host, of which none may be signalled."""

    def signal(self, pid: int, start_ticks: int, number: int) -> str:
        return f"Operation not permitted: {pid}, {start_ticks}, {number}"


async def test_an_agent_ends_a_process_that_is_not_its_own_through_its_helper(
    tmp_path: Path,
) -> None:
    helper = PlayedHelper()
    running = RunningAgent(tmp_path, processes=ForbiddenTable(), privileged=helper)
    running.agent._perform(StopProcess(pid=7, start_ticks=1, force=True, gpu=GPU))
    await until(lambda: helper.ended, "the helper to be asked")
    assert helper.ended == [(GPU, 7, 1, signal.SIGKILL)]
    await running.stop()
