"""Book and agents' truth are brought together again, whichever of them is wrong."""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from tests.agent_allocator import TinyAllocator
from tests.agent_allocator import until as until_async
from tests.e2e.pool_fixture import (
    ACTIVE,
    Fleet,
    Pool,
    custom,
    eventually,
    lease_devices,
    part,
    running_pool,
    whole,
)

from gpupool.model.assignment import Assignment, AssignmentKey
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId
from gpupool.model.lease import DeviceShare, Place
from gpupool.v1 import pool_pb2, resources_pb2

BOUNDED_S = 30.0
"""Longest time from both sides being back to one truth, on a slow machine."""

HANGING = Path(__file__).with_name("hanging_probe_fleet.py")


def _ended(pool: Pool, lease_id: str) -> Callable[[], bool]:
    return lambda: pool.calls.get(lease_id).state == resources_pb2.LEASE_STATE_RELEASED


def test_c73_a_release_that_its_node_did_not_hear_is_carried_out_when_it_is_back(
    tmp_path: Path,
) -> None:
    """C73: release lost, allocator killed: nothing is granted on it before, all of it after."""
    with running_pool(tmp_path, "dgx-h100:h1") as pool:
        lease = pool.calls.acquire("whole node", whole(8))
        pool.fleet.inject("h1", "cut-off")
        eventually("the cut to be noticed", lambda: pool.events("node.unreachable"))
        pool.calls.release(lease.lease_id)
        pool.restart_allocator()
        assert [len(each) for each in pool.fleet.running().values()] == [1]
        assert pool.calls.get(lease.lease_id).state == resources_pb2.LEASE_STATE_RELEASING
        summary = pool.summary()
        assert (summary.devices_free, summary.devices_used) == (0, 8)
        waiting = pool.calls.waits("next", whole(8))
        assert "unreachable" in waiting.explanation.summary
        pool.fleet.inject("h1", "reconnect")
        eventually("the end", _ended(pool, lease.lease_id), BOUNDED_S)
        eventually("the next", lambda: pool.calls.get(waiting.lease_id).state == ACTIVE, BOUNDED_S)
        kinds = [event.kind for event in pool.events(subject=lease.lease_id)]
        assert kinds[-2:] == ["lease.releasing", "lease.released"]


def test_c73_commits_cut_half_way_by_kill_9_leave_books_and_agents_agreed(tmp_path: Path) -> None:
    """C73: whatever of a release or a grant the crash let through, both sides know the same."""
    with running_pool(tmp_path, "dgx-h100:h1") as pool:
        for turn in range(3):
            held = [pool.calls.acquire(f"{turn}-{number}", whole(2)) for number in range(2)]
            calls = pool.connect()
            unread = [calls.ask(f"{turn}-cut-{number}", whole(1)) for number in range(4)]
            with ThreadPoolExecutor(2) as threads:
                releases = [threads.submit(_release, pool, lease.lease_id) for lease in held]
                pool.restart_allocator()
                acknowledged = [release.result() for release in releases]
            for call in unread:
                call.cancel()
            for lease, was_acknowledged in zip(held, acknowledged, strict=True):
                if was_acknowledged:
                    eventually("an acknowledged release", _ended(pool, lease.lease_id), BOUNDED_S)
            pool.check()
            pool.drain()


def _release(pool: Pool, lease_id: str) -> bool:
    try:
        pool.calls.release(lease_id)
    except grpc.RpcError:
        return False
    return True


def test_c73_what_an_agent_has_lost_is_prepared_again_and_told(tmp_path: Path) -> None:
    """C73: the book has what the agent does not run: it is prepared anew, and that is an event."""
    # Without a state directory an agent forgets everything when it stops.
    with running_pool(tmp_path, custom("n1", gpus=2), custom("n2", gpus=2)) as pool:
        leases = [pool.calls.acquire("a", whole(2)), pool.calls.acquire("b", part(30))]
        before = {lease.lease_id: lease.generation for lease in leases}
        for node in ("n1", "n2"):
            pool.fleet.inject(node, "restart-agent")

        def ready() -> bool:
            now = [pool.calls.get(lease_id) for lease_id in before]
            return all(
                lease.generation > before[lease.lease_id]
                and lease.members[0].state == resources_pb2.MEMBER_STATE_READY
                for lease in now
            )

        eventually("both to be prepared again", ready, BOUNDED_S)
        corrected = pool.events("member.preparing")
        assert {event.subject for event in corrected} == set(before)
        assert all("does not run it any more" in event.cause for event in corrected)
        pool.check()


