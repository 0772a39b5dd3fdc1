"""GPUs that vanish from the middle, and GPUs that are put in while all runs."""

import time
from pathlib import Path

from tests.e2e.pool_fixture import (
    ACTIVE,
    PATIENCE_S,
    custom,
    eventually,
    lease_devices,
    running_pool,
    whole,
)

from gpupool.v1 import pool_pb2, resources_pb2

UNAVAILABLE = pool_pb2.DEVICE_STATE_UNAVAILABLE
FAILED = resources_pb2.LEASE_STATE_FAILED


def test_c25_three_of_six_gpus_hidden_in_the_middle_leave_three_by_their_uuids(
    tmp_path: Path,
) -> None:
    """C25: GPUs are known by UUID; the missing ones are shown, and their leases fail."""
    with running_pool(tmp_path, custom("n1", gpus=6)) as pool:
        uuids = [gpu["uuid"] for gpu in pool.fleet.inject("n1", "show")["gpus"]]
        leases = {}
        for number in range(6):
            lease = pool.calls.acquire(f"r{number}", whole(1))
            leases[lease_devices(lease)[0]] = lease
        assert set(leases) == set(uuids)
        hidden = [uuids[at] for at in (1, 2, 4)]
        left = [uuid for uuid in uuids if uuid not in hidden]
        seen_s = time.time()
        for uuid in hidden:
            pool.fleet.inject("n1", "gpu-hide", uuid)
        pool.fleet.inject("n1", "restart-agent")

        def missing() -> list[pool_pb2.DeviceStatus]:
            return [each for each in pool.devices() if each.HasField("last_seen_time")]

        eventually("three GPUs to be missed", lambda: len(missing()) == 3)
        for device in missing():
            assert device.device.uuid in hidden
            assert device.reasons
            assert seen_s - PATIENCE_S < device.last_seen_time.seconds <= time.time()
        for uuid in hidden:
            eventually(
                "the lease of a lost GPU to fail",
                lambda lease=leases[uuid]: pool.calls.get(lease.lease_id).state == FAILED,
            )
        for uuid in left:
            now = pool.calls.get(leases[uuid].lease_id)
            assert now.state == ACTIVE
            assert lease_devices(now) == [uuid]
            pool.calls.release(now.lease_id)
        again = pool.calls.acquire("again", whole(3))
        assert set(lease_devices(again)) == set(left)
        assert {each.device.uuid for each in pool.devices() if each.state == UNAVAILABLE} == set(
            hidden
        )
        assert pool.calls.waits("fourth", whole(1)).explanation.causes
        for uuid in hidden:
            pool.fleet.inject("n1", "gpu-unhide", uuid)
        eventually("nothing to be missed", lambda: not missing())
        eventually(
            "the fourth to start", lambda: pool.leases(resources_pb2.LEASE_STATE_PENDING) == []
        )


PERIOD_S = 2.0


def test_c26_a_gpu_that_is_put_in_is_seen_within_a_period_and_serves_who_waits(
    tmp_path: Path,
) -> None:
    """C26: one GPU, a request for two waits; the second is put in, and nothing restarts."""
    flags = ("--inventory-period-s", f"{PERIOD_S:g}", "--usage-period-s", "0.2")
    with running_pool(tmp_path) as pool:
        fleet = pool.add_fleet(f"{custom('n1', gpus=1)},free_slots=1", flags=flags)
        boot_id = fleet.inject("n1", "show")["boot_id"]
        [first] = [each.device.uuid for each in pool.devices()]
        waiting = pool.calls.waits("two", whole(2))
        connected = len(pool.events("node.connected"))
        put_in_s = time.monotonic()
        second = fleet.inject("n1", "gpu-add", "0000:02:00.0")

        def uuids() -> set[str]:
            return {each.device.uuid for each in pool.devices()}

        eventually("the new GPU to be seen", lambda: uuids() == {first, second})
        # A period, and what a busy machine takes to carry the news.
        assert time.monotonic() - put_in_s < PERIOD_S + 1.0
        eventually("the request to start", lambda: pool.calls.get(waiting.lease_id).state == ACTIVE)
        assert set(lease_devices(pool.calls.get(waiting.lease_id))) == {first, second}
        # It was granted only once its node had found it clean.
        kinds = [each.kind for each in pool.events() if each.subject in (second, waiting.lease_id)]
        assert kinds.index("device.appeared") < kinds.index("lease.granted")
        assert len(pool.events("node.connected")) == connected
        assert fleet.inject("n1", "show")["boot_id"] == boot_id
        fleet.ready["nodes"]["n1"]["gpus"].append(second)
