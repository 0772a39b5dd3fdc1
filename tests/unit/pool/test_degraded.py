"""Leases whose slices do not run as they should: shown, recorded, and told to their holders."""

from dataclasses import replace

from tests.core_world import World, part
from tests.played_node import PlayedNode, environment

from gpupool.model.assignment import AssignmentReport, AssignmentState, Report
from gpupool.model.ids import DeviceUuid
from gpupool.model.lease import Lease, LeaseState, ShareGiven


def said(node: PlayedNode, lease: Lease, *, degraded: str) -> Report:
    """What the node says of the lease's only member."""
    (assignment,) = [each for each in node.running.values() if each.key.lease_id == lease.lease_id]
    uuid = assignment.place.devices[0].device_uuid
    return Report(
        assignments=(
            AssignmentReport(
                key=assignment.key,
                token=assignment.token,
                state=AssignmentState.PREPARED,
                environment=environment(assignment),
                given=(ShareGiven(device_uuid=uuid, sm_count=13, share_milli_pct=9848),),
                degraded=degraded,
            ),
        )
    )


def test_a_degraded_slice_is_told_recorded_and_restored() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    lease = world.granted(part(10), follow=True)
    world.report(node, said(node, lease, degraded="its MPS daemon is gone"))
    world.report(node, said(node, lease, degraded="its MPS daemon is gone; repair failed"))
    told = world.now_lease(lease)
    assert told.state is LeaseState.ACTIVE
    assert told.degraded == "its MPS daemon is gone; repair failed"
    assert told.members[0].given[0].sm_count == 13
    world.report(node, said(node, lease, degraded=""))
    assert world.now_lease(lease).degraded == ""
    events = [each for each in world.history if each.kind in ("lease.degraded", "lease.restored")]
    assert [(each.kind, each.cause) for each in events] == [
        ("lease.degraded", "its MPS daemon is gone"),
        ("lease.restored", "its MPS daemon is gone; repair failed"),
    ]
    heard = [
        answer.degraded
        for answers in world.answers.values()
        for answer in answers
        if isinstance(answer, Lease) and answer.state is LeaseState.ACTIVE
    ]
    assert heard[-3:] == ["its MPS daemon is gone", "its MPS daemon is gone; repair failed", ""]


def test_what_a_node_said_of_a_member_goes_with_its_place() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    lease = world.granted(part(10))
    world.report(node, said(node, lease, degraded="its MPS daemon is gone"))
    world.release(lease)
    world.settle()
    ended = world.now_lease(lease)
    assert (ended.members[0].given, ended.members[0].degraded) == ((), "")


def test_nothing_new_goes_to_the_gpu_meanwhile() -> None:
    world = World()
    node = world.add_node("n1", gpus=2)
    lease = world.granted(part(10))
    uuid = DeviceUuid(lease.members[0].place.devices[0].device_uuid)
    node.dirty[uuid] = "its MPS daemon is gone"
    world.report_devices(node)
    other = world.granted(part(10))
    assert other.members[0].place.devices[0].device_uuid != uuid


def test_only_an_active_lease_is_degraded() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    lease = world.granted(part(10))
    world.report(node, said(node, lease, degraded="its MPS daemon is gone"))
    shown = world.now_lease(lease)
    assert replace(shown, state=LeaseState.RELEASING).degraded == ""
