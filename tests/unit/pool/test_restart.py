"""The allocator dies and comes back from its store; the store may refuse writes."""

from collections.abc import Iterable

import pytest
from tests.core_world import World, part, whole

from gpupool.model.errors import ErrorKind
from gpupool.model.lease import LeaseState
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
