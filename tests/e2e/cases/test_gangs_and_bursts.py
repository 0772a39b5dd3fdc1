"""Many requests at once: gangs hold all or nothing, bursts fill a GPU and no more."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import psutil
from tests.e2e.pool_fixture import (
    ACTIVE,
    PENDING,
    Pool,
    Session,
    custom,
    drawn,
    eventually,
    part,
    request,
    running_pool,
    whole,
)

from gpupool.model.request import LeaseSpec
from gpupool.v1 import lease_pb2, resources_pb2

HEARTBEATS = 5
HOPELESS = 500
BURST = 200
SESSIONS = 4


def test_c32_of_two_gangs_that_need_everything_one_runs_and_one_holds_nothing(
    tmp_path: Path,
) -> None:
    """C32: 100 single-GPU nodes, two 100-member gangs at once: all or nothing, never in part."""
    nodes = [custom(f"n{number:03d}") for number in range(100)]
    # The books are checked by this test itself: doing it after each of 100 reports is slow.
    with running_pool(tmp_path, *nodes, check_invariants="false") as pool:
        together = Barrier(2)

        def first_answer(name: str) -> tuple[resources_pb2.Lease, object]:
            calls = pool.connect()
            together.wait()
            call = calls.ask(name, whole(1, replicas=100))
            return next(call).lease, call

        with ThreadPoolExecutor(2) as threads:
            answers = list(threads.map(first_answer, ("one", "two")))
        leases = sorted((lease for lease, _ in answers), key=lambda lease: lease.state)
        waiting, winner = leases
        assert waiting.state == PENDING
        assert winner.state != PENDING
        eventually("the winner", lambda: pool.calls.get(winner.lease_id).state == ACTIVE)
        members = pool.calls.get(winner.lease_id).members
        assert len({member.place.node_id for member in members}) == 100
        loser = pool.calls.get(waiting.lease_id)
        assert (loser.state, loser.position, len(loser.members)) == (PENDING, 1, 0)
        assert loser.explanation.causes[0].code == "gpu_busy"
        assert loser.explanation.causes[0].count == 100
        pool.check()
        pool.calls.release(winner.lease_id)
        eventually("the other gang", lambda: pool.calls.get(waiting.lease_id).state == ACTIVE)


def _burst(pool: Pool, shares_pct: list[int]) -> list[Session]:
    """Sends all requests at the same moment, over several connections."""
    sessions = [Session(pool.connect()) for _ in range(SESSIONS)]
    together = Barrier(SESSIONS)

    def send(number: int) -> None:
        commands = [
            lease_pb2.SessionCommand(sequence=index + 1, acquire=request(f"r{index}", part(pct)))
            for index, pct in enumerate(shares_pct)
            if index % SESSIONS == number
        ]
        together.wait()
        sessions[number].send(commands)
        mine = {command.sequence for command in commands}
        sessions[number].read_until(lambda: sessions[number].answers.keys() == mine)

    with ThreadPoolExecutor(SESSIONS) as threads:
        list(threads.map(send, range(SESSIONS)))
    return sessions


def _settled(pool: Pool) -> bool:
    active, waiting = len(pool.leases(ACTIVE)), len(pool.leases(PENDING))
    return active + waiting == BURST and pool.summary().waiting == waiting


def _assert_no_way_back(pool: Pool, sessions: list[Session]) -> None:
    """No lease that was granted was ever taken back, as its holder or history would show."""
    order = [PENDING, resources_pb2.LEASE_STATE_GRANTED, ACTIVE]
    for session in sessions:
        for events in session.answers.values():
            states = [order.index(event.lease.state) for event in events]
            assert states == sorted(states), "a lease went back to a former state"
    seen = {event.kind for event in pool.events() if event.kind.startswith(("lease.", "member."))}
    assert seen <= {"lease.requested", "lease.granted", "lease.active"}
    for event in pool.events("lease.active"):
        assert len(pool.events("lease.granted", subject=event.subject)) == 1


def test_c71_200_slices_of_any_size_at_once_fill_8_gpus_without_a_way_back(tmp_path: Path) -> None:
    """C71: what fits is granted once and for good, the rest queues; no GPU over 100 %."""
    draw = drawn(71)
    shares_pct = [draw.randrange(10, 101, 10) for _ in range(BURST)]
    with running_pool(tmp_path, custom("n1", gpus=8)) as pool:
        sessions = _burst(pool, shares_pct)
        eventually("every request to be granted or queued", lambda: _settled(pool))
        granted_pct = sum(
            lease.members[0].place.devices[0].share_pct for lease in pool.leases(ACTIVE)
        )
        free_pct = [device.free_share_pct for device in pool.devices()]
        assert granted_pct == 800 - sum(free_pct) == pool.summary().granted_share_pct
        (head,) = [lease for lease in pool.leases(PENDING) if lease.position == 1]
        assert head.spec.groups[0].slice.share_pct > max(free_pct), "the first in the queue fits"
        positions = sorted(lease.position for lease in pool.leases(PENDING))
        assert positions == list(range(1, len(positions) + 1))
        _assert_no_way_back(pool, sessions)
        for session in sessions:
            session.close()


def test_c71_200_tenths_at_once_are_granted_to_exactly_the_capacity(tmp_path: Path) -> None:
    """C71: 8 GPUs are 80 tenths; 80 are granted, 120 wait, and a release lets in the next."""
    with running_pool(tmp_path, custom("n1", gpus=8)) as pool:
        sessions = _burst(pool, [10] * BURST)
        eventually("every request to be granted or queued", lambda: _settled(pool))
        assert len(pool.leases(ACTIVE)) == 80
        assert pool.summary().granted_share_pct == 800
        assert [device.free_share_pct for device in pool.devices()] == [0] * 8
        _assert_no_way_back(pool, sessions)
        ended = pool.leases(ACTIVE)[:40]
        for lease in ended:
            pool.calls.release(lease.lease_id)
        eventually("40 more", lambda: len(pool.events("lease.active")) == 120)
        assert pool.summary().waiting == 80
        for session in sessions:
            session.close()


def _hopeless(number: int) -> LeaseSpec:
    """Models, sizes and counts that the pool does not have, but might have one day."""
    kinds = (
        whole(1, models=("h999",)),
        whole(3),
        part(10, memory_mib=400_000),
        whole(1, cpu_milli=1_000_000),
        whole(1, replicas=64),
    )
    return kinds[number % len(kinds)]


def _cpu_s(pool: Pool) -> float:
    assert pool.daemon.process is not None
    times = psutil.Process(pool.daemon.process.pid).cpu_times()
    return times.user + times.system


def _pass_heartbeats(pool: Pool) -> None:
    """Waits until each node has spoken some times more."""
    seen: dict[str, set[int]] = {}

    def spoken() -> bool:
        for node in pool.nodes():
            seen.setdefault(node.node_id, set()).add(node.last_seen_time.ToNanoseconds())
        return all(len(times) > HEARTBEATS for times in seen.values())

    eventually(f"{HEARTBEATS} heartbeats of each node", spoken)


def test_c82_500_hopeless_requests_and_heartbeats_do_not_delay_a_feasible_one(
    tmp_path: Path,
) -> None:
    """C82: what cannot change anything wakes nobody; what fits is granted in its own event."""
    nodes = (custom("n1", gpus=2), custom("n2", gpus=2))
    # What the allocator spends is measured, and checking itself is not what is meant.
    with running_pool(tmp_path, *nodes, check_invariants="false") as pool:
        session = Session(pool.connect())
        begun_s = _cpu_s(pool)
        for first in (1, 251):
            numbers = range(first, first + 250)
            session.send(
                [
                    lease_pb2.SessionCommand(
                        sequence=number, acquire=request(f"h{number}", _hopeless(number))
                    )
                    for number in numbers
                ]
            )
        session.read_until(lambda: len(session.answers) == HOPELESS)
        assert pool.summary().waiting == HOPELESS
        queued_s = _cpu_s(pool)
        events = len(pool.events())
        read_s = _cpu_s(pool)
        _pass_heartbeats(pool)
        # Looking at all of them once more at each heartbeat would be ten times their arrival.
        assert _cpu_s(pool) - read_s < HEARTBEATS * (queued_s - begun_s)
        assert len(pool.events()) == events, "a heartbeat changed something"
        first_answer = next(pool.calls.ask("feasible", whole(1))).lease
        assert first_answer.state != PENDING, "it was queued behind the hopeless"
        lease_id = first_answer.lease_id
        eventually("the feasible one", lambda: pool.calls.get(lease_id).state == ACTIVE)
        assert pool.summary().waiting == HOPELESS
        session.close()
