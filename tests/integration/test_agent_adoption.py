"""Adopting a process through the agent's socket: the kernel says who asks and whose it is."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
import structlog
from tests.agent_allocator import RunningAgent, TinyAllocator, until
from tests.agent_bench import assignment, whole

from gpupool.aio import AsyncClient
from gpupool.errors import InvalidRequestError, NotFoundError, WrongStateError
from gpupool.model.assignment import ProcessNote
from gpupool.v1 import agent_pb2, agent_pb2_grpc
from gpupool_agent.core.readings import GpuProcess
from gpupool_agent.devices.processes import ProcProcessTable, user_name

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
TENANT_UID = 65_534
STRANGER_UID = 40_964

# The interpreter may live where another user cannot go, so the child changes its user only
# once it has loaded everything.
ADOPT = """
import os, sys, grpc
from gpupool.v1 import agent_pb2, agent_pb2_grpc
address, uid, lease, pid = sys.argv[1:]
os.setgroups([])
os.setresuid(int(uid), int(uid), int(uid))
with grpc.insecure_channel(address) as channel:
    request = agent_pb2.AdoptProcessRequest(lease_id=lease, pid=int(pid))
    try:
        agent_pb2_grpc.AgentServiceStub(channel).AdoptProcess(request, timeout=30)
        print("OK")
    except grpc.RpcError as error:
        print(error.code().name, error.details())
