"""The batching session, AcquireMany, and calls that an agent forwards."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

from gpupool.model.request import LeaseSpec
from gpupool.v1 import lease_pb2, node_pb2, pool_pb2, resources_pb2
from gpupool.wire.request import lease_spec_to_proto

# One event loop for all: gRPC is bound to the first that it sees.
one_loop = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made.start()
    made.end()


def acquire(request_id: str, spec: LeaseSpec, **more: Any) -> lease_pb2.AcquireRequest:
    request = lease_pb2.AcquireRequest(request_id=request_id, spec=lease_spec_to_proto(spec))
    request.wait.seconds = 0
    for name, value in more.items():
        setattr(request, name, value)
    return request


def command(sequence: int, **which: Any) -> lease_pb2.SessionCommand:
    return lease_pb2.SessionCommand(sequence=sequence, **which)


async def answers(stream: Any, until_final: set[int]) -> dict[int, lease_pb2.SessionEvent]:
    """The last event of each sequence, once all of ``until_final`` have ended."""
    last: dict[int, lease_pb2.SessionEvent] = {}
    waiting = set(until_final)
    while waiting:
        response = await stream.read()
        assert response is not aio.EOF
        for event in response.events:
            last[event.sequence] = event
            pending = (resources_pb2.LEASE_STATE_PENDING, resources_pb2.LEASE_STATE_GRANTED)
            if not (event.HasField("lease") and event.lease.state in pending):
                waiting.discard(event.sequence)
    return last


@one_loop
async def test_a_session_carries_many_leases_and_keeps_the_order_of_commands(
    daemon: Daemon,
) -> None:
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1")):
        stream = calls.leases.Session()
        await stream.write(
            lease_pb2.SessionRequest(
                commands=[command(n, acquire=acquire(f"r{n}", part(10))) for n in range(1, 81)]
            )
        )
        granted = await answers(stream, set(range(1, 81)))
        leases = {event.lease.lease_id for event in granted.values()}
        assert len(leases) == 80

        one = granted[1].lease.lease_id
        await stream.write(
            lease_pb2.SessionRequest(
                commands=[
                    command(101, acquire=acquire("r101", part(10))),
                    command(102, release=lease_pb2.ReleaseRequest(lease_id=one)),
                    command(103, keep_alive=lease_pb2.KeepAliveRequest(lease_ids=[one])),
                ]
            )
        )
        then = await answers(stream, {101, 102, 103})
        # Asked before the release, so there was no room yet.
        assert then[101].refusal.code == "RESOURCE_EXHAUSTED"
        assert then[102].release.lease.lease_id == one
        assert list(then[103].keep_alive.gone_lease_ids) == [one]
        await stream.done_writing()
        assert await stream.read() is aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


@one_loop
async def test_a_bad_command_of_a_session_is_refused_alone_and_by_its_path(daemon: Daemon) -> None:
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1")):
        stream = calls.leases.Session()
        bad = acquire("r2", part(10))
        bad.spec.groups[0].slice.share_pct = 250
        await stream.write(
            lease_pb2.SessionRequest(
                commands=[
                    command(1, acquire=acquire("r1", part(10))),
                    command(2, acquire=bad),
                    command(3),
                    command(4, acquire=acquire("r4", part(10))),
                ]
            )
        )
        got = await answers(stream, {1, 2, 3, 4})
        assert got[2].refusal.field == "commands[1].acquire.spec.groups[0].slice.share_pct"
        assert got[2].refusal.message.endswith("share_pct: 250 is not in 0..100")
        assert got[3].refusal.code == "INVALID_ARGUMENT"
        assert got[1].lease.state == got[4].lease.state == resources_pb2.LEASE_STATE_ACTIVE
        stream.cancel()


@one_loop
async def test_a_session_follows_a_lease_to_its_end(daemon: Daemon) -> None:
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1")):
        stream = calls.leases.Session()
        await stream.write(
            lease_pb2.SessionRequest(
                commands=[command(1, acquire=acquire("r1", whole(), follow=True))]
            )
        )
        got = await answers(stream, {1})
        await stream.write(
            lease_pb2.SessionRequest(
                commands=[
                    command(2, release=lease_pb2.ReleaseRequest(lease_id=got[1].lease.lease_id))
                ]
            )
        )
        states = []
        while resources_pb2.LEASE_STATE_RELEASED not in states:
            response = await stream.read()
            assert response is not aio.EOF
            states += [e.lease.state for e in response.events if e.HasField("lease")]
        stream.cancel()


def _handled(daemon: Daemon) -> float:
    """Events and reads that the engine has handled."""
    lines = daemon.get("/metrics")[1].splitlines()
    return next(
        float(x.split()[1]) for x in lines if x.startswith("gpupool_engine_batch_items_sum")
    )


async def _until_handled(daemon: Daemon, count: int) -> None:
    await until(lambda: "session.overrun" in daemon.log() or _handled(daemon) >= count)


@one_loop
async def test_a_session_that_is_not_read_is_ended_and_the_allocator_goes_on(
    daemon: Daemon,
) -> None:
    async with daemon.connected() as calls, daemon.connected() as others:
        stream = calls.leases.Session()
        renew = lease_pb2.KeepAliveRequest(lease_ids=[f"l-{n:0100}" for n in range(10)])
        request = lease_pb2.SessionRequest(
            commands=[command(number, keep_alive=renew) for number in range(256)]
        )
        # Nobody reads. The client waits for each message to be dealt with, since gRPC
        # reports an error of its own to one that is writing when its stream ends.
        sent = 0
        while "session.overrun" not in daemon.log():
            assert sent < 400
            await stream.write(request)
            sent += 1
            await _until_handled(daemon, 256 * sent)
        with pytest.raises(aio.AioRpcError) as caught:
            await _read_to_end(stream)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await others.pool.GetPool(pool_pb2.GetPoolRequest())).epoch == 1


@one_loop
async def test_acquire_many_answers_each_in_its_place(daemon: Daemon) -> None:
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1", gpus=2)):
        answer = await calls.leases.AcquireMany(
            lease_pb2.AcquireManyRequest(
                requests=[
                    acquire("r1", whole()),
                    acquire("r2", whole(3)),
                    acquire("r3", whole()),
                ]
            )
        )
        results = [result.WhichOneof("result") for result in answer.results]
        assert results == ["lease", "refusal", "lease"]
        assert answer.results[1].refusal.code == "RESOURCE_EXHAUSTED"
        assert answer.results[1].refusal.explanation.causes


@one_loop
async def test_a_caller_that_hangs_up_keeps_its_place_for_its_ttl(daemon: Daemon) -> None:
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1", gpus=1)):
        first = await calls.acquire("r1", whole(), wait_s=0)
        request = acquire("r2", whole())
        request.wait.seconds = 600
        request.ttl.seconds = 600
        call = calls.leases.Acquire(request)
        pending = (await call.read()).lease
        assert pending.state == resources_pb2.LEASE_STATE_PENDING
        assert pending.position == 1
        call.cancel()
        await calls.leases.Release(lease_pb2.ReleaseRequest(lease_id=first.lease_id))
        again = await calls.acquire("r2", whole(), wait_s=600)
        assert again.lease_id == pending.lease_id
        assert again.state == resources_pb2.LEASE_STATE_ACTIVE


@one_loop
async def test_dry_run_answers_as_acquire_would_and_changes_nothing(daemon: Daemon) -> None:
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1", gpus=1)):
        ask = lease_pb2.DryRunRequest(spec=lease_spec_to_proto(whole()))
        first = await calls.leases.DryRun(ask)
        assert first.granted
        lease = await calls.acquire("r1", whole(), wait_s=0)
        assert lease.members[0].place == first.members[0].place
        second = await calls.leases.DryRun(ask)
        assert not second.granted
        assert second.explanation.causes


# Calls that an agent forwards.


def forwarded(agent: PlayedAgent, *, uid: int, **changed: str) -> tuple[tuple[str, str], ...]:
    assert agent.welcome is not None
    told = {
        "gpupool-node-id": agent.node_id,
        "gpupool-forward-key": agent.welcome.forward_key,
        "gpupool-uid": str(uid),
        "gpupool-pid": "4242",
        "gpupool-pid-start-ticks": "123456",
        "gpupool-user": "alice",
    }
    return tuple((told | {key.replace("_", "-"): text for key, text in changed.items()}).items())


async def first_lease(call: Any) -> resources_pb2.Lease:
    last = resources_pb2.Lease()
    async for answer in call:
        last = answer.lease
    return last


@one_loop
async def test_a_forwarded_call_runs_as_its_true_user_and_process(daemon: Daemon) -> None:
    agent = PlayedAgent("n1")
    async with daemon.connected() as calls, playing(calls, agent):
        request = acquire("r1", part(10), caller_process=True)
        request.spec.uid = 7
        lease = await first_lease(
            calls.leases.Acquire(request, metadata=forwarded(agent, uid=1000))
        )
        assert lease.state == resources_pb2.LEASE_STATE_ACTIVE
        assert lease.spec.uid == 1000
        assert (lease.caller.user, lease.caller.uid, lease.caller.role) == ("alice", 1000, "user")
        assert (lease.process.node_id, lease.process.pid) == ("n1", 4242)
        assert not lease.HasField("ttl")
        await until(lambda: agent.desired is not None and len(agent.desired.holders) == 1)

        as_root = acquire("r2", part(10))
        as_root.spec.uid = 1000
        lease = await first_lease(calls.leases.Acquire(as_root, metadata=forwarded(agent, uid=0)))
        assert lease.spec.uid == 1000


@one_loop
async def test_a_user_of_a_node_renews_nobody_elses_lease_by_call_or_session(
    daemon: Daemon,
) -> None:
    agent = PlayedAgent("n1")
    async with daemon.connected() as calls, playing(calls, agent):
        ada, eve = forwarded(agent, uid=1000), forwarded(agent, uid=1001)
        lease = await first_lease(calls.leases.Acquire(acquire("r1", part(10)), metadata=ada))
        renewal = lease_pb2.KeepAliveRequest(lease_ids=[lease.lease_id])
        with pytest.raises(aio.AioRpcError) as caught:
            await calls.leases.KeepAlive(renewal, metadata=eve)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        for metadata, refusal in ((eve, "PERMISSION_DENIED"), (ada, "")):
            stream = calls.leases.Session(metadata=metadata)
            await stream.write(lease_pb2.SessionRequest(commands=[command(1, keep_alive=renewal)]))
            got = (await answers(stream, {1}))[1]
            assert got.refusal.code == refusal
            assert got.HasField("keep_alive") is (not refusal)
            stream.cancel()


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"gpupool_forward_key": "0" * 32}, grpc.StatusCode.UNAUTHENTICATED),
        ({"gpupool_forward_key": ""}, grpc.StatusCode.UNAUTHENTICATED),
        ({"gpupool_node_id": "n2"}, grpc.StatusCode.UNAUTHENTICATED),
        ({"gpupool_uid": "-1"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"gpupool_uid": "4294967295"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"gpupool_pid": "seven"}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
@one_loop
async def test_a_false_agent_is_refused(
    daemon: Daemon, changed: dict[str, str], code: grpc.StatusCode
) -> None:
    agent = PlayedAgent("n1")
    async with daemon.connected() as calls, playing(calls, agent):
        with pytest.raises(aio.AioRpcError) as caught:
            await calls.pool.GetPool(
                pool_pb2.GetPoolRequest(), metadata=forwarded(agent, uid=1000, **changed)
            )
        assert caught.value.code() is code


@one_loop
async def test_a_key_is_void_once_its_agent_is_gone(daemon: Daemon) -> None:
    agent = PlayedAgent("n1")
    async with daemon.connected() as calls:
        async with playing(calls, agent):
            await calls.pool.GetPool(pool_pb2.GetPoolRequest(), metadata=forwarded(agent, uid=0))
        await _until_connected(calls, 0)
        with pytest.raises(aio.AioRpcError) as caught:
            await calls.pool.GetPool(pool_pb2.GetPoolRequest(), metadata=forwarded(agent, uid=0))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@one_loop
async def test_a_process_can_hold_only_through_an_agent(daemon: Daemon) -> None:
    async with daemon.connected() as calls:
        with pytest.raises(aio.AioRpcError) as caught:
            await first_lease(calls.leases.Acquire(acquire("r1", part(10), caller_process=True)))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "socket of the agent" in (caught.value.details() or "")


# Agents' streams.


async def _until_connected(calls: Calls, count: int) -> None:
    for _ in range(1000):
        pool = await calls.pool.GetPool(pool_pb2.GetPoolRequest())
        if pool.nodes_connected == count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{pool.nodes_connected} nodes are connected, not {count}")


@one_loop
async def test_a_second_live_agent_of_a_node_is_refused(daemon: Daemon) -> None:
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1")):
        async with daemon.connected() as others:
            with pytest.raises(aio.AioRpcError) as caught:
                await PlayedAgent("n1", instance="instance-2").run(others)
        assert "n1" in (caught.value.details() or "")
        await _until_connected(calls, 1)


@one_loop
async def test_a_reconnect_of_the_same_agent_replaces_its_older_stream(daemon: Daemon) -> None:
    first, second = PlayedAgent("n1"), PlayedAgent("n1")
    async with daemon.connected() as calls:
        older = asyncio.create_task(first.run(calls))
        await until(lambda: first.welcome is not None)
        async with playing(calls, second):
            with pytest.raises(aio.AioRpcError):
                await older
            await _until_connected(calls, 1)


@one_loop
async def test_a_silent_agent_is_sent_away(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, heartbeat_timeout_s=1.0, report_interval_s=0.5)
    daemon.start()
    try:
        async with daemon.connected() as calls:
            stream = calls.nodes.Connect()
            await stream.write(node_pb2.ConnectRequest(hello=PlayedAgent("n1").hello()))
            assert (await stream.read()).HasField("welcome")
            with pytest.raises(aio.AioRpcError):
                await _read_to_end(stream)
            assert await stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "no message for 1 s" in await stream.details()
            await _until_connected(calls, 0)
    finally:
        daemon.end()


async def _read_to_end(stream: Any) -> None:
    while await stream.read() is not aio.EOF:
        pass


@one_loop
async def test_a_stream_must_begin_with_hello(daemon: Daemon) -> None:
    async with daemon.connected() as calls:
        stream = calls.nodes.Connect()
        await stream.write(node_pb2.ConnectRequest(report=node_pb2.Report()))
        with pytest.raises(aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "hello first" in (caught.value.details() or "")


@one_loop
async def test_devices_are_shown_with_their_last_measurement(daemon: Daemon) -> None:
    async with daemon.connected() as calls:
        stream = calls.nodes.Connect()
        await stream.write(node_pb2.ConnectRequest(hello=PlayedAgent("n1", gpus=2).hello()))
        assert (await stream.read()).HasField("welcome")
        measured = node_pb2.DeviceTelemetry(uuid="GPU-n1-1", utilization_pct=42, power_mw=300_000)
        await stream.write(
            node_pb2.ConnectRequest(telemetry=node_pb2.Telemetry(devices=[measured]))
        )

        async def seen() -> list[int]:
            listed = await calls.pool.ListDevices(pool_pb2.ListDevicesRequest(node_id="n1"))
            return [device.telemetry.utilization_pct for device in listed.devices]

        for _ in range(500):
            if await seen() == [0, 42]:
                break
            await asyncio.sleep(0.02)
        assert await seen() == [0, 42]
        assert "gpupool_device_power_watts 300.0" in daemon.get("/metrics")[1]
        stream.cancel()


@one_loop
async def test_listings_go_page_by_page(daemon: Daemon) -> None:
    async with (
        daemon.connected() as calls,
        playing(calls, *(PlayedAgent(f"n{number}", gpus=3) for number in range(5))),
    ):
        nodes: list[str] = []
        token = ""
        while True:
            page = await calls.pool.ListNodes(
                pool_pb2.ListNodesRequest(page_size=2, page_token=token)
            )
            nodes += [node.node_id for node in page.nodes]
            token = page.next_page_token
            if not token:
                break
        assert nodes == [f"n{number}" for number in range(5)]
        devices: list[str] = []
        while True:
            page = await calls.pool.ListDevices(
                pool_pb2.ListDevicesRequest(page_size=4, page_token=token)
            )
            devices += [device.device.uuid for device in page.devices]
            token = page.next_page_token
            if not token:
                break
        assert devices == [f"GPU-n{node}-{gpu}" for node in range(5) for gpu in range(3)]


@one_loop
async def test_a_hold_keeps_a_node_from_requests_until_it_is_removed(daemon: Daemon) -> None:
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1")):
        ask = pool_pb2.CreateHoldRequest(
            request_id="h1",
            hold=pool_pb2.Hold(scope=pool_pb2.HOLD_SCOPE_NODE, target="n1", reason="swap a fan"),
        )
        hold = (await calls.pool.CreateHold(ask)).hold
        assert (await calls.pool.CreateHold(ask)).hold.hold_id == hold.hold_id
        with pytest.raises(aio.AioRpcError) as caught:
            await calls.acquire("r1", whole(), wait_s=0)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        listed = await calls.pool.ListHolds(pool_pb2.ListHoldsRequest())
        assert [each.hold_id for each in listed.holds] == [hold.hold_id]
        await calls.pool.DeleteHold(pool_pb2.DeleteHoldRequest(hold_id=hold.hold_id))
        assert (await calls.acquire("r2", whole(), wait_s=0)).lease_id
