"""Processes that should not be on a GPU: named, kept from new work, ended; and adopted."""

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.e2e.pool_fixture import (
    ACTIVE,
    Pool,
    eventually,
    lease_devices,
    part,
    running_pool,
    whole,
)

from gpupool.v1 import pool_pb2, resources_pb2

NODE = "dgx-h100:h1"
NAMED_S = 5.0
"""Agents of these pools read every 0.2 s and report at once; a machine may be busy."""

MEMORY_MIB = 1000


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A short folder: paths of Unix sockets are."""
    with tempfile.TemporaryDirectory(prefix="gp") as folder:
        yield Path(folder)


@contextmanager
def started(
    pool: Pool, environment: Mapping[str, str], *flags: str, memory_mib: int = MEMORY_MIB
) -> Generator[subprocess.Popen[str]]:
    """A CUDA client that holds its memory."""
    nodes = pool.fleet.folder / "control" / "nodes"
    (node_id,) = pool.fleet.node_ids
    client = subprocess.Popen(
        [
            *(sys.executable, "-m", "gpupool_agent.simulated.cuda_client"),
            *("--memory-mib", str(memory_mib), *flags),
        ],
        env={
            "PATH": os.environ["PATH"],
            "GPUPOOL_SIMULATED_NODE": str(nodes / node_id),
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert client.stdout is not None
        line = client.stdout.readline()
        assert line, client.communicate()[1]
        assert json.loads(line)["pid"] == client.pid
        yield client
    finally:
        client.kill()
        client.communicate()


def device(pool: Pool, uuid: str) -> pool_pb2.DeviceStatus:
    (found,) = [each for each in pool.devices() if each.device.uuid == uuid]
    return found


def causes(pool: Pool, uuid: str) -> dict[int, str]:
    return {stray.pid: stray.cause for stray in device(pool, uuid).strays}


def environment_of(lease: resources_pb2.Lease) -> dict[str, str]:
    return dict(lease.members[0].environment)


def uuids(pool: Pool) -> list[str]:
    return sorted(each.device.uuid for each in pool.devices())


def user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def gpupool(*words: str, address: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpupool.cli.main", "--address", address, *words],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_process_of_no_lease_is_named_with_user_pid_and_command_within_a_report_period(
    tmp_path: Path,
) -> None:
    with running_pool(tmp_path, NODE) as pool:
        uuid = uuids(pool)[0]
        begun_s = time.monotonic()
        with started(pool, {"CUDA_VISIBLE_DEVICES": uuid}) as trespasser:
            eventually("its name", lambda: causes(pool, uuid))
            assert time.monotonic() - begun_s < NAMED_S
            (stray,) = device(pool, uuid).strays
            assert (stray.pid, stray.user, stray.uid) == (trespasser.pid, user(), os.getuid())
            assert "cuda_client" in stray.command
            assert stray.cause == "no_lease"
            assert device(pool, uuid).state == pool_pb2.DEVICE_STATE_UNAVAILABLE
            shown = gpupool("gpus", address=pool.address).stdout
            assert f"process {trespasser.pid} of {user()} (" in shown
            assert "belongs to no lease" in shown
            assert pool.summary().strays == 1
            assert "gpupool_stray_processes 1.0" in pool.daemon.get("/metrics")[1]
            others = pool.calls.acquire("others", whole(7))
            assert uuid not in lease_devices(others)
            waiting = pool.calls.waits("eighth", whole(1))
        eventually("its GPU's lease", lambda: pool.calls.get(waiting.lease_id).state == ACTIVE)
        kinds = [
            (each.kind, each.details["pid"])
            for each in pool.events("device.stray", "device.stray_gone", "process.stopped")
        ]
        pid = str(trespasser.pid)
        assert kinds == [("device.stray", pid), ("device.stray_gone", pid)]


def test_with_the_policy_stop_a_trespasser_is_ended_and_its_gpu_comes_back_by_itself(
    tmp_path: Path,
) -> None:
    with running_pool(tmp_path) as pool:
        pool.add_fleet(NODE, flags=("--helper", "--strays", "stop"))
        uuid = uuids(pool)[0]
        with started(pool, {"CUDA_VISIBLE_DEVICES": uuid}) as trespasser:
            eventually("its end", lambda: trespasser.poll() is not None)
        eventually(
            "the GPU to be free",
            lambda: device(pool, uuid).state == pool_pb2.DEVICE_STATE_FREE,
        )
        events = eventually("the history", lambda: pool.events("process.stopped"))
        assert [each.subject for each in events] == [uuid]
        assert f"process {trespasser.pid} of {user()}" in events[0].cause
        assert events[0].cause.endswith("by SIGTERM")
        assert [each.subject for each in pool.events("device.stray")] == [uuid]


def test_what_runs_under_leases_inside_its_limits_is_never_stopped(tmp_path: Path) -> None:
    with running_pool(tmp_path) as pool:
        pool.add_fleet(NODE, flags=("--helper", "--strays", "stop"))
        alone = pool.calls.acquire("alone", whole(1))
        slices = [pool.calls.acquire(f"slice-{each}", part(30)) for each in range(2)]
        with (
            started(pool, environment_of(alone), memory_mib=70_000) as one,
            started(pool, environment_of(slices[0]), memory_mib=10_000) as two,
            started(pool, environment_of(slices[1]), memory_mib=10_000) as three,
            # On the GPU of the slices, and of nobody.
            started(pool, {"CUDA_VISIBLE_DEVICES": lease_devices(slices[0])[0]}) as trespasser,
        ):
            eventually("the trespasser's end", lambda: trespasser.poll() is not None)
            eventually("a clean GPU", lambda: pool.summary().strays == 0)
            assert [each.poll() for each in (one, two, three)] == [None] * 3
            stopped = [each.details["pid"] for each in pool.events("process.stopped")]
            assert stopped == [str(trespasser.pid)]


def test_a_process_on_another_gpu_than_its_leases_is_told_as_such(tmp_path: Path) -> None:
    with running_pool(tmp_path, NODE) as pool:
        lease = pool.calls.acquire("one", whole(1))
        (mine,) = lease_devices(lease)
        other = next(uuid for uuid in uuids(pool) if uuid != mine)
        environment = {**environment_of(lease), "CUDA_VISIBLE_DEVICES": f"{mine},{other}"}
        with started(pool, environment) as process:
            eventually("its name", lambda: causes(pool, other))
            assert causes(pool, other) == {process.pid: "elsewhere"}
            assert device(pool, other).strays[0].lease_id == lease.lease_id
            assert causes(pool, mine) == {}
            assert pool.calls.get(lease.lease_id).state == ACTIVE


def test_a_member_of_a_slice_beside_its_mps_server_is_told_and_its_neighbour_runs_on(
    tmp_path: Path,
) -> None:
    with running_pool(tmp_path, NODE) as pool:
        bad, good = (pool.calls.acquire(each, part(30)) for each in ("bad", "good"))
        (uuid,) = lease_devices(bad)
        assert lease_devices(good) == [uuid]
        beside = {**environment_of(bad), "CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}
        with started(pool, beside) as bypass, started(pool, environment_of(good)) as neighbour:
            eventually("its name", lambda: causes(pool, uuid))
            assert causes(pool, uuid) == {bypass.pid: "beside_mps"}
            assert neighbour.poll() is None
            assert pool.calls.get(good.lease_id).state == ACTIVE
            assert lease_devices(pool.calls.acquire("next", part(30))) != [uuid]
        eventually("a clean GPU", lambda: not causes(pool, uuid))


def test_a_slice_that_takes_more_memory_than_it_was_given_is_told_and_can_be_stopped() -> None:
    """Its server lets it, since the largest slice on the GPU sets the server's limit."""
    folder = Path(tempfile.mkdtemp(prefix="gpupool-"))
    folder.chmod(0o755)
    try:
        with running_pool(folder) as pool:
            flags = ("--mps-programs", "--helper", "--strays", "stop")
            # Of its own name: agents of other tests look for daemons that have their GPUs.
            pool.add_fleet(f"dgx-h100:{folder.name}", flags=flags)
            small, large = pool.calls.acquire("small", part(10)), pool.calls.acquire("l", part(80))
            (uuid,) = lease_devices(small)
            assert lease_devices(large) == [uuid]
            greedy = environment_of(small)
            del greedy["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]
            with (
                started(pool, environment_of(large), memory_mib=20_000) as neighbour,
                started(pool, greedy, memory_mib=20_000) as process,
            ):
                eventually("its end", lambda: process.poll() is not None)
                (event,) = [
                    each
                    for each in eventually("its name", lambda: pool.events("device.stray"))
                    if each.details["pid"] == str(process.pid)
                ]
                assert event.details["why"] == "over_memory"
                assert event.details["lease_id"] == small.lease_id
                assert neighbour.poll() is None
                eventually("a clean GPU", lambda: not causes(pool, uuid))
    finally:
        shutil.rmtree(folder)


def test_what_a_released_lease_leaves_behind_is_ended_by_the_helper_step_by_step(
    tmp_path: Path,
) -> None:
    with running_pool(tmp_path) as pool:
        pool.add_fleet(NODE, flags=("--helper",))
        lease = pool.calls.acquire("one", whole(1))
        (uuid,) = lease_devices(lease)
        with started(pool, environment_of(lease), "--stubborn") as process:
            pool.calls.release(lease.lease_id)
            eventually("its name", lambda: causes(pool, uuid))
            assert causes(pool, uuid) == {process.pid: "outlived"}
            assert process.poll() is None
            waiting = pool.calls.waits("everything", whole(8))
            eventually("its end", lambda: process.poll() is not None)
            assert process.returncode == -9
        eventually("the next lease", lambda: pool.calls.get(waiting.lease_id).state == ACTIVE)
        (event,) = pool.events("process.stopped")
        assert event.cause.endswith("by SIGKILL")
        assert event.details["lease_id"] == lease.lease_id


def test_an_own_process_is_adopted_counts_to_the_lease_and_is_ended_with_it(
    tmp_path: Path, sockets: Path
) -> None:
    with running_pool(tmp_path) as pool:
        flags = ("--helper", "--local-socket-dir", str(sockets), "--state-dir", str(sockets / "s"))
        pool.add_fleet(NODE, flags=flags)
        address = f"unix:{sockets / 'h1.sock'}"
        lease = pool.calls.acquire("one", whole(1))
        (uuid,) = lease_devices(lease)
        with started(pool, {"CUDA_VISIBLE_DEVICES": uuid}) as process:
            eventually("its name", lambda: causes(pool, uuid))
            pid = str(process.pid)
            done = gpupool("lease", "adopt", lease.lease_id, "--pid", pid, address=address)
            assert done.returncode == 0, done.stderr
            assert f"process {pid} (" in done.stdout
            assert f"on {uuid} is of {lease.lease_id} now" in done.stdout
            eventually("it to be no stray", lambda: not causes(pool, uuid))
            (event,) = eventually("the history", lambda: pool.events("process.adopted"))
            assert event.subject == lease.lease_id
            assert event.details["actor"] == user()
            assert event.details["pid"] == pid
            # It is still the lease's when the agent has been restarted.
            pool.fleet.inject("h1", "restart-agent")
            eventually("the agent", lambda: len(pool.events("node.connected")) == 2)
            eventually(
                "the GPUs to be confirmed",
                lambda: all("confirmed" not in "".join(each.reasons) for each in pool.devices()),
            )
            assert causes(pool, uuid) == {}
            assert process.poll() is None
            pool.calls.release(lease.lease_id)
            eventually("its end", lambda: process.poll() is not None)
        eventually("the end of the lease", lambda: not pool.leases())


def test_what_may_not_be_adopted_is_refused_with_the_reason(tmp_path: Path, sockets: Path) -> None:
    with running_pool(tmp_path) as pool:
        pool.add_fleet(NODE, flags=("--local-socket-dir", str(sockets)))
        address = f"unix:{sockets / 'h1.sock'}"
        lease = pool.calls.acquire("one", whole(1))
        mine = str(os.getpid())
        for words, code, said in (
            ((lease.lease_id, "--pid", mine), 65, "is on no GPU of lease"),
            (("l-nothing", "--pid", mine), 66, "lease l-nothing is not on this node"),
            ((lease.lease_id, "--pid", "4194304"), 66, "there is no process 4194304"),
            ((lease.lease_id, "--pid", "1"), 64, "pid: 1 is not in 2..4194304"),
        ):
            done = gpupool("lease", "adopt", *words, address=address)
            assert (done.returncode, done.stdout) == (code, ""), done
            assert said in done.stderr
        done = gpupool("lease", "adopt", lease.lease_id, "--pid", mine, address=pool.address)
        assert done.returncode == 65
        assert "through the socket of its node's agent" in done.stderr
        assert pool.events("process.adopted") == []
