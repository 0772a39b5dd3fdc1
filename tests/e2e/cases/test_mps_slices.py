"""Slices whose MPS is programs: the daemon's stand-in, its servers and CUDA clients."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.pool_fixture import (
    ACTIVE,
    PENDING,
    Pool,
    eventually,
    part,
    running_pool,
    whole,
)

from gpupool import Client
from gpupool.errors import InvalidRequestError
from gpupool.v1 import pool_pb2, resources_pb2
from gpupool_agent.devices.mps_daemons.foreign import MpsProcess, mps_processes
from gpupool_agent.simulated.mps_control.host import FAULTS_FILE
from gpupool_agent.simulated.mps_control.launcher import write_launcher

FAILED = resources_pb2.LEASE_STATE_FAILED
RELEASING = resources_pb2.LEASE_STATE_RELEASING
SM_COUNT = 132
EXCLUSIVE_PROCESS = 3


@contextmanager
def sliced_pool(**settings: object) -> Generator[Pool]:
    """A pool of one DGX H100 whose MPS daemons are programs, in a short directory."""
    folder = Path(tempfile.mkdtemp(prefix="gpupool-"))
    try:
        folder.chmod(0o755)
        with running_pool(folder, **settings) as pool:
            # Of its own name: agents of other tests look for daemons that have their GPUs.
            pool.add_fleet(f"dgx-h100:{folder.name}", flags=("--mps-programs",))
            yield pool
            pool.drain()
            assert left(pool) == []
    finally:
        shutil.rmtree(folder)


def shown(pool: Pool) -> dict[str, Any]:
    (node,) = pool.fleet.node_ids
    found: dict[str, Any] = pool.fleet.inject(node, "show")
    return found


def hardware(pool: Pool) -> Path:
    return Path(shown(pool)["directory"])


def gpus(pool: Pool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = shown(pool)["gpus"]
    return found


def processes(pool: Pool) -> list[MpsProcess]:
    root = str(hardware(pool))
    return [
        each
        for each in mps_processes(Path("/proc"))
        if (each.environment or {}).get("CUDA_MPS_PIPE_DIRECTORY", "").startswith(root)
    ]


def left(pool: Pool) -> list[str]:
    """What of MPS is on the node."""
    return [
        *(f"process {each.pid}" for each in processes(pool)),
        *(str(path) for path in (hardware(pool) / "mps").glob("*")),
        *(str(path) for path in (hardware(pool) / "mps-records").glob("*")),
        *(gpu["uuid"] for gpu in gpus(pool) if gpu["compute_mode"]),
    ]


def place(lease: resources_pb2.Lease) -> resources_pb2.DeviceShare:
    (share,) = lease.members[0].place.devices
    return share


def client(
    pool: Pool, environment: Mapping[str, str], *flags: str, **more: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gpupool_agent.simulated.cuda_client", *flags],
        env={
            "PATH": os.environ["PATH"],
            "GPUPOOL_SIMULATED_NODE": str(hardware(pool)),
            **environment,
            **more,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def held(started: subprocess.Popen[str]) -> dict[str, Any]:
    """What a client says once it holds its memory."""
    assert started.stdout is not None
    line = started.stdout.readline()
    assert line, started.communicate()[1]
    said: dict[str, Any] = json.loads(line)
    return said


def end(*started: subprocess.Popen[str]) -> None:
    for each in started:
        each.kill()
        each.communicate()


def test_c07_what_is_given_is_whole_multiprocessors_and_never_over_100_percent() -> None:
    """C07: promised and enforced agree to the grain, which is shown; the sum is at most 100 %."""
    with sliced_pool() as pool:
        asked = (10, 20, 30, 40)
        leases = [pool.calls.acquire(f"r{share}", part(share)) for share in asked]
        assert len({place(lease).device_uuid for lease in leases}) == 1
        total_milli_pct = 0
        for lease, share in zip(leases, asked, strict=True):
            member = lease.members[0]
            (given,) = member.given
            assert given.sm_count == SM_COUNT * share // 100
            assert given.share_milli_pct == given.sm_count * 100_000 // SM_COUNT
            assert 0 <= 1000 * share - given.share_milli_pct < 100_000 / SM_COUNT
            total_milli_pct += given.share_milli_pct
            started = client(pool, member.environment, "--memory-mib", "10")
            assert held(started)["sm_count"] == given.sm_count
            end(started)
        assert total_milli_pct <= 100_000
        printed = subprocess.run(
            [Path(sys.executable).parent / "gpupool", "lease", "show", leases[0].lease_id],
            env={**os.environ, "GPUPOOL_ADDRESS": pool.address},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "13 SMs (9.848 %)" in printed


def test_c14_a_daemon_killed_under_three_leases_degrades_them_until_it_is_replaced() -> None:
    """C14: found within seconds, told with the reason, nothing new there, and repaired."""
    with sliced_pool() as pool:
        leases = [pool.calls.acquire(f"r{number}", part(20)) for number in range(3)]
        uuid = place(leases[0]).device_uuid
        started = [client(pool, lease.members[0].environment) for lease in leases]
        for each in started:
            held(each)
        (hardware(pool) / FAULTS_FILE).write_text("no_server 1")
        for process in processes(pool):
            os.kill(process.pid, signal.SIGKILL)
        begun_s = time.monotonic()

        def degraded() -> bool:
            now = [pool.calls.get(lease.lease_id) for lease in leases]
            return all(each.members[0].degraded for each in now)

        eventually("the three leases to be degraded", degraded, within_s=10)
        assert time.monotonic() - begun_s < 5
        assert "is gone" in pool.calls.get(leases[0].lease_id).members[0].degraded
        (device,) = [each for each in pool.devices() if each.device.uuid == uuid]
        eventually("the reason on the GPU", lambda: reasons(pool, uuid), within_s=10)
        assert device.state == pool_pb2.DEVICE_STATE_SLICED
        other = pool.calls.acquire("elsewhere", part(20))
        assert place(other).device_uuid != uuid
        (hardware(pool) / FAULTS_FILE).write_text("")
        eventually("the leases to be restored", lambda: not degraded() and not reasons(pool, uuid))
        kinds = [
            each.kind
            for each in pool.events("lease.degraded", "lease.restored")
            if each.subject == leases[0].lease_id
        ]
        assert kinds == ["lease.degraded", "lease.restored"]
        end(*started)
        again = client(pool, leases[0].members[0].environment)
        assert held(again)["sm_count"] == SM_COUNT * 20 // 100
        end(again)


def reasons(pool: Pool, uuid: str) -> list[str]:
    (device,) = [each for each in pool.devices() if each.device.uuid == uuid]
    return list(device.reasons)


def test_c16_without_a_working_daemon_a_lease_is_not_handed_over() -> None:
    """C16: refused with the reason instead of running unconfined."""
    with sliced_pool() as pool:
        (hardware(pool) / FAULTS_FILE).write_text("no_server 1")
        lease = pool.calls.acquire("r1", part(10))
        assert lease.state == FAILED
        assert "MPS server" in lease.explanation.summary
        assert not lease.members[0].environment
        (hardware(pool) / FAULTS_FILE).write_text("")


def test_c22_a_gpu_whose_daemon_does_not_start_costs_no_request_while_others_are_free() -> None:
    """C22: that GPU is kept out with the reason; whoever was to have it gets another one."""
    with sliced_pool() as pool:
        bad = gpus(pool)[0]["uuid"]
        program = hardware(pool) / "bin" / "nvidia-cuda-mps-control"
        text = program.read_text()
        check = f'if os.environ.get("CUDA_VISIBLE_DEVICES") == "{bad}": sys.exit("broken")\n'
        program.write_text(text.replace("import os, sys\n", "import os, sys\n" + check))
        leases = [pool.calls.acquire(f"r{number}", part(60)) for number in range(7)]
        assert [lease.state for lease in leases] == [ACTIVE] * 7
        assert bad not in {place(lease).device_uuid for lease in leases}
        assert len(pool.events("member.refused")) == 1
        (kept,) = [each for each in pool.devices() if each.device.uuid == bad]
        assert "no MPS daemon: broken" in " ".join(kept.reasons)
        program.write_text(text)


def test_c16_with_the_pipe_gone_a_client_fails_instead_of_having_the_whole_gpu() -> None:
    """C16: the exclusive mode keeps an unconfined start off."""
    with sliced_pool() as pool:
        lease = pool.calls.acquire("r1", part(10))
        started = client(pool, lease.members[0].environment, CUDA_MPS_PIPE_DIRECTORY="/nowhere")
        assert started.wait(30) == 7
        end(started)


@pytest.mark.skipif(os.getuid() != 0, reason="only root has servers of two users")
def test_c17_users_are_never_mixed_on_a_gpu() -> None:
    """C17: the second user's slice is on another GPU, and the reason says so when none is free."""
    with sliced_pool() as pool:
        first = pool.calls.acquire("a", replace(part(10), uid=0))
        second = pool.calls.acquire("b", replace(part(10), uid=65_534))
        assert place(first).device_uuid != place(second).device_uuid
        rest = pool.calls.acquire("rest", whole(6))
        waiting = pool.calls.waits("c", replace(part(10), uid=65_533))
        assert waiting.state == PENDING
        assert "uid" in {cause.code for cause in waiting.explanation.causes}
        for lease in (first, second):
            server = [each for each in processes(pool) if each.uid == lease.spec.uid]
            assert server
        pool.calls.release(rest.lease_id)
        eventually("the third", lambda: pool.calls.get(waiting.lease_id).state == ACTIVE)


