"""The async SDK against a pool that speaks the real protocol."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.client.small_pool import SmallPool, socket_address, unclaimed

from gpupool import AsyncClient
from gpupool.errors import (
    GpupoolError,
    InvalidRequestError,
    LeaseEndedError,
    NoCapacityError,
    NotFoundError,
    UnavailableError,
    WrongStateError,
)
from gpupool.model.hold import HoldScope
from gpupool.model.ids import LeaseId
from gpupool.model.lease import ENDED, Lease, LeaseState


async def test_a_lease_is_active_inside_its_block_and_released_after_it(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        async with client.lease(gpus=1) as lease:
            assert lease.state is LeaseState.ACTIVE
            assert lease.env["CUDA_VISIBLE_DEVICES"] == "GPU-0"
            assert pool.state_of(lease.id) is LeaseState.ACTIVE
        assert pool.state_of(lease.id) is LeaseState.RELEASED


async def test_an_exception_in_the_block_releases_and_passes_on(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        with pytest.raises(ZeroDivisionError):
            async with client.lease(gpus=1) as lease:
                _ = 1 / 0
        assert pool.state_of(lease.id) is LeaseState.RELEASED


async def test_cancelling_the_block_releases(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:

        async def hold() -> None:
            async with client.lease(gpus=1):
                await asyncio.Event().wait()

        task = asyncio.create_task(hold())
        await pool.until(lambda: pool.leases)
        await pool.until(lambda: pool.state_of("lease-1") is LeaseState.ACTIVE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pool.until(lambda: pool.state_of("lease-1") in ENDED)


async def test_cancelling_a_request_that_waits_takes_it_out_of_the_queue(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        await client.acquire(gpus=2)
        waits = asyncio.create_task(client.acquire(gpus=1))
        await pool.until(lambda: len(pool.leases) == 2)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert pool.state_of("lease-2") is LeaseState.CANCELLED


async def test_cancelling_before_the_first_answer_leaves_nothing_held(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        pool.silent = True
        asked = asyncio.create_task(client.acquire(gpus=1))
        await pool.until(lambda: pool.acquires and pool.leases)
        pool.silent = False
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert pool.acquires[0] == pool.acquires[1]
        assert [lease.state for lease in pool.leases.values()] == [LeaseState.RELEASED]


async def test_what_does_not_fit_is_refused_with_counted_causes(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        with pytest.raises(NoCapacityError) as refused:
            await client.acquire(gpus=3, wait=0)
    assert refused.value.explanation is not None
    assert refused.value.explanation.causes[0].code == "gpu_busy"
    assert len(pool.acquires) == 1


async def test_a_waiting_request_tells_its_position_and_is_granted_later(pool: SmallPool) -> None:
    states: list[Lease] = []
    async with AsyncClient(pool.address) as client:
        first = await client.acquire(gpus=2)
        second = asyncio.create_task(client.acquire(gpus=1, on_change=states.append))
        await pool.until(lambda: len(pool.leases) == 2)
        await first.release()
        await second
    assert states[0].position == 1
    assert states[0].explanation.summary == "no GPU is free"
    assert states[-1].state is LeaseState.ACTIVE


async def test_a_cut_stream_is_retried_with_the_same_request_id(pool: SmallPool) -> None:
    pool.cut_acquires = 2
    async with AsyncClient(pool.address) as client, client.lease(gpus=1) as lease:
        assert lease.state is LeaseState.ACTIVE
        assert len(pool.acquires) == 3
        assert len(set(pool.acquires)) == 1
        assert len(pool.leases) == 1


async def test_an_outage_of_the_pool_during_the_wait_is_survived(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        first = await client.acquire(gpus=2)
        second = asyncio.create_task(client.acquire(gpus=1))
        await pool.until(lambda: len(pool.leases) == 2)
        await pool.stop()
        await pool.start(pool.address)
        await first.release()
        assert (await second).state is LeaseState.ACTIVE


async def test_nobody_there_is_said_with_the_address() -> None:
    async with AsyncClient("127.0.0.1:1", retry_s=0) as client:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            await client.acquire(gpus=1)


async def test_a_release_is_repeated_until_it_is_heard(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        lease = await client.acquire(gpus=1)
        pool.refuse_releases = 2
        await lease.release()
        assert pool.state_of(lease.id) is LeaseState.RELEASED
        await lease.release()


async def test_an_outage_is_told_once_and_a_lease_is_left_in_a_bounded_time(
    pool: SmallPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpupool.sdk.lease.LEAVE_S", 1.0)
    told: list[tuple[str, float]] = []

    def tell(error: GpupoolError, patience_s: float) -> None:
        told.append((error.message, patience_s))

    async with AsyncClient(pool.address, on_outage=tell) as client:
        async with asyncio.timeout(20), client.lease(gpus=1) as lease:
            await pool.stop()
        assert lease.state is LeaseState.ACTIVE
    ((message, patience_s),) = told
    assert f"no pool can be reached at {pool.address}" in message
    assert patience_s == 1.0


async def test_who_leaves_a_lease_of_a_pool_that_is_gone_can_be_interrupted(
    pool: SmallPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpupool.sdk.lease.LEAVE_S", 1000.0)
    outage = asyncio.Event()

    async def hold(client: AsyncClient) -> None:
        async with client.lease(gpus=1):
            await pool.stop()

    async with AsyncClient(pool.address, retry_s=1000, on_outage=lambda *_: outage.set()) as client:
        holds = asyncio.create_task(hold(client))
        async with asyncio.timeout(20):
            await outage.wait()
            holds.cancel()
            with pytest.raises(asyncio.CancelledError):
                await holds


async def test_all_leases_of_a_client_are_renewed_together(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        one = await client.acquire(gpus=1, ttl=60)
        two = await client.acquire(gpus=1, ttl="1s")
        await pool.until(lambda: pool.renewals.get(one.id, 0) >= 2)
        assert pool.renewals[two.id] >= 2


async def test_a_lease_that_the_pool_has_ended_is_lost(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        lease = await client.acquire(gpus=1, ttl=1)
        assert not lease.lost
        ended = replace(pool.leases[lease.id], state=LeaseState.EXPIRED)
        await pool.set(ended)
        async with asyncio.timeout(20):
            while not lease.lost:  # noqa: ASYNC110 - nobody tells, it is only to be seen
                await asyncio.sleep(0.01)


async def test_changes_follow_the_lease_over_an_outage_to_its_end(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        lease = await client.acquire(gpus=1)
        seen: list[LeaseState] = []
        async for state in lease.changes():
            seen.append(state.state)
            if len(seen) == 1:
                await pool.stop()
                await pool.start(pool.address)
                await pool.set(replace(pool.leases[lease.id], state=LeaseState.PREEMPTED))
        assert seen == [LeaseState.ACTIVE, LeaseState.PREEMPTED]
        assert lease.lost


async def test_a_callback_hears_of_the_end(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        ended = asyncio.Event()
        lease = await client.acquire(
            gpus=1, on_change=lambda now: ended.set() if now.state in ENDED else None
        )
        await pool.set(replace(pool.leases[lease.id], state=LeaseState.FAILED))
        async with asyncio.timeout(20):
            await ended.wait()


async def test_a_lease_that_fails_before_it_is_active_says_so(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        await client.acquire(gpus=2)
        asked = asyncio.create_task(client.acquire(gpus=1))
        await pool.until(lambda: len(pool.leases) == 2)
        failed = replace(pool.leases[LeaseId("lease-2")], state=LeaseState.FAILED)
        await pool.set(failed)
        with pytest.raises(LeaseEndedError, match="failed"):
            await asked


async def test_a_lease_bound_to_this_process_goes_through_the_agents_socket(
    tmp_path: Path,
) -> None:
    small = SmallPool()
    await small.start(socket_address(tmp_path))
    async with (
        AsyncClient(str(tmp_path / "agent.sock")) as client,
        client.lease(gpus=1, process=True) as lease,
    ):
        assert lease.current.ttl_s is None
        assert lease.current.process is not None
    await small.stop()


async def test_bad_input_is_refused_before_anything_is_sent(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        with pytest.raises(InvalidRequestError) as refused:
            await client.acquire(gpus=1, priority=5000)
    assert refused.value.field == "priority"
    assert pool.acquires == []


async def test_listings_go_over_all_pages(pool: SmallPool) -> None:
    pool.gpus = 5
    async with AsyncClient(pool.address) as client:
        for _ in range(5):
            await client.acquire(gpus=1)
        found = [lease.lease_id async for lease in client.list_leases()]
        assert found == [f"lease-{i}" for i in range(1, 6)]
        assert [node.node_id async for node in client.nodes()] == ["node-1"]
        assert len([device async for device in client.devices()]) == 5
        assert (await client.pool()).devices_used == 5


async def test_events_resume_where_they_were(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        await client.acquire(gpus=1)
        past = [event.sequence async for event in client.events()]
        assert past == list(range(1, len(pool.events) + 1))
        seen: list[int] = []
        async for event in client.events(after=1, follow=True):
            seen.append(event.sequence)
            if len(seen) == 1:
                await pool.stop()
                await pool.start(pool.address)
                await client.acquire(gpus=1)
            if len(seen) == 3:
                break
        assert seen == [2, 3, 4]


async def test_holds_come_and_go(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        hold = await client.add_hold(HoldScope.NODE, "node-1", "fan is loud")
        assert [found.reason async for found in client.holds()] == ["fan is loud"]
        await client.remove_hold(hold.hold_id)
        with pytest.raises(NotFoundError):
            await client.remove_hold(hold.hold_id)


async def test_unclaimed_work_is_listed_over_pages_and_ended_by_node_and_lease(
    pool: SmallPool,
) -> None:
    pool.unclaimed = [unclaimed(node, rank) for node in ("n1", "n2") for rank in range(2)]
    async with AsyncClient(pool.address) as client:
        assert [found async for found in client.unclaimed()] == pool.unclaimed
        await client.end_unclaimed("n1", "l-old")
        assert [found.node_id async for found in client.unclaimed()] == ["n2", "n2"]
        with pytest.raises(NotFoundError):
            await client.end_unclaimed("n1", "l-old")


async def test_a_dry_run_answers_and_changes_nothing(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        assert (await client.dry_run(gpus=1)).granted
        no = await client.dry_run(gpus=3, explain=True)
    assert not no.granted
    assert no.explanation.nearest_change == "wait for one GPU"
    assert no.verdicts[0].causes[0].code == "gpu_busy"
    assert pool.leases == {}


async def test_a_lease_not_acquired_has_no_environment(pool: SmallPool) -> None:
    async with AsyncClient(pool.address) as client:
        with pytest.raises(WrongStateError):
            _ = client.lease(gpus=1).env
