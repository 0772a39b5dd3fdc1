"""Waiting: order, reasons, the head's reservation, backfill, and who is woken by what."""

from typing import Any

import pytest
from tests.core_world import World, whole

from gpupool.model.errors import ErrorKind
from gpupool.model.ids import CommandId, NodeId
from gpupool.model.lease import LeaseState
from gpupool.model.request import LeaseSpec
from gpupool_allocator.core import serving
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.capacity import NodeCapacity
from gpupool_allocator.core.placement import soonest
from gpupool_allocator.core.settings import PoolSettings


def test_requests_are_served_by_priority_then_arrival() -> None:
    world = World()
    world.add_node("n1", gpus=1)
    running = world.granted(whole(1))
    late = world.acquire(whole(1), wait_s=None)
    later = world.acquire(whole(1), wait_s=None)
    urgent = world.acquire(whole(1, priority=5), wait_s=None)
    order = []
    for _ in range(3):
        world.release(running)
        world.settle()
        running = next(
            world.lease_of(command)
            for command in (late, later, urgent)
            if command not in order and world.lease_of(command).state is LeaseState.ACTIVE
        )
        order.append(
            next(
                c
                for c in (late, later, urgent)
                if c in world.answers and world.lease_of(c).lease_id == running.lease_id
            )
        )
    assert order == [urgent, late, later]


def test_waiting_long_is_worth_priority() -> None:
    world = World(PoolSettings(aging_s=100.0))
    world.add_node("n1", gpus=1)
    running = world.granted(whole(1), ttl_s=10_000.0)
    patient = world.acquire(whole(1), wait_s=None)
    world.advance(150)
    urgent = world.acquire(whole(1, priority=1), wait_s=None)
    world.release(running)
    world.settle()
    assert world.lease_of(patient).state is LeaseState.ACTIVE
    assert world.lease_of(urgent).state is LeaseState.PENDING


def test_a_waiting_request_knows_its_position_and_its_counted_reason() -> None:
    world = World()
    world.add_node("n1", gpus=2)
    world.granted(whole(2))
    first = world.acquire(whole(1), wait_s=None)
    second = world.acquire(whole(2), wait_s=None)
    assert world.lease_of(first).position == 1
    lease = world.lease_of(second)
    assert lease.position == 2
    assert {(cause.code, cause.unit) for cause in lease.explanation.causes} == {
        ("gpu_busy", "node")
    }
    assert lease.explanation.summary


def test_a_request_is_refused_when_its_wait_is_over() -> None:
    world = World()
    world.add_node("n1", gpus=1)
    world.granted(whole(1), ttl_s=10_000.0)
    command = world.acquire(whole(1), wait_s=30.0)
    world.advance(29)
    assert command not in world.finished
    world.advance(2)
    refused = world.refused(command)
    assert refused.kind is ErrorKind.NO_CAPACITY
    assert "30 s" in refused.message
    assert world.pool.summary().waiting == 0


def test_a_request_whose_caller_is_gone_waits_for_its_ttl_and_no_longer() -> None:
    world = World()
    world.add_node("n1", gpus=1)
    world.granted(whole(1), ttl_s=10_000.0)
    command = world.acquire(whole(1), wait_s=None, ttl_s=60.0, request_id="mine")
    lease = world.lease_of(command)
    world.hang_up(command)
    world.advance(50)
    again = world.acquire(whole(1), wait_s=None, ttl_s=60.0, request_id="mine")
    assert world.lease_of(again).lease_id == lease.lease_id
    world.advance(100)
    assert world.now_lease(lease).state is LeaseState.PENDING
    world.hang_up(again)
    world.advance(61)
    assert world.now_lease(lease).state is LeaseState.CANCELLED


def test_the_head_of_the_queue_is_not_starved_by_small_requests() -> None:
    world = World()
    world.add_node("n1", gpus=4)
    small = [world.granted(whole(1), ttl_s=10_000.0) for _ in range(4)]
    big = world.acquire(whole(4), wait_s=None)
    for lease in small:
        world.release(lease)
        world.settle()
        # Each freed GPU is asked for at once by somebody smaller, in vain.
        refused = world.acquire(whole(1))
        if world.lease_of(big).state is LeaseState.PENDING:
            assert world.refused(refused).kind is ErrorKind.NO_CAPACITY
    world.settle()
    assert world.lease_of(big).state is LeaseState.ACTIVE


def test_others_are_placed_outside_the_head_s_places() -> None:
    world = World()
    world.add_node("n1", gpus=8)
    world.add_node("n2", gpus=2)
    world.granted(whole(4), ttl_s=10_000.0)
    world.acquire(whole(8), wait_s=None)
    assert [hold.target for hold in world.pool.holds()] == ["n1"]
    lease = world.granted(whole(1))
    assert lease.members[0].place.node_id == "n2"


def test_a_short_request_may_run_inside_the_head_s_places_when_it_ends_in_time() -> None:
    world = World()
    world.add_node("n1", gpus=8)
    world.granted(whole(4, max_duration_s=1000.0), ttl_s=10_000.0)
    world.acquire(whole(8), wait_s=None)
    short = world.granted(whole(1, max_duration_s=500.0))
    assert short.state is LeaseState.ACTIVE
    assert world.refused(world.acquire(whole(1, max_duration_s=5000.0)))
    assert world.refused(world.acquire(whole(1)))