def test_c73_work_that_a_restored_book_does_not_know_is_kept_and_blocks_its_gpus(
    tmp_path: Path,
) -> None:
    """C73: the agent runs what the book does not have: noted, kept, and granted to nobody."""
    with running_pool(tmp_path) as pool:
        flags = ("--state-dir", str(tmp_path / "agents"))
        fleet = pool.add_fleet(custom("n1", gpus=4), flags=flags)
        known = pool.calls.acquire("known", whole(1))
        pool.daemon.kill()
        copy = tmp_path / "copy"
        shutil.copytree(pool.daemon.state_dir, copy)
        pool.daemon.start()
        pool.reconnect()
        pool.until_offered(fleet)
        lost = pool.calls.acquire("lost", whole(2))
        pool.daemon.kill()
        shutil.rmtree(pool.daemon.state_dir)
        shutil.copytree(copy, pool.daemon.state_dir)
        pool.daemon.start()
        # A node knows the second term already, so that it is given up for a later one.
        eventually("a new term", lambda: _epoch(pool) > 2, BOUNDED_S)
        pool.reconnect()
        found = eventually("the find", lambda: pool.events("assignment.unclaimed"), BOUNDED_S)
        assert [event.details["lease_id"] for event in found] == [lost.lease_id]
        assert pool.calls.get(known.lease_id).state == ACTIVE
        rest = pool.calls.acquire("rest", whole(1))
        mine = {*lease_devices(known), *lease_devices(rest)}
        assert not mine & set(lease_devices(lost))
        # The term in which it was lost came a second time, and its tokens with it.
        assert rest.members[0].token > lost.members[0].token
        waiting = pool.calls.waits("more", whole(1))
        ran = {each["lease_id"] for each in fleet.running()["n1"]}
        assert ran == {known.lease_id, lost.lease_id, rest.lease_id}
        # Its holder ends it in the end; here the whole host is rebooted.
        fleet.inject("n1", "reboot")
        gone = eventually("its end", lambda: pool.events("assignment.gone"), BOUNDED_S)
        assert [event.details["lease_id"] for event in gone] == [lost.lease_id]
        eventually("its GPUs", lambda: pool.calls.get(waiting.lease_id).state == ACTIVE, BOUNDED_S)


def _epoch(pool: Pool) -> int:
    status, body = pool.daemon.get("/readyz")
    return int(json.loads(body)["epoch"]) if status == 200 else 0


def _assignment(lease_id: str, token: int, uuid: str, share_pct: int = 100) -> Assignment:
    share = DeviceShare(
        device_uuid=DeviceUuid(uuid),
        share_pct=share_pct,
        memory_mib=share_pct * 400,
        whole=share_pct == 100,
    )
    return Assignment(
        key=AssignmentKey(lease_id=LeaseId(lease_id), rank=0),
        group="main",
        token=token,
        place=Place(node_id=NodeId("n1"), devices=(share,)),
        uid=os.getuid(),
        disconnect_s=86_400.0,
        world_size=1,
    )


async def test_c79_a_prepare_that_arrives_after_the_release_is_refused_by_a_tombstone(
    tmp_path: Path,
) -> None:
    """C79: late commands bring nothing back: not at once, not after a restart of the agent."""
    allocator = TinyAllocator()
    address = await allocator.start()
    flags = ("--state-dir", str(tmp_path / "agents"))
    fleet = Fleet(tmp_path / "fleet", address, [custom("n1")], *flags)
    try:
        fleet.launch()
        await until_async(lambda: allocator.devices, "the first report")
        (uuid,) = allocator.devices
        late = _assignment("l-1", 7, uuid)
        await allocator.want(late)
        await until_async(lambda: allocator.state("l-1") == "prepared", "prepared")
        await allocator.want()
        await until_async(lambda: allocator.state("l-1") == "ended", "ended")
        for hello in (1, 2):
            # In a newer desired state than the release, so that only its token is old.
            allocator.assignments.clear()
            await allocator.want(late)
            await until_async(lambda: allocator.state("l-1") == "ended", "the refusal")
            await allocator.want()
            await until_async(lambda: allocator.devices[uuid].clean, "a clean device")
            assert allocator.hellos[-1].assignments == ()
            if hello == 1:
                fleet.kill()
                fleet.launch()
                await until_async(lambda: len(allocator.hellos) == 2, "the restarted agent")
        await allocator.want(_assignment("l-2", 8, uuid))
        await until_async(lambda: allocator.state("l-2") == "prepared", "the next lease")
    finally:
        fleet.kill()
        await allocator.stop()


class HangingFleet(Fleet):
    """Hosts on which every slice stays half prepared."""

    program: tuple[str, ...] = (str(HANGING),)


def test_c79_half_a_prepare_is_rolled_back_when_its_agent_is_killed(tmp_path: Path) -> None:
    """C79: a prepare that failed half way leaves no slice, no directory and no entry behind."""
    with running_pool(tmp_path) as pool:
        flags = ("--state-dir", str(tmp_path / "agents"))
        hanging = HangingFleet(tmp_path / "hosts", pool.address, [custom("n1")], *flags)
        pool.fleets.append(hanging)
        hanging.start()
        pool.until_offered(hanging)
        call = pool.calls.ask("half", part(30))
        lease_id = next(call).lease.lease_id
        pipes = Path(hanging.ready["nodes"]["n1"]["directory"]) / "mps"
        eventually("half of the slice", lambda: pipes.is_dir() and list(pipes.iterdir()))
        (uuid,) = lease_devices(pool.calls.get(lease_id))
        hanging.kill()
        pool.calls.release(lease_id)
        call.cancel()
        assert list(pipes.iterdir()), "what was half done is there"
        hanging.program = Fleet.program
        hanging.start()
        eventually("the end", _ended(pool, lease_id), BOUNDED_S)
        assert list(pipes.iterdir()) == []
        pool.until_offered(hanging)
        (device,) = pool.devices()
        assert device.device.uuid == uuid
        assert device.state == pool_pb2.DEVICE_STATE_FREE
        assert hanging.running() == {"n1": []}
        assert pool.calls.acquire("next", part(100)).state == ACTIVE
