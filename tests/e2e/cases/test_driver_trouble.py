"""A driver that tells nonsense, nothing, or does not answer: C13 and C28.

The agent's and the root helper's real programs, each in a process of its own.
"""

import json
import time
from itertools import pairwise
from pathlib import Path

from tests.e2e.pool_fixture import ACTIVE, Pool, custom, eventually, lease_devices, part, whole
from tests.real_host.host import RealHost, hosted_pool, mine, place

from gpupool.v1 import pool_pb2
from gpupool_agent.simulated.node import TRUTH, FalseReadings

FREE = pool_pb2.DEVICE_STATE_FREE
UNAVAILABLE = pool_pb2.DEVICE_STATE_UNAVAILABLE
MIB = 2**20
CYCLES = 2000
HEARTBEAT_TIMEOUT_S = 5.0


def device(pool: Pool, uuid: str) -> pool_pb2.DeviceStatus:
    (found,) = [each for each in pool.devices() if each.device.uuid == uuid]
    return found


def used_mib(pool: Pool, uuid: str) -> int | None:
    """What the pool shows as in use; None: nothing is shown."""
    measured = device(pool, uuid).telemetry
    return measured.memory_used_mib if measured.HasField("memory_used_mib") else None


def truth_mib(host: RealHost, uuid: str) -> int:
    return host.node.used_mib(host.node.find_gpu(uuid))


def impossible(pool: Pool, uuid: str) -> list[str]:
    """The story of impossible readings of a GPU."""
    return [
        event.kind
        for event in pool.events("fault.opened", "fault.closed", subject=uuid)
        if event.details["code"] == "impossible_reading"
    ]


def test_c13_after_churn_and_crashes_usage_is_what_the_device_says(tmp_path: Path) -> None:
    """C13: a long-running slice, memory taken and given back ten thousand times beside it."""
    with hosted_pool(tmp_path) as (pool, host):
        lease = pool.calls.acquire("long", mine(part(30)))
        environment = lease.members[0].environment
        uuid = place(lease).device_uuid
        steady, _ = host.hold(environment, "--memory-mib", "500")
        for turn in range(6):
            worker, _ = host.hold(environment, "--memory-mib", "700", "--cycles", f"{CYCLES}")
            if turn % 2:
                assert worker.stdout is not None
                assert json.loads(worker.stdout.readline())["cycles"] == CYCLES
            # Mid-way, or with its memory held: a crash in either case.
            worker.kill()
            worker.wait()
        eventually("the truth", lambda: used_mib(pool, uuid) == truth_mib(host, uuid))
        assert truth_mib(host, uuid) < 1000
        assert steady.poll() is None
        assert impossible(pool, uuid) == []
        # There is no memory missing to anybody: all that the slice has can be taken.
        own_mib = place(lease).memory_mib
        whole_slice, _ = host.hold(environment, "--memory-mib", str(own_mib))
        assert whole_slice.poll() is None
        second = pool.calls.acquire("second", mine(part(70)))
        assert place(second).device_uuid == uuid
        host.hold(second.members[0].environment, "--memory-mib", "1000")
        assert pool.calls.get(lease.lease_id).state == ACTIVE


def test_c13_impossible_values_are_dropped_and_flagged(tmp_path: Path) -> None:
    """C13: 17 TB, more than there is, -1, a process with more than the GPU has."""
    with hosted_pool(tmp_path) as (pool, host):
        lease = pool.calls.acquire("long", mine(part(30)))
        uuid = place(lease).device_uuid
        gpu = host.node.find_gpu(uuid)
        host.hold(lease.members[0].environment, "--memory-mib", "500")
        total_mib = host.node.machine.gpu.memory_total_mib
        assert total_mib is not None
        before = pool.calls.get(lease.lease_id)
        known = device(pool, uuid).device
        of_memory = (
            FalseReadings(used_bytes=17 * 10**12),
            FalseReadings(used_bytes=(total_mib + 1) * MIB),
            FalseReadings(used_bytes=2**64 - 1),
            FalseReadings(total_bytes=2**64 - 1),
            FalseReadings(total_bytes=0),
        )
        of_others = (FalseReadings(process_bytes=17 * 10**12), FalseReadings(utilization=4000))
        for turn, lie in enumerate((*of_memory, *of_others), start=1):
            host.node.set_false(gpu, lie)
            eventually("the flag", lambda n=turn: impossible(pool, uuid).count("fault.opened") == n)
            if lie in of_memory:
                eventually("the value to be dropped", lambda: used_mib(pool, uuid) is None)
            else:
                eventually("it as it is", lambda: used_mib(pool, uuid) == truth_mib(host, uuid))
            assert device(pool, uuid).device == known
            host.node.set_false(gpu, TRUTH)
            eventually("its end", lambda n=turn: impossible(pool, uuid).count("fault.closed") == n)
        eventually("the truth", lambda: used_mib(pool, uuid) == truth_mib(host, uuid))
        now = pool.calls.get(lease.lease_id)
        assert (now.state, now.generation) == (before.state, before.generation)
        assert pool.events("device.stray", "device.failed", "lease.degraded") == []