def test_c19_a_foreign_daemon_takes_its_gpu_out_of_the_pool() -> None:
    """C19: found, named and refused; ours manage exactly one GPU each."""
    with sliced_pool() as pool:
        uuids = [gpu["uuid"] for gpu in gpus(pool)]
        foreign = hardware(pool) / "foreign"
        program = write_launcher(foreign, node=hardware(pool))
        environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(foreign / "p"),
            "CUDA_MPS_LOG_DIRECTORY": str(foreign / "l"),
            "CUDA_VISIBLE_DEVICES": uuids[0],
        }
        subprocess.run([program, "-d"], env=environment, check=True)
        eventually("the reason", lambda: "foreign MPS daemon" in "".join(reasons(pool, uuids[0])))
        lease = pool.calls.acquire("r1", part(10))
        assert place(lease).device_uuid != uuids[0]
        own = [each for each in processes(pool) if "foreign" not in str(each.environment)]
        assert {(each.environment or {})["CUDA_VISIBLE_DEVICES"] for each in own} == {
            place(lease).device_uuid
        }
        subprocess.run([program], env=environment, input="quit\n", text=True, check=True)
        eventually("it is offered again", lambda: not reasons(pool, uuids[0]))


def test_c20_slices_of_two_gpus_for_one_process_are_refused() -> None:
    """C20: a process can use one pipe; the request is refused, nothing half works."""
    with sliced_pool() as pool, Client(pool.address) as sdk:
        with pytest.raises(InvalidRequestError, match="one MPS daemon"):
            sdk.acquire(gpus=1.5)
        assert pool.leases() == []
        # As two members each has a process, and so a pipe, of its own.
        lease = pool.calls.acquire("two", part(60, replicas=2))
        pipes = {member.environment["CUDA_MPS_PIPE_DIRECTORY"] for member in lease.members}
        assert len(pipes) == 2


