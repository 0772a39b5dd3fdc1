"""Fractions, memory and host resources are counted per GPU and per host, never in sum."""

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
    part,
    running_pool,
    whole,
)

from gpupool.v1 import lease_pb2, pool_pb2, resources_pb2
from gpupool.wire.request import lease_spec_to_proto


def test_c01_24_requests_of_2000_mib_on_46068_mib_grant_23_and_one_waits(tmp_path: Path) -> None:
    """C01: memory is counted in one binary unit; what does not fit waits and says by how much."""
    with running_pool(tmp_path, custom("n1", memory_mib=46_068)) as pool:
        for number in range(23):
            lease = pool.calls.acquire(f"r{number}", part(memory_mib=2_000))
            assert lease.members[0].place.devices[0].memory_mib == 2_000
        waiting = pool.calls.waits("r23", part(memory_mib=2_000))
        reason = waiting.explanation
        assert reason.summary.startswith("memory: need 2000 MiB, largest free 68 MiB")
        assert [(cause.code, cause.count) for cause in reason.causes] == [("gpu_memory", 1)]
        (device,) = pool.devices()
        assert device.device.memory_mib == 46_068
        assert device.free_memory_mib == 68
        assert len(pool.leases(ACTIVE)) == 23
        pool.check()
        pool.calls.release(pool.leases(ACTIVE)[0].lease_id)
        eventually("the 24th", lambda: pool.calls.get(waiting.lease_id).state == ACTIVE)


def test_c02_80_slices_of_18_percent_go_five_on_each_of_16_gpus(tmp_path: Path) -> None:
    """C02: what fits is decided per GPU; a node's sum promises nothing."""
    nodes = (custom("n1", gpus=8), custom("n2", gpus=8))
    with running_pool(tmp_path, *nodes, grain_pct=1) as pool:
        placed: dict[str, int] = {}
        on_node: dict[str, int] = {}
        for number in range(80):
            lease = pool.calls.acquire(f"r{number}", part(18))
            place = lease.members[0].place
            (share,) = place.devices
            assert share.share_pct == 18
            placed[share.device_uuid] = placed.get(share.device_uuid, 0) + 1
            on_node[place.node_id] = on_node.get(place.node_id, 0) + 1
        assert on_node == {"n1": 40, "n2": 40}
        assert list(placed.values()) == [5] * 16
        # 16 times 10 % are free, and no GPU has 18.
        assert pool.summary().granted_share_pct == 80 * 18
        waiting = pool.calls.waits("r80", part(18))
        assert waiting.explanation.summary.startswith("share: need 18 %, largest free 10 %")


def test_c10_a_gpu_of_unknown_memory_takes_percentages_and_no_sizes(tmp_path: Path) -> None:
    """C10: no memory size is no failure: shares work, sizes are refused at once, by name."""
    with running_pool(tmp_path, "gb10:spark") as pool:
        (device,) = pool.devices()
        assert device.device.memory_mib == 0
        assert device.state == pool_pb2.DEVICE_STATE_FREE
        lease = pool.calls.acquire("share", part(30))
        (share,) = lease.members[0].place.devices
        assert (share.share_pct, share.memory_mib) == (30, 0)
        environment = lease.members[0].environment
        assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
        assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in environment
        # No wait is given, so that a request that could be waited for would wait for ever.
        for spec in (part(memory_mib=1_000), part(10, memory_mib=1_000)):
            with pytest.raises(grpc.RpcError) as refused:
                pool.calls.acquire("size", spec)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "memory_unknown" in details_of(refused.value)
        assert pool.summary().waiting == 0
        assert pool.calls.acquire("rest", part(70)).state == ACTIVE


def test_c94_a_gpu_without_the_cpu_or_memory_beside_it_is_not_granted(tmp_path: Path) -> None:
    """C94: GPU, host memory and CPU are one decision; nothing is bound to be taken back."""
    node = custom("n1", gpus=4, cpu_milli=16_000, host_memory_mib=64_000)
    with running_pool(tmp_path, node) as pool:
        held = pool.calls.acquire("held", whole(1, cpu_milli=12_000, host_memory_mib=16_000))
        cpu = pool.calls.waits("cpu", whole(1, cpu_milli=8_000))
        memory = pool.calls.waits("memory", whole(1, host_memory_mib=50_000))
        assert cpu.explanation.summary.startswith("cpu: need 8000 milli, largest free 4000 milli")
        told = pool.calls.get(memory.lease_id).explanation.summary
        assert told.startswith("host memory: need 50000 MiB, largest free 48000 MiB")
        (node_now,) = pool.nodes()
        assert (node_now.free_cpu_milli, node_now.free_host_memory_mib) == (4_000, 48_000)
        assert [each.subject for each in pool.events("lease.granted")] == [held.lease_id]
        pool.calls.release(held.lease_id)
        eventually("the CPU", lambda: pool.calls.get(cpu.lease_id).state == ACTIVE)
        eventually("the memory", lambda: pool.calls.get(memory.lease_id).state == ACTIVE)


def _break_slices_of(pool: Pool, node: str) -> None:
    """From now on its agent cannot make a pipe directory, and so prepares no slice."""
    directory = Path(pool.fleet.ready["nodes"][node]["directory"]) / "mps"
    assert not directory.exists(), "it has been used already"
    directory.write_text("in the way")


def test_c94_a_refusal_by_the_node_is_news_about_it_and_is_not_tried_again(tmp_path: Path) -> None:
    """C94: a node that cannot prepare is asked once; the member goes elsewhere."""
    with running_pool(tmp_path, custom("n1"), custom("n2"), custom("n3")) as pool:
        ask = lease_pb2.DryRunRequest(spec=lease_spec_to_proto(part(50)))
        first = pool.calls.leases.DryRun(ask).members[0].place.node_id
        _break_slices_of(pool, first)
        lease = pool.calls.acquire("elsewhere", part(50))
        assert lease.members[0].place.node_id != first
        (refusal,) = pool.events("member.refused", subject=lease.lease_id)
        assert refusal.details["node_id"] == first
        assert "pipe directory" in refusal.cause
        (granted,) = pool.events("lease.granted", subject=lease.lease_id)
        old_token = int(granted.details["member.0"].split()[1])
        assert lease.members[0].token > old_token
        pool.check()


def test_c94_a_member_that_no_node_can_prepare_ends_with_the_reason(tmp_path: Path) -> None:
    """C94: the refusals are bounded, the lease fails, and says what the node said."""
    with running_pool(tmp_path, custom("n1")) as pool:
        _break_slices_of(pool, "n1")
        *_, last = pool.calls.ask("nowhere", part(50))
        assert last.lease.state == resources_pb2.LEASE_STATE_FAILED
        assert "could not prepare it" in last.lease.explanation.summary
        assert len(pool.events("member.refused")) == 1
        # Whole GPUs need no slices: the node is still good for them.
        assert pool.calls.acquire("whole", whole(1)).state == ACTIVE
        assert pool.leases(PENDING) == []
