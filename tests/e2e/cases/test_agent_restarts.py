"""An agent that is started anew, and one that is killed in the middle of what it does.

C29 and C79, on a host with the real programs: agent, root helper, MPS daemons, clients.
"""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.agent_allocator import TinyAllocator
from tests.agent_allocator import until as until_async
from tests.e2e.pool_fixture import ACTIVE, ENDED, Pool, eventually, part
from tests.real_host.host import (
    ROOT,
    USER_UID,
    RealHost,
    hosted_pool,
    mine,
    place,
    real_host,
)

from gpupool.model.assignment import Assignment, AssignmentKey
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId
from gpupool.model.lease import DeviceShare, Place
from gpupool.v1 import pool_pb2

RESTARTS = 10
BOUNDARIES = (
    "set_compute_mode",
    "stop_mps",
    "start_mps",
    "mps_commands:set_default_active_thread_percentage",
    "mps_commands:get_server_status",
    "probe",
    "write_cdi",
)
"""What a slice's preparation asks the root helper for, in its order."""


def run_on_whole_gpu(pool: Pool, host: RealHost) -> subprocess.Popen[str]:
    """A command under a lease of a GPU, held by a process on the node."""
    socket = host.agent_settings["socket"]
    client = ("-m", "gpupool_agent.simulated.cuda_client", "--memory-mib", "1000")
    started = subprocess.Popen(
        [
            *(sys.executable, "-m", "gpupool.cli.main", "--address", f"unix:{socket}"),
            *("run", "--gpus", "1", "--", sys.executable, *client),
        ],
        env={**os.environ, "GPUPOOL_SIMULATED_NODE": str(host.directory)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline()
    return started


def picture(pool: Pool, host: RealHost) -> dict[str, object]:
    """Everything that a restart must leave as it is."""
    return {
        "leases": sorted(
            (lease.lease_id, lease.state, lease.generation, str(lease.members))
            for lease in pool.leases()
        ),
        "devices": sorted(
            (each.device.uuid, each.state, each.free_share_pct, each.free_memory_mib)
            for each in pool.devices()
        ),
        "mps": host.mps_pids(),
        "modes": host.compute_modes(),
        "runs": sorted((row["lease_id"], row["token"]) for row in host.running()[host.name]),
    }


def test_c29_ten_restarts_of_the_agent_of_a_full_node_change_nothing(tmp_path: Path) -> None:
    """C29: SIGTERM and kill -9 in turn: the same leases, daemons, clients; no other event."""
    with hosted_pool(tmp_path) as (pool, host):
        holders = [run_on_whole_gpu(pool, host) for _ in range(4)]
        slices = [pool.calls.acquire(f"s{number}", mine(part(50))) for number in range(8)]
        assert {lease.state for lease in slices} == {ACTIVE}, [
            lease.explanation.summary for lease in slices
        ]
        clients = [host.hold(lease.members[0].environment)[0] for lease in slices]
        try:
            assert len({place(lease).device_uuid for lease in slices}) == 4
            eventually("a full node", lambda: len(pool.leases(ACTIVE)) == 12)
            assert sum(each.free_share_pct for each in pool.devices()) == 0
            pool.check()
            before, last = picture(pool, host), pool.events()[-1].sequence
            for turn in range(RESTARTS):
                if turn % 2:
                    host.kill_agent()
                else:
                    host.stop_agent()
                host.start_agent()
                connected = turn + 1
                eventually("the agent", lambda n=connected: said(pool, last)["node.connected"] == n)
                eventually("its GPUs", lambda: in_use(pool) == 8)
            pool.check()
            assert picture(pool, host) == before
            assert said(pool, last) == {
                "node.connected": RESTARTS,
                "node.unreachable": RESTARTS,
            }
            assert all(process.poll() is None for process in (*holders, *clients))
        finally:
            # Which it passes on to its command.
            for holder in holders:
                holder.terminate()
            for holder in holders:
                holder.communicate()


def said(pool: Pool, after: int) -> Counter[str]:
    """Kinds of events since."""
    return Counter(each.kind for each in pool.events() if each.sequence > after)


def in_use(pool: Pool) -> int:
    used = (pool_pb2.DEVICE_STATE_SLICED, pool_pb2.DEVICE_STATE_WHOLE)
    return sum(each.state in used for each in pool.devices())


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_c79_a_slice_half_prepared_is_rolled_back_wherever_its_agent_was_killed(
    tmp_path: Path, before: bool
) -> None:
    """C79: killed before or after each thing that it asks its helper for; nothing is left."""
    with hosted_pool(tmp_path) as (pool, host):
        for point in BOUNDARIES:
            host.crash_at(point, before=before, whom="agent")
            call = pool.calls.ask(point, mine(part(30)))
            lease_id = next(call).lease.lease_id
            host.until_crashed("agent")
            pool.calls.release(lease_id)
            call.cancel()
            assert pool.calls.get(lease_id).state not in ENDED
            host.start_agent()
            eventually(f"the end after {point}", lambda of=lease_id: ended(pool, of))
            assert host.left() == [], point
            pool.until_offered(host)  # type: ignore[arg-type]
        causes = [each.cause for each in pool.events("fault.opened")]
        assert not [cause for cause in causes if "foreign" in cause]
        # What is still wanted is prepared, whatever half of it is there.
        host.crash_at("probe", before=before, whom="agent")
        call = pool.calls.ask("wanted", mine(part(30)))
        lease_id = next(call).lease.lease_id
        host.until_crashed("agent")
        host.start_agent()
        eventually("the slice", lambda: pool.calls.get(lease_id).state == ACTIVE)
        host.hold(pool.calls.get(lease_id).members[0].environment)


def ended(pool: Pool, lease_id: str) -> bool:
    return pool.calls.get(lease_id).state in ENDED


async def test_c79_a_late_prepare_starts_no_daemon(tmp_path: Path) -> None:
    """C79: with helper and daemon: after the release it is refused, also by the next agent."""
    allocator = TinyAllocator()
    address = await allocator.start()
    host_of = real_host(address)
    host = await asyncio.to_thread(host_of.__enter__)
    try:
        await until_async(lambda: len(allocator.devices) == 8, "the devices")
        late = slice_of(host, "l-1", 7)
        await allocator.want(late)
        await until_async(lambda: allocator.state("l-1") == "prepared", "prepared")
        assert len(host.mps_pids()) == 2
        await allocator.want()
        await until_async(lambda: allocator.state("l-1") == "ended", "ended")
        await until_async(lambda: host.left() == [], "nothing to be left")
        started = len(host.actions("start_mps"))
        for restart in (False, True):
            if restart:
                await asyncio.to_thread(host.kill_agent)
                await asyncio.to_thread(host.start_agent)
                await until_async(lambda: len(allocator.hellos) == 2, "the next agent")
            allocator.assignments.clear()
            # In a newer desired state than the release, so that only its token is old.
            await allocator.want(late)
            await until_async(lambda: allocator.state("l-1") == "ended", "the refusal")
            await allocator.want()
            assert host.left() == []
        assert len(host.actions("start_mps")) == started
        await allocator.want(slice_of(host, "l-2", 8))
        await until_async(lambda: allocator.state("l-2") == "prepared", "the next lease")
        await allocator.want()
        await until_async(lambda: allocator.state("l-2") == "ended", "its end")
    finally:
        await asyncio.to_thread(host_of.__exit__, None, None, None)
        await allocator.stop()


def slice_of(host: RealHost, lease_id: str, token: int) -> Assignment:
    share = DeviceShare(
        device_uuid=DeviceUuid(host.gpus[0]), share_pct=30, memory_mib=20_000, whole=False
    )
    return Assignment(
        key=AssignmentKey(lease_id=LeaseId(lease_id), rank=0),
        group="main",
        token=token,
        place=Place(node_id=NodeId(host.name), devices=(share,)),
        uid=USER_UID,
        disconnect_s=86_400.0,
        world_size=1,
    )
