"""The agent's core over restarts, reboots, partitions, and drivers that fail."""

import pytest
from tests.agent_bench import (
    Bench,
    assignment,
    gpu,
    holder,
    inventory,
    key,
    last_report,
    part,
    process,
    welcome,
    whole,
)

from gpupool.model.assignment import AssignmentState
from gpupool_agent.core.devices import ABSENT_KEPT_S
from gpupool_agent.core.events import (
    CleanUp,
    Disconnected,
    DriverSilent,
    InventoryRead,
    Log,
    Prepare,
    SendReport,
    StepDone,
    StopProcess,
    WatchHolder,
)
from gpupool_agent.core.readings import DriverInventory, FailedDevice


def test_a_restart_in_the_same_boot_adopts_what_runs_without_a_visible_change() -> None:
    before = Bench(0, 1)
    before.desire(3, assignment("a", 1, whole(0)), holders=(holder("a", 50),))
    after = Bench(0, 1, checkpoint=before.checkpoint, connect=False, now=before.now + 5)
    assert [type(each) for each in after.effects if not isinstance(each, SendReport)] == [
        WatchHolder,
        Prepare,
    ]
    (report,) = after.node.assignments()
    assert report.state is AssignmentState.PREPARED
    assert report.environment == before.node.assignments()[0].environment
    assert after.node.hello(agent_version="1", agent_instance_id="x").highest_epoch == 1
    after.send(welcome())
    after.take()
    after.desire(3, assignment("a", 1, whole(0)), holders=(holder("a", 50),))
    assert after.take() == []


def test_after_a_reboot_nothing_runs_holders_are_gone_and_the_wanted_is_prepared_anew() -> None:
    before = Bench(0, 1)
    before.desire(
        3,
        assignment("a", 1, whole(0)),
        assignment("b", 2, whole(1)),
        holders=(holder("b", 50),),
    )
    after = Bench(0, 1, checkpoint=before.checkpoint, boot="boot-2", connect=False, now=10.0)
    assert after.states() == {}
    after.send(welcome())
    full = after.reports()[0].report
    assert [(end.lease_id, end.pid, end.reason) for end in full.ended_holders] == [
        ("b", 50, "reboot")
    ]
    after.desire(4, assignment("a", 1, whole(0)))
    assert after.states() == {("a", 1): "prepared"}
    after.desire(5, assignment("a", 1, whole(0)), assignment("b", 2, whole(1)))
    assert after.states() == {("a", 1): "prepared"}
    assert last_report(after, "b").state is AssignmentState.ENDED


def test_a_preparation_cut_by_a_crash_is_done_again_or_rolled_back() -> None:
    before = Bench(0)
    before.answers = False
    before.desire(1, assignment("a", 1, part(0, 10)))
    wanted = Bench(0, checkpoint=before.checkpoint)
    wanted.desire(1, assignment("a", 1, part(0, 10)))
    assert wanted.states() == {("a", 1): "prepared"}
    dropped = Bench(0, checkpoint=before.checkpoint)
    dropped.desire(2)
    assert dropped.states() == {}
    assert any(isinstance(each, CleanUp) for each in dropped.effects)


def test_a_cut_off_node_goes_on_until_its_own_clock_ends_the_assignment() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0), disconnect_s=600))
    bench.processes[gpu(0)] = [process(50, lease="a")]
    bench.read()
    bench.send(Disconnected())
    bench.wait(530)
    assert bench.states() == {("a", 1): "prepared"}
    bench.take()
    bench.wait(65)
    assert [each.event for each in bench.take() if isinstance(each, Log)] == ["assignment.warned"]
    bench.wait(6)
    stops = [each for each in bench.take() if isinstance(each, StopProcess)]
    assert [(each.pid, each.force) for each in stops] == [(50, False)]
    bench.wait(11)
    stops = [each for each in bench.take() if isinstance(each, StopProcess)]
    assert [(each.pid, each.force) for each in stops] == [(50, True)]
    bench.processes[gpu(0)] = []
    bench.wait(5)
    assert bench.states() == {}
    bench.send(welcome(epoch=2))
    bench.desire(1, assignment("a", 1, whole(0), disconnect_s=600), epoch=2)
    assert bench.states() == {}


@pytest.mark.parametrize("restarted", [False, True])
def test_what_ended_out_of_time_is_told_with_that_cause_and_not_with_the_last_of_its_rest(
    restarted: bool,
) -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0), disconnect_s=600))
    bench.processes[gpu(0)] = [process(50, lease="a")]
    bench.read()
    bench.send(Disconnected())
    bench.wait(605)
    (ending,) = bench.node.assignments()
    assert (ending.state, "is still on it" in ending.reason) == (AssignmentState.ENDING, True)
    if restarted:
        bench = Bench(0, checkpoint=bench.checkpoint, connect=False, now=bench.now)
    bench.processes[gpu(0)] = []
    bench.wait(10)
    (ended,) = bench.node.hello(agent_version="1", agent_instance_id="x").assignments
    assert (ended.state, ended.reason) == (AssignmentState.ENDED, "no allocator for 600 s")


