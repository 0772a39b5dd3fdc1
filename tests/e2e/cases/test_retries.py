"""C70: a request id is one lease, however often and over whichever connection it is asked."""

from pathlib import Path

import grpc
import pytest
from tests.e2e.pool_fixture import (
    ACTIVE,
    PENDING,
    Pool,
    custom,
    details_of,
    eventually,
    lease_devices,
    running_pool,
    whole,
)

from gpupool.v1 import resources_pb2


def _what_is_held(lease: resources_pb2.Lease) -> tuple[object, ...]:
    """Everything that would differ between two grants."""
    places = [(m.token, m.place.node_id, *lease_devices(lease)) for m in lease.members]
    return (lease.lease_id, lease.generation, *places)


def _assert_one_gpu_is_used(pool: Pool) -> None:
    assert pool.summary().devices_used == 1
    assert len(pool.leases()) == 1
    assert len(pool.events("lease.granted")) == 1
    assert [len(each) for each in pool.fleet.running().values()].count(1) == 1


def _lose_the_answer(pool: Pool) -> None:
    """A call that took effect, and whose caller is gone before it read a word."""
    connection = pool.connect()
    unread = connection.ask("only-once", whole(1))
    eventually("the grant to take effect", lambda: pool.leases(ACTIVE))
    unread.cancel()


def test_c70_a_lost_answer_and_three_retries_over_two_connections_are_one_lease(
    tmp_path: Path,
) -> None:
    """C70: same request id, same lease, same answer each time; the books stay right."""
    with running_pool(tmp_path, custom("n1", gpus=2), custom("n2", gpus=2)) as pool:
        _lose_the_answer(pool)
        one, two = pool.connect(), pool.connect()
        answers = [calls.acquire("only-once", whole(1)) for calls in (one, two, one)]
        assert {_what_is_held(answer) for answer in answers} == {_what_is_held(answers[0])}
        assert all(answer.state == ACTIVE for answer in answers)
        assert all(answer.members[0].environment for answer in answers)
        _assert_one_gpu_is_used(pool)


def test_c70_retries_find_the_lease_after_the_allocator_was_killed(tmp_path: Path) -> None:
    """C70: what took effect is on disk, so that a retry after kill -9 gets the same answer."""
    with running_pool(tmp_path, custom("n1", gpus=2), custom("n2", gpus=2)) as pool:
        _lose_the_answer(pool)
        (before,) = pool.leases()
        pool.restart_allocator()
        pool.until_offered(pool.fleet)
        one, two = pool.connect(), pool.connect()
        answers = [calls.acquire("only-once", whole(1)) for calls in (one, two, one)]
        assert {_what_is_held(answer) for answer in answers} == {_what_is_held(before)}
        _assert_one_gpu_is_used(pool)
        pool.calls.release(before.lease_id)
        late = pool.calls.acquire("only-once", whole(1))
        assert late.lease_id == before.lease_id
        assert late.state not in (PENDING, ACTIVE), "a late retry asked for it anew"


def test_c70_three_retries_at_once_are_one_place_in_the_queue(tmp_path: Path) -> None:
    """C70: also a request that still waits is found, before and after kill -9."""
    with running_pool(tmp_path, custom("n1")) as pool:
        holder = pool.calls.acquire("holder", whole(1))
        waiting = [pool.connect().waits("waiting", whole(1)) for _ in range(3)]
        assert len({lease.lease_id for lease in waiting}) == 1
        assert pool.summary().waiting == 1
        pool.restart_allocator()
        again = pool.calls.waits("waiting", whole(1))
        assert (again.lease_id, again.position) == (waiting[0].lease_id, 1)
        pool.calls.release(holder.lease_id)
        eventually("the grant", lambda: pool.calls.get(again.lease_id).state == ACTIVE)
        assert pool.calls.acquire("waiting", whole(1)).lease_id == again.lease_id


def test_c70_an_id_that_is_used_for_something_else_is_a_conflict(tmp_path: Path) -> None:
    """C70: the key is for retries; another request under it is refused, not mixed up."""
    with running_pool(tmp_path, custom("n1", gpus=4)) as pool:
        made = pool.calls.acquire("mine", whole(1))
        with pytest.raises(grpc.RpcError) as refused:
            pool.calls.acquire("mine", whole(2))
        assert "request_id" in details_of(refused.value)
        assert pool.calls.acquire("mine", whole(1)).lease_id == made.lease_id
        assert pool.summary().devices_used == 1