def test_c22_a_daemon_that_refuses_to_quit_costs_neither_node_nor_gpu() -> None:
    """C22: the ladder ends it by force; meanwhile and afterwards the other GPUs work."""
    with sliced_pool() as pool:
        lease = pool.calls.acquire("r1", part(10))
        uuid = place(lease).device_uuid
        hung = client(pool, lease.members[0].environment, "--stubborn", "--work", "busy")
        held(hung)
        (hardware(pool) / FAULTS_FILE).write_text("refuse_quit 1\nhang shutdown_server")
        pool.calls.release(lease.lease_id)
        others = pool.calls.acquire("others", whole(7))
        assert uuid not in {share.device_uuid for share in others.members[0].place.devices}
        eventually("it ended", lambda: pool.calls.get(lease.lease_id).state != RELEASING)
        assert hung.wait(10) == -signal.SIGKILL
        end(hung)
        (hardware(pool) / FAULTS_FILE).write_text("")
        eventually("it is offered again", lambda: not reasons(pool, uuid))
        again = pool.calls.acquire("again", part(10))
        assert place(again).device_uuid == uuid


def test_a_killed_holder_of_a_slice_costs_its_gpu_less_than_two_seconds() -> None:
    """From kill -9 of the holder to the GPU offered as free again."""
    with sliced_pool() as pool:
        lease = pool.calls.acquire("r1", part(10))
        started = client(pool, lease.members[0].environment)
        held(started)
        begun_s = time.monotonic()
        started.kill()
        started.wait()
        pool.calls.release(lease.lease_id)
        uuid = place(lease).device_uuid

        def free() -> bool:
            (device,) = [each for each in pool.devices() if each.device.uuid == uuid]
            return device.state == pool_pb2.DEVICE_STATE_FREE

        eventually("the GPU to be free", free)
        assert time.monotonic() - begun_s < 2
        end(started)