"""


@pytest.fixture
async def allocator() -> AsyncIterator[TinyAllocator]:
    tiny = TinyAllocator()
    await tiny.start()
    yield tiny
    await tiny.stop()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Open to other users, as pytest's own folders are not."""
    made = Path(tempfile.mkdtemp(prefix="ga"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@contextmanager
def sleeping(uid: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    # Not by Popen's own ``user``: that forks this process with gRPC's threads in it, and now
    # and then the copy dies before it is anything.
    drop = () if uid is None else ("setpriv", f"--reuid={uid}", "--clear-groups")
    process = subprocess.Popen([*drop, "sleep", "600"], cwd="/")
    try:
        comm, end_s = Path(f"/proc/{process.pid}/comm"), time.monotonic() + 30
        while comm.read_text().strip() != "sleep":
            assert time.monotonic() < end_s, "it has not begun"
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
async def running(allocator: TinyAllocator, folder: Path) -> AsyncIterator[RunningAgent]:
    ran = start(allocator, folder)
    await until(lambda: allocator.hellos and ran.agent.link.channel, "the allocator")
    yield ran
    await ran.stop()


def start(allocator: TinyAllocator, folder: Path) -> RunningAgent:
    return RunningAgent(folder, f"127.0.0.1:{allocator.port}", socket=folder / "run" / "agent.sock")


def address(running: RunningAgent) -> str:
    assert running.agent.door is not None
    return f"unix:{running.agent.door.path}"


async def hold(running: RunningAgent, allocator: TinyAllocator, pid: int, uid: int) -> None:
    """A lease of a user on GPU 0, and a process on it that is no part of it."""
    await allocator.want(assignment("a", 1, whole(0), uid=uid))
    await until(lambda: allocator.state("a") == "prepared", "the lease")
    running.driver.processes["GPU-0"] = (GpuProcess(pid=pid, memory_mib=700),)


async def ask_as(uid: int, running: RunningAgent, lease: str, pid: int) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ADOPT, address(running), str(uid), lease, str(pid)),
        stdout=subprocess.PIPE,
    )
    output, _ = await process.communicate()
    return output.decode().strip()


def strays(allocator: TinyAllocator) -> list[int]:
    return [each.pid for each in allocator.devices["GPU-0"].strays]


def notes(allocator: TinyAllocator) -> list[ProcessNote]:
    return [note for _, report in allocator.reports for note in report.process_notes]


@needs_root
async def test_a_user_adopts_an_own_process_into_an_own_lease(
    running: RunningAgent, allocator: TinyAllocator
) -> None:
    with sleeping(TENANT_UID) as process:
        await hold(running, allocator, process.pid, TENANT_UID)
        await until(lambda: strays(allocator) == [process.pid], "the stray")
        assert await ask_as(TENANT_UID, running, "a", process.pid) == "OK"
        await until(lambda: strays(allocator) == [], "it to belong")
        await until(lambda: notes(allocator), "the note")
        (note,) = notes(allocator)
        assert note.actor == (user_name(TENANT_UID) or str(TENANT_UID))
        assert (note.process.pid, note.process.lease_id) == (process.pid, "a")


@needs_root
@pytest.mark.parametrize(
    ("asker", "owner", "said"),
    [
        (STRANGER_UID, STRANGER_UID, "PERMISSION_DENIED lease a is of uid 65534, not yours"),
        (TENANT_UID, STRANGER_UID, "PERMISSION_DENIED process {pid} is not yours"),
        (TENANT_UID, 0, "PERMISSION_DENIED process {pid} is not yours"),
    ],
)
async def test_nobody_adopts_what_is_somebody_elses(
    running: RunningAgent, allocator: TinyAllocator, asker: int, owner: int, said: str
) -> None:
    with sleeping(owner) as process:
        await hold(running, allocator, process.pid, TENANT_UID)
        with structlog.testing.capture_logs() as lines:
            answer = await ask_as(asker, running, "a", process.pid)
        assert answer == said.format(pid=process.pid)
        (line,) = [each for each in lines if each["event"] == "process.not_adopted"]
        assert (line["uid"], line["pid"], line["lease_id"]) == (asker, process.pid, "a")
        await until(lambda: strays(allocator) == [process.pid], "the stray")
        assert notes(allocator) == []


async def test_an_adoption_is_written_down_and_survives_the_agent(
    allocator: TinyAllocator, folder: Path
) -> None:
    first = start(allocator, folder)
    await until(lambda: first.agent.link.channel, "the allocator")
    with sleeping() as process:
        await hold(first, allocator, process.pid, os.getuid())
        async with AsyncClient(address(first)) as client:
            with structlog.testing.capture_logs() as lines:
                adopted = await client.adopt("a", process.pid)
        assert adopted.device_uuids == ("GPU-0",)
        assert adopted.command == "sleep 600"
        (line,) = [each for each in lines if each["event"] == "process.adopted"]
        assert (line["uid"], line["pid"], line["lease_id"]) == (os.getuid(), process.pid, "a")
        await first.stop()
        seen = len(allocator.reports)
        second = start(allocator, folder)
        second.driver.processes["GPU-0"] = (GpuProcess(pid=process.pid, memory_mib=700),)
        await until(lambda: len(allocator.reports) > seen + 5, "reports of the second")
        told = [
            stray.pid
            for _, report in allocator.reports[seen:]
            for device in report.devices
            for stray in device.strays
        ]
        assert told == []
        process.kill()
        await until(lambda: second.agent.node.summary().adopted == 0, "its end to be noticed")
        await second.stop()


async def test_the_sdk_tells_each_refusal_apart(
    running: RunningAgent, allocator: TinyAllocator
) -> None:
    with sleeping() as process:
        await hold(running, allocator, process.pid, os.getuid())
        async with AsyncClient(address(running)) as client:
            with pytest.raises(NotFoundError, match="lease b is not on this node"):
                await client.adopt("b", process.pid)
            with pytest.raises(WrongStateError, match="is on no GPU of lease a"):
                await client.adopt("a", os.getpid())
            with pytest.raises(NotFoundError, match="there is no process 4194304"):
                await client.adopt("a", 4_194_304)
            for pid in (-1, 0, 1, 2**22 + 1, 2**70):
                with pytest.raises(InvalidRequestError, match=r"is not in 2\.\.4194304"):
                    await client.adopt("a", pid)
        async with AsyncClient(f"127.0.0.1:{allocator.port}") as client:
            with pytest.raises(WrongStateError, match="through the socket of its node's agent"):
                await client.adopt("a", process.pid)


@pytest.mark.parametrize(
    ("lease", "pid", "field"), [("", 5, "lease_id"), ("a\n", 5, "lease_id"), ("a", 0, "pid")]
)
async def test_a_bad_question_is_refused_by_its_field(
    running: RunningAgent, lease: str, pid: int, field: str
) -> None:
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(address(running), options=options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await agent_pb2_grpc.AgentServiceStub(channel).AdoptProcess(
                agent_pb2.AdoptProcessRequest(lease_id=lease, pid=pid)
            )
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith(f"{field}: ")


def test_a_process_is_identified_by_start_time_and_the_one_user_that_it_is() -> None:
    with sleeping() as process:
        found = ProcProcessTable().identify(process.pid)
        assert found is not None
        assert found.uid == os.getuid()
        assert found.start_ticks == ProcProcessTable().start_ticks(process.pid)
    assert ProcProcessTable().identify(process.pid) is None


def test_a_dead_process_that_nobody_has_reaped_is_not_identified() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ProcProcessTable().identify(process.pid) is None
    process.wait()


@needs_root
def test_a_process_of_two_users_is_nobodys() -> None:
    script = "import os, sys; os.setresuid(65534, 65534, 0); print(flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        found = ProcProcessTable().identify(process.pid)
        assert found is not None
        assert found.uid is None
    finally:
        process.communicate()


@pytest.mark.parametrize(
    ("line", "lease"),
    [
        ("0::/user.slice/user-1000.slice/gpupool-lease-l-abc.scope", "l-abc"),
        ("0::/system.slice/gpupool-lease-l-abc.service/below", "l-abc"),
        ("4:memory:/x\n0::/gpupool-lease-l_1", "l_1"),
        ("0::/system.slice/gpupool-agent.service", ""),
        ("0::/user.slice/my-gpupool-lease-l-abc.scope", ""),
        ("0::/gpupool-lease-l-abc.scope.d", ""),
        ("0::/", ""),
    ],
)
def test_a_process_in_a_cgroup_called_after_a_lease_belongs_to_it(
    tmp_path: Path, line: str, lease: str
) -> None:
    directory = tmp_path / "5"
    directory.mkdir()
    (directory / "stat").write_text("5 (a) S 1 " + " ".join("0" * 17) + " 77 0")
    (directory / "cmdline").write_bytes(b"prog\0")
    (directory / "cgroup").write_text(f"{line}\n")
    (directory / "environ").write_bytes(b"PATH=/bin\0")
    facts = ProcProcessTable(tmp_path).describe(5)
    assert facts is not None
    assert facts.lease_id == lease
    # Where the environment may not be read the cgroup still tells.
    (directory / "environ").unlink()
    facts = ProcProcessTable(tmp_path).describe(5)
    assert facts is not None
    assert facts.lease_id == (lease or None)
    # What the process itself was given comes first.
    (directory / "environ").write_bytes(b"GPUPOOL_LEASE_ID=l-own\0")
    facts = ProcProcessTable(tmp_path).describe(5)
    assert facts is not None
    assert facts.lease_id == "l-own"
