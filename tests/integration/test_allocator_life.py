"""The daemon as a process: start, stop, crash, a second one, bad settings, new terms."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from tests.integration.allocator_daemon import (
    Daemon,
    DidNotStartError,
    PlayedAgent,
    part,
    playing,
    until,
    whole,
)

from gpupool.v1 import lease_pb2, pool_pb2, resources_pb2

# One event loop for all: gRPC is bound to the first that it sees.
one_loop = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    made.end()


@one_loop
async def test_a_lease_is_granted_renewed_seen_and_released(daemon: Daemon) -> None:
    daemon.start()
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1")):
        lease = await calls.acquire("r1", whole(2), wait_s=0)
        assert lease.state == resources_pb2.LEASE_STATE_ACTIVE
        assert len(lease.members[0].place.devices) == 2
        assert lease.members[0].environment["GPUPOOL_LEASE_ID"] == lease.lease_id

        kept = await calls.leases.KeepAlive(
            lease_pb2.KeepAliveRequest(lease_ids=[lease.lease_id, "l-unknown"])
        )
        assert list(kept.gone_lease_ids) == ["l-unknown"]
        assert kept.ttl.seconds == 600

        seen = await calls.leases.GetLease(lease_pb2.GetLeaseRequest(lease_id=lease.lease_id))
        assert seen.lease.expire_time.seconds > seen.lease.grant_time.seconds
        seen.lease.ClearField("expire_time")  # told to who reads it, as of now
        assert seen.lease == lease
        pool = await calls.pool.GetPool(pool_pb2.GetPoolRequest())
        assert (pool.devices_used, pool.devices_free) == (2, 6)

        released = await calls.leases.Release(
            lease_pb2.ReleaseRequest(lease_id=lease.lease_id, reason="done")
        )
        assert released.lease.state in (
            resources_pb2.LEASE_STATE_RELEASING,
            resources_pb2.LEASE_STATE_RELEASED,
        )
        again = await calls.leases.Release(lease_pb2.ReleaseRequest(lease_id=lease.lease_id))
        assert again.lease.lease_id == lease.lease_id

        async for state in calls.leases.WatchLease(
            lease_pb2.WatchLeaseRequest(lease_id=lease.lease_id)
        ):
            last = state.lease
        assert last.state == resources_pb2.LEASE_STATE_RELEASED


@one_loop
async def test_kill_9_and_restart_keep_every_acknowledged_lease(daemon: Daemon) -> None:
    daemon.start()
    agent = PlayedAgent("n1")
    async with daemon.connected() as calls, playing(calls, agent):
        before = {
            lease.lease_id: lease
            for lease in [await calls.acquire(f"r{n}", part(10), wait_s=0) for n in range(20)]
        }
        pool = await calls.pool.GetPool(pool_pb2.GetPoolRequest())
        daemon.kill()
    daemon.start()
    agent.welcome = agent.desired = None
    async with daemon.connected() as calls:
        listed = await calls.leases.ListLeases(lease_pb2.ListLeasesRequest())
        assert {lease.lease_id for lease in listed.leases} == set(before)
        for lease in listed.leases:
            assert lease.members[0].place == before[lease.lease_id].members[0].place
        async with playing(calls, agent):
            after = await calls.pool.GetPool(pool_pb2.GetPoolRequest())
            assert after.epoch > pool.epoch
            assert after.granted_share_pct == 200
            assert len(agent.running) == 20
            # A retry of what was granted before the crash finds its lease.
            again = await calls.acquire("r7", part(10))
            assert again.lease_id in before


@one_loop
async def test_history_goes_on_without_gaps_over_a_crash(daemon: Daemon) -> None:
    daemon.start()
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1")):
        await calls.acquire("r1", whole(), wait_s=0)
        daemon.kill()
    daemon.start()
    async with daemon.connected() as calls:
        listed = await calls.pool.ListEvents(pool_pb2.ListEventsRequest(page_size=1000))
        assert [event.sequence for event in listed.events] == list(
            range(1, listed.last_sequence + 1)
        )
        kinds = [event.kind for event in listed.events]
        assert "lease.granted" in kinds
        assert kinds.count("allocator.started") == 2

        # A watcher that saw half of it goes on where it was, then hears what is new.
        half = listed.last_sequence // 2
        watch = calls.pool.WatchEvents(pool_pb2.WatchEventsRequest(after_sequence=half))
        heard = [event.sequence for event in (await watch.read()).events]
        assert heard == list(range(half + 1, listed.last_sequence + 1))
        async with playing(calls, PlayedAgent("n2")):
            assert (await watch.read()).events[0].sequence == listed.last_sequence + 1
        watch.cancel()


@one_loop
async def test_a_lost_term_ends_the_process_at_once_without_an_answer(daemon: Daemon) -> None:
    daemon.start()
    assert daemon.process is not None
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1")):
        # As another allocator would that took over behind its back.
        with contextlib.closing(sqlite3.connect(daemon.state_dir / "allocator.db")) as store:
            store.execute("UPDATE state SET epoch = epoch + 1")
            store.commit()
        with pytest.raises(aio.AioRpcError) as caught:
            await calls.acquire("r1", whole(), wait_s=0)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(daemon.process.wait, 30) == 70
        last = json.loads(daemon.log().splitlines()[-1])
        assert last["event"] == "allocator.crashed"
        assert any("r1" in event for event in last["recent_events"])
    daemon.start()
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1")):
        assert (await calls.acquire("r1", whole(), wait_s=0)).lease_id


def test_a_second_allocator_on_the_same_state_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    daemon.start()
    other = tmp_path / "other"
    other.mkdir()
    second = Daemon(other, state_dir=daemon.state_dir)
    with pytest.raises(DidNotStartError) as caught:
        second.start()
    assert caught.value.code == 1
    assert daemon.process is not None
    assert str(daemon.process.pid) in caught.value.log
    assert daemon.get("/healthz")[0] == 200


def test_a_store_that_was_emptied_is_refused_until_a_new_pool_is_asked_for(
    daemon: Daemon, tmp_path: Path
) -> None:
    daemon.start()
    daemon.kill()
    store = daemon.state_dir / "allocator.db"
    store.write_bytes(b"")
    with pytest.raises(DidNotStartError) as caught:
        daemon.start()
    assert caught.value.code == 1
    assert f"{store} is empty or gone" in caught.value.log
    assert "--new-store" in caught.value.log
    assert daemon.start("--new-store").get("/readyz")[0] == 200
    daemon.kill()
    assert daemon.start().get("/readyz")[0] == 200


def test_a_port_in_use_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    daemon.start()
    other = tmp_path / "other"
    other.mkdir()
    second = Daemon(other, grpc_address=f"127.0.0.1:{daemon.grpc}")
    with pytest.raises(DidNotStartError) as caught:
        second.start()
    assert caught.value.code == 1
    assert str(daemon.grpc) in caught.value.log


@one_loop
async def test_sigterm_ends_waiting_calls_and_exits_cleanly(daemon: Daemon) -> None:
    daemon.start()
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1")):
        waiting = asyncio.create_task(calls.acquire("r1", whole(8, replicas=2), wait_s=600))
        await until(lambda: "r1" in _waiting(daemon) or waiting.done())
        assert not waiting.done()
        code = await asyncio.to_thread(daemon.terminate)
        assert code == 0
        with pytest.raises(aio.AioRpcError) as caught:
            await waiting
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert "allocator.stopped" in daemon.log()
    assert "Traceback" not in daemon.log()


def _waiting(daemon: Daemon) -> str:
    return "r1" if "gpupool_waiting_requests 1.0" in daemon.get("/metrics")[1] else ""


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--grain-pct=7", "grain_pct"),
        ("--grpc-address=0.0.0.0:7070", "grpc_address"),
        ("--config=/does/not/exist.toml", "/does/not/exist.toml"),
    ],
)
def test_bad_settings_exit_78_and_say_which(flag: str, named: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "gpupool_allocator", flag],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 78
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_check_whose_reader_has_seen_enough_ends_quietly(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "gpupool_allocator", "--check"],
            stdout=writer,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_help_shows_examples_and_every_setting() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "gpupool_allocator", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "examples:" in ended.stdout
    assert "exit codes:" in ended.stdout
    assert "--heartbeat-timeout-s" in ended.stdout


@one_loop
async def test_a_node_that_has_heard_of_a_later_epoch_raises_ours_above_it(daemon: Daemon) -> None:
    daemon.start()
    grpc_port = daemon.grpc
    agent = PlayedAgent("n1", highest_epoch=1000)
    async with daemon.connected() as calls:
        with pytest.raises(aio.AioRpcError):
            await agent.run(calls)
    assert daemon.process is not None
    await until(lambda: '"epoch": 100' in daemon.get("/readyz")[1])
    assert daemon.is_alive
    assert daemon.grpc == grpc_port
    async with daemon.connected() as calls, playing(calls, agent):
        assert agent.welcome is not None
        assert agent.welcome.epoch > 1000


@one_loop
async def test_health_and_reflection_are_served(daemon: Daemon) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    daemon.start()
    async with daemon.connected() as calls:
        health = health_pb2_grpc.HealthStub(calls.channel)
        answer = await health.Check(
            health_pb2.HealthCheckRequest(service="gpupool.v1.LeaseService")
        )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(calls.channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stream = reflection.ServerReflectionInfo(iter([ask]))
        names = {each.name async for each in _services(stream)}
        assert {"gpupool.v1.LeaseService", "gpupool.v1.PoolService"} <= names


async def _services(stream: Any) -> AsyncIterator[Any]:
    async for answer in stream:
        for service in answer.list_services_response.service:
            yield service


@one_loop
async def test_readyz_says_why_not(daemon: Daemon) -> None:
    daemon.start()
    status, body = daemon.get("/readyz")
    assert status == 200
    assert json.loads(body) == {"ready": True, "epoch": 1}
    assert daemon.get("/healthz") == (200, '{"status": "ok"}')
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(timeout=30) == 0


def test_systemd_is_told_ready_and_stopping(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An abstract socket, as a path in a deep test folder would be too long.
    name = f"gpupool-test-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name)
        listener.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        daemon.start()
        assert listener.recv(4096).decode().startswith("READY=1\n")
        assert daemon.terminate() == 0
        assert listener.recv(4096).decode() == "STOPPING=1"


def test_metrics_are_clean_for_promtool(daemon: Daemon) -> None:
    daemon.start()
    text = daemon.get("/metrics")[1]
    assert "gpupool_epoch 1.0" in text
    promtool = next((p for p in _on_path("promtool") if p.exists()), None)
    if promtool is None:
        pytest.skip("promtool is not installed (package prometheus)")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert checked.stdout + checked.stderr == ""
    assert checked.returncode == 0


def _on_path(name: str) -> list[Path]:
    return [Path(folder) / name for folder in os.environ["PATH"].split(os.pathsep)]