def test_slices_on_a_gpu_that_falls_off_the_bus_end_at_once_and_its_mode_is_restored_later() -> (
    None
):
    """Its compute mode can be neither set nor read meanwhile: that keeps the GPU alone."""
    with sliced_pool() as pool:
        leases = [pool.calls.acquire(f"r{number}", part(10)) for number in range(2)]
        gpu = place(leases[0]).device_uuid
        assert {place(lease).device_uuid for lease in leases} == {gpu}
        (node,) = pool.fleet.node_ids
        index = str(next(at for at, each in enumerate(gpus(pool)) if each["uuid"] == gpu))
        pool.fleet.inject(node, "gpu-lost", index)
        eventually("the leases to have ended", lambda: not pool.leases())
        assert not processes(pool)
        assert len(left(pool)) == 1, "a record of the mode that is to be restored"
        pool.fleet.inject(node, "gpu-back", index)
        eventually("the mode to be restored", lambda: not left(pool))


@pytest.mark.parametrize(
    "rounds", [1, pytest.param(200, marks=(pytest.mark.slow, pytest.mark.timeout(7200)))]
)
def test_48_slices_on_eight_gpus_come_and_go_and_leave_nothing(rounds: int) -> None:
    """Six on each of eight GPUs; after each round everything is looked for by listing."""
    with sliced_pool(grain_pct=1) as pool:
        for number in range(rounds):
            # A seventh would be over 100 %.
            leases = [pool.calls.acquire(f"r{number}-{each}", part(16)) for each in range(48)]
            assert all(lease.state == ACTIVE for lease in leases)
            managed = [(each.environment or {})["CUDA_VISIBLE_DEVICES"] for each in processes(pool)]
            assert set(managed) == {gpu["uuid"] for gpu in gpus(pool)}
            for lease in leases:
                pool.calls.release(lease.lease_id)
            eventually("all to have ended", lambda: not pool.leases())
            eventually("nothing to be left", lambda: not left(pool))
            # Nor was anything wrong meanwhile: nobody's daemon was taken for a foreign one.
            assert pool.events("fault.opened", "lease.degraded") == [], number
