"""A full disk: changes are refused with the reason, reads and renewals go on."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import aio
from tests.integration.allocator_daemon import (
    Calls,
    Daemon,
    PlayedAgent,
    part,
    playing,
    until,
    whole,
)

from gpupool.v1 import lease_pb2, pool_pb2, resources_pb2

SIZE_MIB = 48
MIB = 1024 * 1024

# One event loop for all: gRPC is bound to the first that it sees.
one_loop = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    mounted = tmp_path / "disk"
    mounted.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", mounted], check=False
    )
    if made.returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    yield mounted
    subprocess.run(["umount", "--lazy", mounted], check=True)


def fill(disk: Path) -> Path:
    """Leaves not a byte."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        block = b"\0" * MIB
        while block:
            try:
                file.write(block)
            except OSError:
                block = block[: len(block) // 2]
    return filler


@one_loop
async def test_a_full_disk_refuses_changes_serves_reads_and_heals(
    small_disk: Path, tmp_path: Path
) -> None:
    daemon = Daemon(tmp_path, state_dir=small_disk / "state")
    daemon.start()
    try:
        async with daemon.connected() as calls, playing(calls, PlayedAgent("n1")):
            lease = await calls.acquire("r1", part(10), wait_s=0)
            filler = fill(small_disk)
            await until(lambda: daemon.get("/readyz")[0] == 503)
            await _refused_but_readable(calls, daemon, lease.lease_id)

            filler.unlink()
            await until(lambda: daemon.get("/readyz")[0] == 200)
            after = await calls.acquire("r3", whole(), wait_s=0)
            assert after.state == resources_pb2.LEASE_STATE_ACTIVE
            listed = await calls.leases.ListLeases(lease_pb2.ListLeasesRequest())
            assert {each.lease_id for each in listed.leases} == {lease.lease_id, after.lease_id}
        daemon.kill()
        daemon.start()
        async with daemon.connected() as calls:
            again = await calls.leases.ListLeases(lease_pb2.ListLeasesRequest())
            assert {each.lease_id for each in again.leases} == {lease.lease_id, after.lease_id}
    finally:
        daemon.end()


@one_loop
async def test_a_start_on_a_full_disk_serves_reads(small_disk: Path, tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, state_dir=small_disk / "state")
    daemon.start()
    try:
        async with daemon.connected() as calls, playing(calls, PlayedAgent("n1")):
            lease = await calls.acquire("r1", part(10), wait_s=0)
        daemon.kill()
        fill(small_disk)
        daemon.start()
        async with daemon.connected() as calls:
            await _refused_but_readable(calls, daemon, lease.lease_id)
    finally:
        daemon.end()


async def _refused_but_readable(calls: Calls, daemon: Daemon, lease_id: str) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await calls.acquire("r2", part(10), wait_s=0)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "changes are refused" in (caught.value.details() or "")
    seen = await calls.leases.GetLease(lease_pb2.GetLeaseRequest(lease_id=lease_id))
    assert seen.lease.state in (resources_pb2.LEASE_STATE_ACTIVE, resources_pb2.LEASE_STATE_GRANTED)
    kept = await calls.leases.KeepAlive(lease_pb2.KeepAliveRequest(lease_ids=[lease_id]))
    assert not kept.gone_lease_ids
    pool = await calls.pool.GetPool(pool_pb2.GetPoolRequest())
    assert pool.read_only_reason
    assert pool.read_only_reason in daemon.get("/readyz")[1]
    assert "gpupool_writes_refused 1.0" in daemon.get("/metrics")[1]
