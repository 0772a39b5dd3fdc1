"""The allocator behind its keeper, as it is installed: the process that serves is killed."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.integration.allocator_daemon import (
    Daemon,
    DidNotStartError,
    PlayedAgent,
    playing,
    until,
    whole,
)

from gpupool.v1 import lease_pb2, resources_pb2

one_loop = pytest.mark.asyncio(loop_scope="session")

PATIENCE_S = 30.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path, keeper="true")
    yield made
    made.end()


def epoch(daemon: Daemon) -> int:
    """Of the term that serves; 0 while none does."""
    status, body = daemon.get("/readyz")
    return int(json.loads(body)["epoch"]) if status == 200 else 0


@one_loop
async def test_a_killed_allocator_is_back_on_its_ports_with_all_that_it_had(
    daemon: Daemon,
) -> None:
    daemon.start()
    assert daemon.process is not None
    async with daemon.connected() as calls:
        agent = PlayedAgent("n1")
        async with playing(calls, agent):
            held = await calls.acquire("r1", whole())
        first = daemon.pid
        assert first != daemon.process.pid
        daemon.crash()
        await until(daemon.replaced)
        assert daemon.pid != first
        await until(lambda: epoch(daemon) == 2)
        found = await calls.leases.GetLease(
            lease_pb2.GetLeaseRequest(lease_id=held.lease_id), wait_for_ready=True
        )
        assert found.lease.state == resources_pb2.LeaseState.LEASE_STATE_ACTIVE
        back = PlayedAgent("n1", running=agent.running)
        async with playing(calls, back):
            assert back.welcome is not None
            assert back.welcome.epoch == 2
            await calls.acquire("r2", whole(), wait_s=10)
    assert "allocator.starts_anew" in daemon.log()


@one_loop
async def test_a_ready_file_that_cannot_be_written_again_ends_nobody(daemon: Daemon) -> None:
    daemon.start()
    daemon.ready.unlink()
    # A folder in its place cannot be replaced by a file.
    daemon.ready.mkdir()
    os.kill(daemon.pid, signal.SIGKILL)
    await until(lambda: epoch(daemon) == 2)
    await until(lambda: "ready_file.failed" in daemon.log())
    assert not list(daemon.ready.parent.glob(".ready*"))
    assert daemon.is_alive


@one_loop
async def test_a_stop_reaches_the_process_that_serves(daemon: Daemon) -> None:
    daemon.start()
    serving = psutil.Process(daemon.pid)
    assert await asyncio.to_thread(daemon.terminate) == 0
    assert not serving.is_running()
    assert json.loads(daemon.log().splitlines()[-1])["event"] == "allocator.stopped"


@one_loop
async def test_without_its_keeper_nothing_serves_and_the_store_is_free(daemon: Daemon) -> None:
    daemon.start()
    serving = psutil.Process(daemon.pid)
    daemon.kill()
    serving.wait(PATIENCE_S)
    daemon.start()
    await until(lambda: epoch(daemon) == 2)


@one_loop
async def test_an_allocator_that_cannot_start_is_left_to_whoever_started_it(
    daemon: Daemon, tmp_path: Path
) -> None:
    daemon.start()
    other = tmp_path / "other"
    other.mkdir()
    second = Daemon(other, keeper="true", state_dir=daemon.state_dir)
    with pytest.raises(DidNotStartError) as caught:
        second.start()
    assert caught.value.code == 1
    assert f"process {daemon.pid}" in caught.value.log
