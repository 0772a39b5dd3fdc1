"""What a node runs and the pool does not know is that node's own, whoever else claims it."""

from dataclasses import replace

import pytest
from tests.core_world import World, part, whole
from tests.played_node import PlayedNode
from tests.unit.pool.test_accounts import HOWS, events, foreign, speak

from gpupool.model.assignment import AssignmentKey
from gpupool.model.caller import Caller, Role
from gpupool.model.ids import CommandId, LeaseId
from gpupool.model.lease import Lease, LeaseState, MemberState
from gpupool.model.request import OnFailure
from gpupool_allocator.core.effects import Stored
from gpupool_allocator.core.events import EndUnclaimed


def listed(world: World) -> list[tuple[str, str, bool]]:
    return [(each.node_id, each.lease_id, each.ending) for each in world.pool.unclaimed()]


def end(world: World, node: PlayedNode, lease_id: str) -> None:
    world.handle(
        EndUnclaimed(
            command=CommandId(world.next_id()),
            caller=Caller(role=Role.OPERATOR),
            node_id=node.node_id,
            lease_id=LeaseId(lease_id),
        )
    )


@pytest.mark.parametrize("restarted", [False, True])
def test_two_nodes_that_claim_the_same_unknown_member_both_keep_it(restarted: bool) -> None:
    world = World()
    nodes = [world.add_node(name, gpus=1) for name in ("n1", "n2")]
    world.settle()
    for node in nodes:
        work = foreign(node, 0)
        node.running[work.key] = work
        assert world.account(node) == ["assignment.unclaimed"]
    if restarted:
        world.restart()
        for node in nodes:
            world.connect(node)
    world.settle()
    assert listed(world) == [("n1", "l-foreign", False), ("n2", "l-foreign", False)]
    assert all(foreign(node, 0).key in node.running for node in nodes)
    waiting = world.acquire(whole(1), wait_s=None)
    assert world.lease_of(waiting).state is LeaseState.PENDING
    end(world, nodes[1], "l-foreign")
    world.settle()
    assert listed(world) == [("n1", "l-foreign", False)]
    assert foreign(nodes[0], 0).key in nodes[0].running
    assert world.lease_of(waiting).members[0].place.node_id == "n2"
    assert world.account(nodes[0]) == []


def moved_to_n2(
    world: World,
) -> tuple[PlayedNode, PlayedNode, Lease, dict[tuple[str, str], Stored]]:
    """A lease whose member n1 refused, so that n2 runs it; the store as it was before that."""
    first, second = world.add_node("n1", gpus=1), world.add_node("n2", gpus=1)
    first.refuses = "no room"
    command = world.acquire(whole(1, on_failure=OnFailure.WAIT), follow=True, ttl_s=1e6)
    copy = world.store.copy()
    assert world.lease_of(command).members[0].place.node_id == "n1"
    world.settle()
    first.refuses = ""
    lease = world.lease_of(command)
    assert lease.members[0].place.node_id == "n2"
    return first, second, lease, copy


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_member_that_an_old_copy_has_elsewhere_is_kept_where_it_runs(
    order: tuple[int, int],
) -> None:
    world = World()
    first, second, lease, copy = moved_to_n2(world)
    key = AssignmentKey(lease_id=lease.lease_id, rank=0)
    world.store = copy
    world.restart(above=world.epoch)
    for number in order:
        world.connect((first, second)[number])
        world.settle()
    assert second.running[key].token == lease.members[0].token
    assert listed(world) == [("n2", lease.lease_id, False)]
    causes = [event.cause for event in events(world, "assignment.unclaimed")]
    assert causes == ["the store has the member elsewhere"]
    known = world.now_lease(lease)
    assert (known.state, known.members[0].place.node_id) == (LeaseState.ACTIVE, "n1")
    # Both hold their GPU, and neither ends with the other's.
    assert world.pool.summary().devices_free == 0
    second.failed.add(second.inventory.devices[0].uuid)
    world.report_devices(second)
    assert world.now_lease(lease) == known
    end(world, second, lease.lease_id)
    world.settle()
    assert (listed(world), second.running) == ([], {})
    assert world.now_lease(lease) == known
    assert key in first.running


def test_what_an_old_copy_has_still_waiting_is_kept_where_it_runs() -> None:
    world = World()
    node = world.add_node("n1", gpus=2)
    before = world.granted(whole(2))
    command = world.acquire(part(10), wait_s=None, ttl_s=1e6)
    copy = world.store.copy()
    world.release(before)
    world.settle()
    lease = world.lease_of(command)
    key = AssignmentKey(lease_id=lease.lease_id, rank=0)
    assert lease.state is LeaseState.ACTIVE
    copy.pop(("lease", before.lease_id))
    world.store = copy
    world.restart(above=world.epoch)
    world.connect(node)
    assert listed(world) == [("n1", lease.lease_id, False)]
    assert node.running[key].token == lease.members[0].token
    # Granted again on the same node, the later assignment of the member replaces it there.
    assert world.now_lease(lease).state is LeaseState.GRANTED
    world.settle()
    again = world.now_lease(lease)
    assert (again.state, listed(world)) == (LeaseState.ACTIVE, [])
    assert node.running[key].token == again.members[0].token > lease.members[0].token


def test_an_older_place_of_a_member_is_no_unknown_work() -> None:
    world = World()
    first, second, lease, _ = moved_to_n2(world)
    key = AssignmentKey(lease_id=lease.lease_id, rank=0)
    old = replace(second.running[key], token=lease.members[0].token - 1)
    first.running[key] = replace(old, place=replace(old.place, node_id=first.node_id, devices=()))
    world.restart()
    world.connect(second)
    world.connect(first)
    assert [event.subject for event in events(world, "assignment.unwanted")] == ["n1"]
    world.settle()
    assert (listed(world), first.running) == ([], {})
    assert world.now_lease(lease).members[0].state is MemberState.READY


def test_many_unknown_leases_on_one_gpu_are_told_of_once_each() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    world.settle()
    for number in range(200):
        work = foreign(node, 0, token=number + 1)
        work = replace(work, key=AssignmentKey(lease_id=LeaseId(f"l-{number}"), rank=0))
        node.running[work.key] = work
    assert world.account(node).count("assignment.unclaimed") == 200
    # One has the GPU; each of the others is said once to overlap it, however often told.
    assert len(events(world, "assignment.overlaps")) == 199
    world.account(node)
    assert len(events(world, "assignment.overlaps")) == 199
    assert len(world.pool.unclaimed(limit=1000)) == 200


@pytest.mark.parametrize("how", HOWS)
def test_a_node_takes_nothing_from_another_by_naming_its_gpus(how: str) -> None:
    world = World()
    liar, other = world.add_node("n1", gpus=1), world.add_node("n2", gpus=1)
    world.settle()
    work = foreign(other, 0)
    liar.running[work.key] = work
    speak(world, liar, how)
    (told,) = world.pool.unclaimed()
    assert told.node_id == "n1"
    assert len(events(world, "assignment.overlaps")) == 1
    lease = world.granted(whole(1), follow=True)
    assert {member.place.node_id for member in lease.members} <= {"n1", "n2"}
    second = world.granted(whole(1), follow=True)
    assert {lease.members[0].place.node_id, second.members[0].place.node_id} == {"n1", "n2"}
