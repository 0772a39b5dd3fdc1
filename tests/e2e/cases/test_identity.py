"""Names: what is alike is not the same, and what has another name may be."""

from pathlib import Path

import grpc
import pytest
from tests.e2e.pool_fixture import (
    ACTIVE,
    PENDING,
    custom,
    details_of,
    eventually,
    lease_devices,
    part,
    running_pool,
    whole,
)

from gpupool.model.request import LabelSelector
from gpupool.v1 import pool_pb2, resources_pb2


def test_c31_a_model_by_another_name_costs_no_capacity_at_take_over(tmp_path: Path) -> None:
    """C31: GPUs are merged by UUID; a name that differs is a warning, and nothing is drained."""
    with running_pool(tmp_path) as pool:
        flags = ("--state-dir", str(tmp_path / "agents"))
        fleet = pool.add_fleet(custom("n1", gpus=4, model="gpu"), flags=flags)
        uuids = {each.device.uuid for each in pool.devices()}
        lease = pool.calls.acquire("before", whole(1, models=("gpu",)))
        sliced = pool.calls.acquire("sliced", part(30))
        # The allocator is taken over while its agents come up with other names.
        pool.daemon.kill()
        fleet.end()
        fleet.nodes = [custom("n1", gpus=4, model="h200")]
        pool.daemon.start()
        pool.reconnect()
        fleet.start()
        pool.until_offered(fleet)
        assert {each.device.uuid for each in pool.devices()} == uuids
        assert {each.device.model for each in pool.devices()} == {"h200"}
        assert len(pool.events("device.renamed")) == 4
        assert not pool.events("device.missing", "device.failed", "hold.added")
        for before in (lease, sliced):
            now = pool.calls.get(before.lease_id)
            assert now.state == ACTIVE
            assert lease_devices(now) == lease_devices(before)
            assert now.members[0].token == before.members[0].token
        rest = pool.calls.acquire("rest", whole(2, models=("H200",)))
        assert not set(lease_devices(rest)) & {*lease_devices(lease), *lease_devices(sliced)}


def _block(name: str) -> tuple[LabelSelector, ...]:
    return (LabelSelector(key="block", values=(name,)),)


def test_c64_nodes_blocks_and_requests_are_known_by_their_whole_names(tmp_path: Path) -> None:
    """C64: r1 is not r10, a node is not the block of its name, abc is not abc-123."""
    nodes = (
        custom("r1", gpus=2, block="r10"),
        custom("r10", gpus=2, block="r1"),
        custom("r100", gpus=2, block="r100"),
    )
    with running_pool(tmp_path, *nodes) as pool:
        calls = pool.calls
        short = calls.acquire("abc", whole(1, node_selectors=_block("r1")))
        long = calls.acquire("abc-123", whole(1, node_selectors=_block("r10")))
        assert short.lease_id != long.lease_id
        assert short.members[0].place.node_id == "r10"
        assert long.members[0].place.node_id == "r1"
        assert [each.lease_id for each in pool.leases(node_id="r1")] == [long.lease_id]
        assert [each.lease_id for each in pool.leases(node_id="r10")] == [short.lease_id]
        assert pool.leases(node_id="r") == []
        with pytest.raises(grpc.RpcError) as unknown:
            calls.release(long.lease_id[:-1])
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        calls.release(short.lease_id)
        eventually(
            "its end",
            lambda: calls.get(short.lease_id).state == resources_pb2.LEASE_STATE_RELEASED,
        )
        assert calls.get(long.lease_id).state == ACTIVE
        about = pool.events(subject=long.lease_id)
        assert {each.kind for each in about} <= {"lease.requested", "lease.granted", "lease.active"}


def test_c64_holds_cover_the_node_or_gpu_that_they_name_and_its_twins_not(tmp_path: Path) -> None:
    """C64: a hold on r1 leaves r10 in use, and a beginning of a name is no target."""
    with running_pool(tmp_path, custom("r1", gpus=1), custom("r10", gpus=1)) as pool:
        hold = pool_pb2.Hold(scope=pool_pb2.HOLD_SCOPE_NODE, target="r1", reason="repair")
        made = pool.calls.pool.CreateHold(
            pool_pb2.CreateHoldRequest(request_id="h", hold=hold)
        ).hold
        held = {node.node_id: list(node.hold_ids) for node in pool.nodes()}
        assert held == {"r1": [made.hold_id], "r10": []}
        assert pool.calls.acquire("other", whole(1)).members[0].place.node_id == "r10"
        assert "held" in pool.calls.waits("waits", whole(1)).explanation.summary
        uuid = pool.devices()[0].device.uuid
        for scope, target in (
            (pool_pb2.HOLD_SCOPE_NODE, "r"),
            (pool_pb2.HOLD_SCOPE_DEVICE, uuid[:-1]),
            (pool_pb2.HOLD_SCOPE_DEVICE, "r1"),
        ):
            twin = pool_pb2.Hold(scope=scope, target=target, reason="repair")
            with pytest.raises(grpc.RpcError) as refused:
                pool.calls.pool.CreateHold(
                    pool_pb2.CreateHoldRequest(request_id=f"h-{target}", hold=twin)
                )
            assert "hold.target" in details_of(refused.value)
        pool.calls.pool.DeleteHold(pool_pb2.DeleteHoldRequest(hold_id=made.hold_id))
        eventually("the waiting one", lambda: pool.leases(PENDING) == [])


def test_c64_a_lost_gpu_ends_the_leases_on_it_and_none_of_a_twin(tmp_path: Path) -> None:
    """C64: what happens to node r1 happens to nothing of r10."""
    with running_pool(tmp_path, custom("r1", gpus=1), custom("r10", gpus=1)) as pool:
        leases = [pool.calls.acquire(name, whole(1)) for name in ("abc", "abc-123")]
        on = {lease.members[0].place.node_id: lease.lease_id for lease in leases}
        pool.fleet.inject("r1", "gpu-lost", "0")
        failed = resources_pb2.LEASE_STATE_FAILED
        eventually("the loss", lambda: pool.calls.get(on["r1"]).state == failed)
        assert pool.calls.get(on["r10"]).state == ACTIVE
        pool.fleet.inject("r1", "gpu-back", "0")
        pool.until_offered(pool.fleet)