def test_c13_a_gpu_whose_memory_cannot_be_is_not_offered(tmp_path: Path) -> None:
    """C13: such a value confirms nothing, also not that a GPU is free; it is told as the cause."""
    with hosted_pool(tmp_path) as (pool, host):
        uuid = host.gpus[0]
        host.node.set_false(host.node.find_gpu(uuid), FalseReadings(used_bytes=2**64 - 1))
        eventually("it is kept out", lambda: device(pool, uuid).state == UNAVAILABLE)
        assert "cannot be" in "".join(device(pool, uuid).reasons)
        rest = pool.calls.acquire("rest", whole(7))
        assert uuid not in lease_devices(rest)
        waiting = pool.calls.waits("last", whole(1))
        host.node.set_false(host.node.find_gpu(uuid), TRUTH)
        eventually("it is offered", lambda: pool.calls.get(waiting.lease_id).state == ACTIVE)


def test_c28_without_devices_and_with_a_blocked_call_the_pool_goes_on(tmp_path: Path) -> None:
    """C28: asked again with growing delays, heartbeats on time, other nodes' leases untouched."""

    def no_driver(host: RealHost) -> None:
        host.node.unload_driver()

    settings = {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S}
    with hosted_pool(tmp_path, before=no_driver, offered=False, **settings) as (pool, host):
        assert host.agent is not None
        pid = host.agent.pid
        pool.add_fleet(custom("other", gpus=1))
        lease = pool.calls.acquire("other's", whole(1))
        told = len(pool.events(subject=lease.lease_id))

        def untouched() -> bool:
            now = pool.calls.get(lease.lease_id)
            same = (now.state, now.generation) == (lease.state, lease.generation)
            return same and len(pool.events(subject=lease.lease_id)) == told

        def faults(code: str) -> list[str]:
            kinds = pool.events("fault.opened", "fault.closed", subject=host.name)
            return [each.kind for each in kinds if each.details["code"] == code]

        # At its start: known to the pool, without devices, and asking again and again.
        eventually("the agent", lambda: host.name in {each.node_id for each in pool.nodes()})
        eventually("the reason", lambda: faults("driver_unavailable") == ["fault.opened"])
        eventually("four tries", lambda: len(host.node.inits_s(pid)) >= 4)
        tries_s = host.node.inits_s(pid)
        gaps_s = [later - earlier for earlier, later in pairwise(tries_s)]
        assert all(later > 1.5 * earlier for earlier, later in pairwise(gaps_s))
        host.node.load_driver()
        pool.until_offered(host)  # type: ignore[arg-type]
        # In the middle: nothing of it is offered, and afterwards all of it.
        for begin, end, code in (
            (host.node.unload_driver, host.node.load_driver, "driver_unavailable"),
            (host.node.hang, host.node.resume, "nvml_hang"),
        ):
            begin()
            begun_s = time.monotonic()
            eventually("the reason", lambda c=code: faults(c)[-1:] == ["fault.opened"])
            eventually("none is offered", lambda: free_on(pool, host) == 0)
            # Longer than an agent may be silent: it is not.
            eventually(
                "time to pass", lambda b=begun_s: time.monotonic() - b > 2 * HEARTBEAT_TIMEOUT_S
            )
            assert untouched()
            end()
            pool.until_offered(host)  # type: ignore[arg-type]
            eventually("the end", lambda c=code: faults(c)[-1:] == ["fault.closed"])
        assert pool.events("node.unreachable") == []
        assert host.agent.poll() is None
        assert untouched()
        again = pool.calls.acquire("here", whole(8))
        assert set(lease_devices(again)) == set(host.gpus)


def free_on(pool: Pool, host: RealHost) -> int:
    return sum(each.state == FREE for each in pool.devices() if each.node_id == host.name)
