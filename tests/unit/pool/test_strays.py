"""What nodes say of processes that should not be on their devices, as history and sums."""

from dataclasses import replace

import pytest
from tests.core_world import World, part
from tests.played_node import PlayedNode

from gpupool.model.assignment import ProcessNote, ProcessNoteKind, Report
from gpupool.model.event import Event
from gpupool.model.ids import DeviceUuid
from gpupool.model.inventory import StrayCause, StrayProcess

ADA = StrayProcess(
    pid=77,
    uid=1000,
    user="ada",
    command="python train.py",
    memory_mib=500,
    cause=StrayCause.NO_LEASE,
)


def world_with_node() -> tuple[World, PlayedNode, DeviceUuid]:
    world = World()
    node = world.add_node("n1", gpus=2)
    world.settle()
    return world, node, node.inventory.devices[0].uuid


def tell(world: World, node: PlayedNode, uuid: DeviceUuid, *strays: StrayProcess) -> None:
    reports = tuple(
        replace(report, clean=not strays, strays=strays)
        for report in node.device_reports()
        if report.uuid == uuid
    )
    world.report(node, Report(devices=reports))


def events(world: World, *kinds: str) -> list[Event]:
    return [event for event in world.history if event.kind in kinds]


def test_a_stray_is_an_event_when_it_comes_and_when_it_goes_and_not_in_between() -> None:
    world, node, uuid = world_with_node()
    tell(world, node, uuid, ADA)
    tell(world, node, uuid, replace(ADA, memory_mib=900))
    tell(world, node, uuid)
    came, went = events(world, "device.stray", "device.stray_gone")
    assert (came.kind, came.subject) == ("device.stray", uuid)
    assert came.cause == "process 77 of ada (python train.py) is on it and belongs to no lease"
    assert came.details["node_id"] == "n1"
    assert came.details["why"] == "no_lease"
    assert went.kind == "device.stray_gone"
    assert went.details["pid"] == "77"


def test_a_stray_that_has_become_another_kind_is_told_again() -> None:
    world, node, uuid = world_with_node()
    tell(world, node, uuid, ADA)
    tell(world, node, uuid, replace(ADA, cause=StrayCause.OUTLIVED, lease_id="l-1"))
    first, second = events(world, "device.stray")
    assert first.details["why"] == "no_lease"
    assert second.cause.endswith("although its lease has ended")
    assert second.details["lease_id"] == "l-1"


@pytest.mark.parametrize("cause", [*StrayCause, "", "of_a_later_release"])
def test_every_cause_can_be_told_and_those_that_are_not_known_too(cause: str) -> None:
    world, node, uuid = world_with_node()
    tell(world, node, uuid, replace(ADA, cause=cause))
    (came,) = events(world, "device.stray")
    assert "process 77 of ada (python train.py) is on it" in came.cause


def test_a_device_with_a_stray_is_not_offered_and_its_slices_go_on() -> None:
    world, node, _ = world_with_node()
    lease = world.granted(part(10))
    mine = lease.members[0].place.devices[0].device_uuid
    tell(world, node, mine, ADA)
    (view,) = [each for each in world.pool.devices() if each.device.uuid == mine]
    assert view.strays == (ADA,)
    node.dirty[mine] = "process 77 is on it"
    other = world.granted(part(10))
    assert other.members[0].place.devices[0].device_uuid != mine
    assert world.now_lease(lease).state == lease.state


def test_strays_are_summed_over_the_pool_until_they_are_gone() -> None:
    world, node, uuid = world_with_node()
    other = node.inventory.devices[1].uuid
    tell(world, node, uuid, ADA, replace(ADA, pid=78))
    tell(world, node, other, replace(ADA, pid=79))
    assert world.pool.summary().strays == 3
    tell(world, node, uuid)
    assert world.pool.summary().strays == 1
    tell(world, node, other)
    assert world.pool.summary().strays == 0


def test_what_was_done_to_processes_is_history_with_who_and_how() -> None:
    world, node, uuid = world_with_node()
    stopped = ProcessNote(
        kind=ProcessNoteKind.STOPPED, device_uuid=uuid, process=ADA, reason="SIGKILL"
    )
    adopted = ProcessNote(
        kind=ProcessNoteKind.ADOPTED,
        device_uuid=uuid,
        process=replace(ADA, cause="", lease_id="l-1"),
        actor="grace",
    )
    world.report(node, Report(process_notes=(stopped, adopted)))
    end, begin = events(world, "process.stopped", "process.adopted")
    assert end.subject == uuid
    assert end.cause == ("its node ended process 77 of ada (python train.py) on it by SIGKILL")
    assert begin.subject == "l-1"
    assert begin.cause == f"grace took process 77 of ada (python train.py) on {uuid} into it"
    assert begin.details["actor"] == "grace"
    assert begin.details["device_uuid"] == uuid