def test_the_time_without_an_allocator_goes_on_over_an_agent_restart() -> None:
    before = Bench(0)
    before.desire(1, assignment("a", 1, whole(0), disconnect_s=600))
    before.send(Disconnected())
    before.wait(500)
    after = Bench(0, checkpoint=before.checkpoint, connect=False, now=before.now)
    after.wait(101)
    assert after.states() == {}


def test_a_reconnect_in_time_leaves_everything_as_it_is() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0), disconnect_s=600))
    bench.send(Disconnected())
    bench.wait(590)
    bench.send(welcome())
    bench.wait(10_000)
    assert bench.states() == {("a", 1): "prepared"}


def test_unclaimed_assignments_are_kept() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)))
    bench.send(welcome(epoch=2))
    bench.desire(1, epoch=2, unclaimed=(key("a"),))
    assert bench.states() == {("a", 1): "prepared"}
    bench.desire(2, epoch=2)
    assert bench.states() == {}


def test_a_silent_driver_fails_every_device_and_a_reading_brings_them_back() -> None:
    bench = Bench(0, 1)
    bench.desire(1, assignment("a", 1, whole(0)))
    bench.take()
    bench.send(DriverSilent(code="nvml_hang", reason="no answer for 5 s"))
    report = bench.reports()[-1].report
    assert {(each.uuid, each.failed, each.reason) for each in report.devices} == {
        ("GPU-0", True, "no answer for 5 s"),
        ("GPU-1", True, "no answer for 5 s"),
    }
    assert [(each.code, each.open) for each in report.faults] == [("nvml_hang", True)]
    assert bench.states() == {("a", 1): "prepared"}
    bench.read()
    report = bench.reports()[-1].report
    assert all(each.clean for each in report.devices)
    assert [(each.code, each.open) for each in report.faults] == [("nvml_hang", False)]


def test_nothing_is_confirmed_ended_while_the_driver_is_silent() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)))
    bench.answers = False
    bench.send(DriverSilent(code="nvml_hang", reason="no answer"))
    bench.desire(2)
    bench.send(StepDone(key=key("a"), token=1))
    bench.wait(60)
    assert bench.states() == {("a", 1): "ending"}


def test_a_lost_device_is_reported_as_failed_and_confirms_the_end_of_its_assignment() -> None:
    bench = Bench(0, 1)
    bench.desire(1, assignment("a", 1, whole(0)))
    lost = FailedDevice(uuid=gpu(0), code="gpu_lost", reason="the driver has lost it")
    bench.send(
        InventoryRead(inventory=DriverInventory(devices=inventory(0, 1).devices, failed=(lost,)))
    )
    report = bench.reports()[-1].report
    assert [(each.code, each.device_uuid) for each in report.faults] == [("gpu_lost", "GPU-0")]
    bench.answers = False
    bench.desire(2)
    bench.send(StepDone(key=key("a"), token=1))
    assert bench.states() == {}
    assert bench.node.devices()[0].failed


def test_an_absent_device_is_listed_as_failed_for_a_while_and_then_forgotten() -> None:
    bench = Bench(0, 1, 2)
    bench.send(InventoryRead(inventory=inventory(0, 2)))
    assert [each.uuid for each in bench.node.devices() if each.failed] == ["GPU-1"]
    bench.wait(ABSENT_KEPT_S + 1)
    assert [each.uuid for each in bench.node.devices()] == ["GPU-0", "GPU-2"]
    bench.send(InventoryRead(inventory=inventory(0, 1, 2)))
    assert [each.uuid for each in bench.node.devices()] == ["GPU-0", "GPU-1", "GPU-2"]


def test_a_hot_added_device_is_reported_without_a_restart() -> None:
    bench = Bench(0)
    bench.take()
    bench.numbers = (0, 1)
    bench.send(InventoryRead(inventory=inventory(0, 1)))
    bench.read()
    told = [each.report for each in bench.reports()]
    assert [device.uuid for device in (told[0].inventory or inventory()).devices] == [
        "GPU-0",
        "GPU-1",
    ]
    assert [(each.uuid, each.clean) for each in told[-1].devices] == [("GPU-1", True)]


def test_what_ended_while_nobody_listened_is_said_at_the_next_connection() -> None:
    """Else the allocator would take it for lost, and have it prepared again."""
    bench = Bench(0, 1)
    bench.desire(1, assignment("a", 1, whole(0), disconnect_s=600))
    bench.send(Disconnected())
    bench.wait(700)
    bench.read()
    assert bench.node.assignments() == ()
    hello = bench.node.hello(agent_version="1", agent_instance_id="x")
    assert [(each.key.lease_id, each.state) for each in hello.assignments] == [
        ("a", AssignmentState.ENDED)
    ]
