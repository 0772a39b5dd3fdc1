"""The allocator dies and comes back from its store; the store may refuse writes."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from tests.core_world import World, inventory, part, whole
from tests.played_node import PlayedNode

from gpupool.model.assignment import FaultReport, Report
from gpupool.model.errors import ErrorKind
from gpupool.model.ids import DeviceUuid, NodeId
from gpupool.model.lease import LeaseState
from gpupool.model.request import OnFailure
from gpupool_allocator.core.capacity import NodeCapacity
from gpupool_allocator.core.events import WritesAccepted, WritesRefused
from gpupool_allocator.core.index import ShapeIndex
from gpupool_allocator.core.settings import PoolSettings


def test_leases_live_through_a_restart_with_their_full_ttl() -> None:
    world = World()
    node = world.add_node("n1")
    lease = world.granted(whole(2), ttl_s=30.0)
    world.advance(29)
    world.restart()
    world.advance(29)
    world.connect(node)
    world.settle()
    again = world.now_lease(lease)
    assert again.state is LeaseState.ACTIVE
    assert again.members[0].place == lease.members[0].place
    assert again.members[0].environment == lease.members[0].environment
    world.advance(2)
    world.settle()
    assert world.now_lease(lease).state is LeaseState.EXPIRED


def test_nothing_is_offered_after_a_restart_until_its_node_has_spoken() -> None:
    world = World()
    node = world.add_node("n1")
    world.settle()
    world.restart()
    assert world.refused(world.acquire(whole(1))).kind is ErrorKind.NO_CAPACITY
    waiting = world.acquire(whole(1), wait_s=None)
    world.connect(node)
    world.settle()
    assert world.lease_of(waiting).state is LeaseState.ACTIVE


def test_a_restart_makes_the_shape_index_once_for_all_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not again with each lease that is put back: everything waits for the restart."""
    made: list[list[str]] = []
    refresh = ShapeIndex.refresh

    def counted(index: ShapeIndex, nodes: Iterable[NodeCapacity]) -> None:
        found = list(nodes)
        made.append([node.node_id for node in found])
        refresh(index, found)

    world = World()
    for name in ("n1", "n2", "n3"):
        world.add_node(name)
    for _ in range(4):
        world.granted(whole(2))
    monkeypatch.setattr(ShapeIndex, "refresh", counted)
    world.restart()
    world.pool.summary()
    assert made == [["n1", "n2", "n3"]]


def test_a_lease_that_was_ending_ends_after_the_restart() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    lease = world.granted(whole(1))
    world.release(lease)
    world.restart()
    assert world.now_lease(lease).state is LeaseState.RELEASING
    world.connect(node)
    world.settle()
    assert world.now_lease(lease).state is LeaseState.RELEASED
    assert world.pool.summary().devices_free == 1


def test_the_queue_keeps_its_order_over_a_restart() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    running = world.granted(whole(1))
    first = world.acquire(whole(1), wait_s=None, request_id="first")
    world.advance(1)
    world.acquire(whole(1), wait_s=None, request_id="second")
    world.restart()
    world.connect(node)
    again = world.acquire(whole(1), wait_s=None, request_id="first")
    assert world.lease_of(again).lease_id == world.lease_of(first).lease_id
    assert world.lease_of(again).position == 1
    world.release(running)
    world.settle()
    assert world.lease_of(again).state is LeaseState.ACTIVE


def test_tokens_grow_over_restarts() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    lease = world.granted(whole(1))
    world.release(lease)
    world.settle()
    world.restart()
    world.connect(node)
    assert world.granted(whole(1)).members[0].token > lease.members[0].token


def test_a_store_that_refuses_writes_leaves_renewals_and_reads() -> None:
    world = World()
    world.add_node("n1")
    lease = world.granted(whole(1), ttl_s=60.0)
    world.handle(WritesRefused(reason="disk full"))
    refused = world.refused(world.acquire(whole(1)))
    assert refused.kind is ErrorKind.UNAVAILABLE
    assert "disk full" in refused.message
    assert world.refused(world.release(lease)).kind is ErrorKind.UNAVAILABLE
    assert getattr(world.answers[world.keep_alive(lease)][-1], "gone", None) == ()
    assert world.pool.summary().read_only_reason == "disk full"
    world.advance(1000)
    assert world.now_lease(lease).state is LeaseState.ACTIVE
    world.handle(WritesAccepted())
    assert world.granted(whole(1)).state is LeaseState.ACTIVE


def test_nothing_is_written_while_the_store_refuses_and_nothing_is_lost() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    lease = world.granted(part(10))
    world.release(lease)
    world.handle(WritesRefused(reason="disk full"))
    before = dict(world.store), len(world.history)
    world.settle()
    assert (dict(world.store), len(world.history)) == before
    world.disconnect(node)
    world.handle(WritesAccepted())
    world.connect(node)
    world.settle()
    stored = world.store["lease", lease.lease_id]
    assert getattr(stored, "state", None) is LeaseState.RELEASED


