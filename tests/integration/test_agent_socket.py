"""The Unix socket of an agent: calls are forwarded with the caller's true credentials."""

import asyncio
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import structlog.testing
from tests.agent_allocator import (
    FORWARD_KEY,
    RunningAgent,
    TinyAllocator,
    this_process_start_ticks,
    until,
)

from gpupool.v1 import lease_pb2, lease_pb2_grpc, node_pb2_grpc
from gpupool_agent.devices.processes import ProcProcessTable, user_name
from gpupool_agent.local.door import DoorTakenError, LocalDoor


@pytest.fixture
async def allocator() -> AsyncIterator[TinyAllocator]:
    tiny = TinyAllocator()
    await tiny.start()
    yield tiny
    await tiny.stop()


@pytest.fixture
async def running(allocator: TinyAllocator, tmp_path: Path) -> AsyncIterator[RunningAgent]:
    agent = RunningAgent(
        tmp_path,
        f"127.0.0.1:{allocator.port}",
        socket=tmp_path / "run" / "agent.sock",
        local_connections_max=16,
    )
    await until(lambda: allocator.hellos and agent.agent.link.channel, "the allocator")
    yield agent
    await agent.stop()


def folder_open_to_others() -> Path:
    """pytest's own folders are closed to other users."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    return folder


def socket_of(running: RunningAgent) -> str:
    assert running.agent.door is not None
    return f"unix:{running.agent.door.path}"


def channel(running: RunningAgent) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(
        socket_of(running), options=(("grpc.use_local_subchannel_pool", 1),)
    )


async def test_all_kinds_of_calls_pass_with_the_callers_pid_uid_and_start_time(
    running: RunningAgent, allocator: TinyAllocator
) -> None:
    async with channel(running) as opened:
        leases = lease_pb2_grpc.LeaseServiceStub(opened)
        answer = await leases.GetLease(lease_pb2.GetLeaseRequest(lease_id="l-1"))
        assert answer.lease.lease_id == "l-1"
        states = [
            each.lease.generation
            async for each in leases.Acquire(lease_pb2.AcquireRequest(request_id="r"))
        ]
        assert states == [1, 2, 3]
        session = leases.Session()
        for number in (1, 2):
            command = lease_pb2.SessionCommand(sequence=number)
            await session.write(lease_pb2.SessionRequest(commands=[command]))
            reply = await session.read()
            assert isinstance(reply, lease_pb2.SessionResponse)
            assert [each.sequence for each in reply.events] == [number]
        await session.done_writing()
        assert await session.code() is grpc.StatusCode.OK
    assert [method for method, _ in allocator.forwarded] == ["GetLease", "Acquire", "Session"]
    for _, metadata in allocator.forwarded:
        assert metadata["gpupool-node-id"] == "n1"
        assert metadata["gpupool-forward-key"] == FORWARD_KEY
        assert metadata["gpupool-uid"] == str(os.getuid())
        assert metadata["gpupool-pid"] == str(os.getpid())
        assert metadata["gpupool-pid-start-ticks"] == str(this_process_start_ticks())
        assert metadata["gpupool-user"] == user_name(os.getuid())


CALL = """
import sys, grpc
from gpupool.v1 import lease_pb2, lease_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = lease_pb2_grpc.LeaseServiceStub(channel)
    stub.GetLease(lease_pb2.GetLeaseRequest(lease_id="l-2"), timeout=30)
    sys.stdin.read()