def test_releasing_a_waiting_request_takes_it_out_and_frees_its_places() -> None:
    world = World()
    world.add_node("n1", gpus=2)
    world.granted(whole(1), ttl_s=10_000.0)
    head = world.acquire(whole(2), wait_s=None)
    behind = world.acquire(whole(1), wait_s=None)
    assert world.lease_of(behind).state is LeaseState.PENDING
    world.release(world.lease_of(head))
    world.settle()
    assert world.lease_of(head).state is LeaseState.CANCELLED
    assert world.lease_of(behind).state is LeaseState.ACTIVE
    assert world.pool.holds() == []


def test_the_queue_is_bounded() -> None:
    world = World(PoolSettings(queue_max=3))
    world.add_node("n1", gpus=1)
    world.granted(whole(1))
    for _ in range(3):
        world.acquire(whole(1), wait_s=None)
    refused = world.refused(world.acquire(whole(1), wait_s=None))
    assert refused.kind is ErrorKind.NO_CAPACITY
    assert refused.retry_after_s is not None


def test_no_number_of_hopeless_requests_keeps_a_feasible_one_waiting() -> None:
    """C82: only changes that can matter wake a request."""
    world = World()
    node = world.add_node("n1", gpus=2)
    world.settle()
    hopeless = [world.acquire(whole(1, models=("no-such-gpu",)), wait_s=None) for _ in range(500)]
    tried_before = len(world.answers[hopeless[0]])
    for _ in range(60):
        world.advance(1.0)
        world.report_devices(node)
    assert len(world.answers[hopeless[0]]) == tried_before
    feasible = world.granted(whole(1), wait_s=None)
    assert feasible.state is LeaseState.ACTIVE


def test_two_gangs_that_need_everything_never_share_it() -> None:
    """C32, in the core: one runs complete, the other holds nothing and says why it waits."""
    world = World()
    for number in range(100):
        world.add_node(f"n{number:03}", gpus=1)
    first = world.acquire(whole(1, replicas=100), wait_s=None)
    second = world.acquire(whole(1, replicas=100), wait_s=None)
    world.settle()
    assert world.lease_of(first).state is LeaseState.ACTIVE
    waiting = world.lease_of(second)
    assert waiting.state is LeaseState.PENDING
    assert waiting.members == ()
    assert waiting.position == 1
    assert waiting.explanation.causes
    world.release(world.lease_of(first))
    world.settle()
    assert world.lease_of(second).state is LeaseState.ACTIVE


def test_an_arrival_is_no_news_to_those_who_wait_before_it() -> None:
    world = World()
    world.add_node("n1", gpus=1)
    world.granted(whole(1))
    first = world.acquire(whole(1), wait_s=None)
    told = len(world.answers[first])
    for _ in range(20):
        world.acquire(whole(1), wait_s=None)
    assert len(world.answers[first]) == told


def a_long_queue(world: World, length: int = 500) -> list[CommandId]:
    """Requests that wait behind a full pool; the first has places kept for it."""
    world.add_node("n1", gpus=8)
    world.granted(whole(8), ttl_s=1e6)
    waiting = [world.acquire(whole(1), wait_s=None) for _ in range(length)]
    assert world.pool.holds()
    return waiting


def test_who_leaves_behind_the_head_does_not_make_its_places_chosen_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    waiting = a_long_queue(world)
    looked: list[LeaseSpec] = []

    def counted(books: Books, spec: LeaseSpec, *rest: Any) -> tuple[float, tuple[NodeId, ...]]:
        looked.append(spec)
        return soonest(books, spec, *rest)

    monkeypatch.setattr(serving, "soonest", counted)
    kept = world.pool.holds()
    for place in (499, 300, 7, 2, 1):
        world.release(world.lease_of(waiting[place]))
    assert (looked, world.pool.holds()) == ([], kept)
    world.acquire(whole(1), wait_s=None)
    assert looked == []
    # One that goes before the head, and the head that goes, are asked about once each.
    urgent = world.acquire(whole(2, priority=5), wait_s=None)
    assert len(looked) == 1
    assert world.pool.holds()[0].reason.endswith(world.lease_of(urgent).lease_id)
    world.release(world.lease_of(urgent))
    assert len(looked) == 2
    assert world.pool.holds() == kept


def test_a_queue_that_moves_tells_the_first_each_step_and_the_others_some() -> None:
    world = World()
    waiting = a_long_queue(world, 120)
    answers = sum(map(len, world.answers.values()))
    world.release(world.lease_of(waiting[0]))
    told = sum(map(len, world.answers.values())) - answers
    # The end of one, its call's last word, ten that hear each step, one that came in range.
    assert told <= 2 + 10 + 1 + 2
    for command in waiting[1:60]:
        world.release(world.lease_of(command))
        last = [world.lease_of(each) for each in waiting if each not in world.finished]
        shown = [lease.position for lease in last[:100]]
        assert shown[:10] == list(range(1, 11))
        assert all(abs(tell - truth) <= 0.1 * tell + 1 for truth, tell in enumerate(shown, 1))


def test_soonest_copies_each_node_once_for_a_request_of_one_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    for number in range(20):
        world.add_node(f"n{number:02}", gpus=2)
    world.granted(whole(2, replicas=20), ttl_s=1e6)
    copies: list[str] = []
    copy = NodeCapacity.copy

    def counted(node: NodeCapacity) -> NodeCapacity:
        copies.append(node.node_id)
        return copy(node)

    monkeypatch.setattr(NodeCapacity, "copy", counted)
    world.pool.check = lambda: None  # type: ignore[method-assign] # it copies nodes too
    world.acquire(whole(2, replicas=3), wait_s=None)
    assert sorted(copies) == [f"n{number:02}" for number in range(20)]