def test_after_a_restart_the_lease_that_ended_first_is_forgotten_first() -> None:
    world = World()
    world.add_node("n1")
    first_made, last_made = world.granted(whole(1)), world.granted(whole(1))
    world.advance(1)
    for lease in (last_made, first_made):
        world.release(lease)
        world.settle()
        world.advance(1)
    world.settings = PoolSettings(ended_kept=1)
    world.restart()
    assert world.pool.lease(last_made.lease_id) is None
    assert world.now_lease(first_made).state is LeaseState.RELEASED


GPUS = [DeviceUuid(f"GPU-n1-{index}") for index in range(4)]


def in_trouble(world: World) -> tuple[PlayedNode, Report]:
    """A node with one GPU failed, one missing and one with a fault; what it says of them."""
    node = world.add_node("n1", gpus=4)
    world.settle()
    kept = tuple(device for device in node.inventory.devices if device.uuid != GPUS[1])
    node.inventory = replace(node.inventory, devices=kept)
    node.failed = {GPUS[0]}
    faults = (
        FaultReport(code="mps_failed", evidence="no answer", open=True, device_uuid=GPUS[2]),
        FaultReport(code="driver_silent", evidence="nothing for 5 s", open=True),
    )
    world.report(node, Report(inventory=node.inventory, devices=node.device_reports()))
    account = replace(node.account(world.epoch), faults=faults)
    world.report(node, account)
    kinds = [event.kind for event in world.history]
    assert kinds.count("fault.opened") == 2
    assert {"device.failed", "device.missing"} <= set(kinds)
    return node, account


def come_back(world: World, node: PlayedNode, account: Report) -> list[str]:
    """The allocator is killed, and the node says how it is; what history hears of devices."""
    world.restart()
    seen = len(world.history)
    world.connect(node)
    world.report(node, replace(account, devices=node.device_reports(), accepted_revision=0))
    world.settle()
    kinds = [event.kind for event in world.history[seen:]]
    return [kind for kind in kinds if kind.startswith(("device.", "fault."))]


def test_a_restart_says_nothing_again_of_devices_and_faults_that_did_not_change() -> None:
    world = World()
    node, account = in_trouble(world)
    store = world.store.copy()
    for _ in range(3):
        assert come_back(world, node, account) == []
        assert world.store == store
    assert world.pool.summary().devices_free == 2
    reasons = {view.device.uuid: view.reasons for view in world.pool.devices()}
    assert reasons[GPUS[0]] == ("failed",)
    assert reasons[GPUS[1]] == ("missing from its node",)


def test_what_changed_while_nobody_listened_is_said_once_after_a_restart() -> None:
    world = World()
    node, account = in_trouble(world)
    node.inventory = inventory("n1", 4)
    node.failed = {GPUS[3]}
    healed = replace(account, faults=account.faults[1:])
    assert sorted(come_back(world, node, healed)) == [
        "device.failed",
        "device.recovered",
        "device.returned",
        "fault.closed",
    ]
    assert come_back(world, node, healed) == []
    assert world.pool.summary().devices_free == 3


def test_a_lease_on_a_gpu_that_is_missed_is_kept_over_a_restart() -> None:
    world = World()
    node = world.add_node("n1", gpus=2)
    lease = world.granted(whole(2, on_failure=OnFailure.WAIT), ttl_s=1e6)
    node.inventory = inventory("n1", 1)
    world.report(node, Report(inventory=node.inventory, devices=node.device_reports()))
    world.restart()
    world.connect(node)
    world.settle()
    assert world.now_lease(lease).state is LeaseState.ACTIVE
    assert [view.lease_ids for view in world.pool.devices()] == [(lease.lease_id,)] * 2


def test_a_gpu_that_moved_is_on_its_new_node_after_a_restart() -> None:
    world = World()
    old = world.add_node("n1", gpus=1)
    world.settle()
    world.disconnect(old)
    other = PlayedNode(NodeId("n2"), inventory("n1", 1))
    world.nodes[other.node_id] = other
    stale = world.store["NodeRecord", "n1"]
    world.connect(other)
    world.restart()
    world.connect(other)
    lease = world.granted(whole(1), ttl_s=1e6)
    assert [view.node_id for view in world.pool.devices()] == ["n2"]
    # Release 0.1.0 left it in the records of both.
    world.store["NodeRecord", "n1"] = stale
    world.restart()
    world.connect(other)
    world.settle()
    assert [view.node_id for view in world.pool.devices()] == ["n2"]
    assert world.now_lease(lease).state is LeaseState.ACTIVE
    assert world.alarms == []