"""


async def test_two_processes_at_the_same_time_are_told_apart(
    running: RunningAgent, allocator: TinyAllocator
) -> None:
    opened = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", CALL, socket_of(running), stdin=subprocess.PIPE
        )
        for _ in range(2)
    ]
    await until(lambda: len(allocator.forwarded) == 2, "both calls")
    ticks = {str(each.pid): str(ProcProcessTable().start_ticks(each.pid)) for each in opened}
    seen = {
        metadata["gpupool-pid"]: metadata["gpupool-pid-start-ticks"]
        for _, metadata in allocator.forwarded
    }
    assert seen == ticks
    for process in opened:
        await process.communicate(b"")
        assert process.returncode == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_is_forwarded_with_its_own_uid(
    allocator: TinyAllocator, tmp_path: Path
) -> None:
    folder = folder_open_to_others()
    running = RunningAgent(
        tmp_path, f"127.0.0.1:{allocator.port}", socket=folder / "run" / "agent.sock"
    )
    try:
        await until(lambda: running.agent.link.channel, "the allocator")
        # The interpreter may live where another user cannot go, so the child changes
        # its user only once it has loaded everything.
        code = CALL.replace("with grpc", "import os\nos.setuid(65534)\nwith grpc", 1)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, socket_of(running), stdin=subprocess.PIPE
        )
        await until(lambda: allocator.forwarded or process.returncode is not None, "the call")
        assert allocator.forwarded[0][1]["gpupool-uid"] == "65534"
        await process.communicate(b"")
    finally:
        await running.stop()
        shutil.rmtree(folder)


async def test_what_a_client_says_about_itself_is_dropped(
    running: RunningAgent, allocator: TinyAllocator
) -> None:
    lies = (
        ("gpupool-uid", "0"),
        ("gpupool-pid", "1"),
        ("gpupool-node-id", "other"),
        ("gpupool-forward-key", "guess"),
        ("x-mine", "kept"),
    )
    async with channel(running) as opened:
        stub = lease_pb2_grpc.LeaseServiceStub(opened)
        call = stub.GetLease(lease_pb2.GetLeaseRequest(lease_id="l-1"), metadata=lies)
        await call
    (_, metadata) = allocator.forwarded[0]
    assert metadata["gpupool-uid"] == str(os.getuid())
    assert metadata["gpupool-pid"] == str(os.getpid())
    assert metadata["gpupool-node-id"] == "n1"
    assert metadata["gpupool-forward-key"] == FORWARD_KEY
    assert metadata["x-mine"] == "kept"


async def test_the_allocators_own_refusal_comes_back_with_its_details(
    running: RunningAgent,
) -> None:
    async with channel(running) as opened:
        stub = lease_pb2_grpc.LeaseServiceStub(opened)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetLease(lease_pb2.GetLeaseRequest(lease_id="none"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert refused.value.details() == "no such lease"
    assert ("gpupool-refusal-bin", b"why") in tuple(refused.value.trailing_metadata())


async def test_the_node_service_is_not_forwarded(
    running: RunningAgent, allocator: TinyAllocator
) -> None:
    async with channel(running) as opened:
        stream = node_pb2_grpc.NodeServiceStub(opened).Connect()
        assert await stream.code() is grpc.StatusCode.UNIMPLEMENTED
    assert len(allocator.hellos) == 1


async def test_without_an_allocator_a_call_is_unavailable_and_says_why(
    running: RunningAgent, allocator: TinyAllocator
) -> None:
    await allocator.stop()
    await until(lambda: running.agent.link.channel is None, "the loss of the allocator")
    async with channel(running) as opened:
        stub = lease_pb2_grpc.LeaseServiceStub(opened)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetLease(lease_pb2.GetLeaseRequest(lease_id="l-1"))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert refused.value.details() == "the agent of node n1 has no allocator at the moment"


async def test_a_cancelled_call_is_cancelled_at_the_allocator_and_the_socket_stays_usable(
    running: RunningAgent, allocator: TinyAllocator
) -> None:
    async with channel(running) as opened:
        stub = lease_pb2_grpc.LeaseServiceStub(opened)
        session = stub.Session()
        await session.write(lease_pb2.SessionRequest())
        await session.read()
        session.cancel()
        answer = await stub.GetLease(lease_pb2.GetLeaseRequest(lease_id="l-1"))
        assert answer.lease.lease_id == "l-1"


async def test_connections_are_bounded_and_a_closed_one_makes_room(
    running: RunningAgent, allocator: TinyAllocator
) -> None:
    path = socket_of(running).removeprefix("unix:")
    most = 16 if os.getuid() == 0 else 4  # root may have them all, a user a quarter
    held = [await asyncio.open_unix_connection(path) for _ in range(most)]
    await until(lambda: running.agent.door and running.agent.door.connections == most, "all")
    reader, writer = await asyncio.open_unix_connection(path)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    for _, each in held:
        each.close()
    await until(lambda: running.agent.door and running.agent.door.connections == 0, "none")
    async with channel(running) as opened:
        stub = lease_pb2_grpc.LeaseServiceStub(opened)
        await stub.GetLease(lease_pb2.GetLeaseRequest(lease_id="l-1"))
    assert len(allocator.forwarded) == 1


def connected_as(uid: int, path: Path) -> socket.socket:
    """A connection of another user: the kernel takes down who connects, not who reads."""
    opened = socket.socket(socket.AF_UNIX)
    os.seteuid(uid)
    try:
        opened.connect(str(path))
    finally:
        os.seteuid(0)
    opened.setblocking(False)
    return opened


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_one_users_idle_connections_shut_out_nobody_else(
    allocator: TinyAllocator, tmp_path: Path
) -> None:
    folder = folder_open_to_others()
    path = folder / "run" / "agent.sock"
    running = RunningAgent(
        tmp_path, f"127.0.0.1:{allocator.port}", socket=path, local_connections_max=16
    )
    door = running.agent.door
    assert door is not None
    loop = asyncio.get_running_loop()
    held: list[socket.socket] = []
    try:
        await until(lambda: running.agent.link.channel, "the allocator")
        with structlog.testing.capture_logs() as lines:
            held += [connected_as(65534, path) for _ in range(4)]
            await until(lambda: door.connections == 4, "a quarter")
            for _ in range(3):
                with connected_as(65534, path) as refused:
                    assert await asyncio.wait_for(loop.sock_recv(refused, 1), 10) == b""
            held += [connected_as(uid, path) for uid in (65531, 65532, 65533) for _ in range(4)]
            # Two places are kept for root.
            await until(lambda: door.connections == 14, "all that users have")
            async with channel(running) as opened:
                stub = lease_pb2_grpc.LeaseServiceStub(opened)
                await stub.GetLease(lease_pb2.GetLeaseRequest(lease_id="l-1"))
            told = [line for line in lines if line["event"] == "local.refused"]
            assert [line["uid"] for line in told].count(65534) == 1
            assert told[0]["connections_of_uid"] == 4
        for each in held:
            each.close()
        await until(lambda: door.connections == 0, "none")
        held = [connected_as(65534, path)]
        await until(lambda: door.connections == 1, "the place that was given back")
    finally:
        for each in held:
            each.close()
        await running.stop()
        shutil.rmtree(folder)


async def test_the_socket_is_for_everybody_and_its_inner_one_for_nobody_else(
    running: RunningAgent,
) -> None:
    door = running.agent.door
    assert door is not None
    assert stat.S_IMODE(door.path.stat().st_mode) == 0o666
    assert stat.S_IMODE(door.path.parent.stat().st_mode) == 0o755
    assert door._private is not None
    assert stat.S_IMODE(door._private.stat().st_mode) == 0o700


async def test_a_second_agent_on_the_socket_is_refused_and_the_first_keeps_its_clients(
    running: RunningAgent, allocator: TinyAllocator
) -> None:
    """A later server on the path would take new clients, and the path with it at its end."""
    assert running.agent.door is not None
    path = running.agent.door.path
    lock = path.with_name(f"{path.name}.lock")
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    inode = path.stat().st_ino
    for _ in range(2):
        second = LocalDoor(
            path,
            node_id="n2",
            link=running.agent.link,
            adopter=running.agent,
            connections_max=4,
            start_ticks=ProcProcessTable().start_ticks,
        )
        with pytest.raises(DoorTakenError, match="is served by another agent"):
            await second.start()
        await second.stop()
        assert path.stat().st_ino == inode
    async with channel(running) as opened:
        stub = lease_pb2_grpc.LeaseServiceStub(opened)
        await stub.GetLease(lease_pb2.GetLeaseRequest(lease_id="l-1"))
    assert [metadata["gpupool-node-id"] for _, metadata in allocator.forwarded] == ["n1"]


async def test_what_a_dead_agent_left_of_its_socket_is_taken_over(
    allocator: TinyAllocator, tmp_path: Path
) -> None:
    """kill -9 leaves path and lock file; the lock itself ends with its process."""
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    path.with_name("agent.sock.lock").touch()
    agent = RunningAgent(tmp_path, f"127.0.0.1:{allocator.port}", socket=path)
    try:
        await until(lambda: agent.agent.link.channel, "the allocator")
        async with channel(agent) as opened:
            stub = lease_pb2_grpc.LeaseServiceStub(opened)
            await stub.GetLease(lease_pb2.GetLeaseRequest(lease_id="l-1"))
    finally:
        await agent.stop()
    assert not path.exists()


async def test_an_agent_leaves_no_socket_behind(allocator: TinyAllocator, tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    agent = RunningAgent(tmp_path, f"127.0.0.1:{allocator.port}", socket=path)
    await until(lambda: allocator.hellos, "Hello")
    private = agent.agent.door._private if agent.agent.door else None
    assert private is not None
    await agent.stop()
    assert not path.exists()
    assert not private.exists()
