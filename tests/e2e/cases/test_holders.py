"""C77: the holder is gone at once, what it has left on the GPU is not."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.e2e.pool_fixture import ACTIVE, ENDED, Pool, eventually, running_pool, whole

from gpupool.v1 import pool_pb2

OFFERED_AGAIN_S = 2.0
"""From the holder's kill -9 to its GPU being offered, when nothing else runs on it."""

MEMORY_MIB = 1000
DISCONNECT_S = 12.0


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A short folder: paths of Unix sockets are."""
    with tempfile.TemporaryDirectory(prefix="gp") as folder:
        yield Path(folder)


def hold(pool: Pool, sockets: Path, *command: str) -> subprocess.Popen[str]:
    """A command under a lease on the node's only GPU, as its user would run it."""
    nodes = pool.fleet.folder / "control" / "nodes"
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "gpupool.cli.main"),
            *("--address", f"unix:{sockets / 'h1.sock'}", "run", "--gpus", "1", "--", *command),
        ],
        env={**os.environ, "GPUPOOL_SIMULATED_NODES": str(nodes)},
        stdout=subprocess.PIPE,
        text=True,
    )


def only_device(pool: Pool) -> pool_pb2.DeviceStatus:
    (device,) = pool.devices()
    return device


def is_free(pool: Pool) -> bool:
    return only_device(pool).state == pool_pb2.DEVICE_STATE_FREE


def command_of(holder: subprocess.Popen[str]) -> int:
    """The process that it runs under its lease, once it does."""
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
    (command,) = eventually("the command", lambda: children.read_text().split())
    return int(command)


def orphaned(holder: subprocess.Popen[str]) -> int:
    """kill -9 of a holder; the command that it ran goes on."""
    command = command_of(holder)
    holder.kill()
    holder.wait()
    assert holder.stdout is not None
    holder.stdout.close()
    return command


def test_c77_a_killed_holders_gpu_is_offered_again_within_two_seconds(
    tmp_path: Path, sockets: Path
) -> None:
    with running_pool(tmp_path) as pool:
        pool.add_fleet("gb10:h1", flags=("--local-socket-dir", str(sockets)))
        # The command is not on the GPU, and so is nobody's business.
        holder = hold(pool, sockets, "sleep", "600")
        eventually("the lease", lambda: pool.leases(ACTIVE))
        command_of(holder)
        killed_at = time.monotonic()
        orphan = orphaned(holder)
        try:
            eventually("the GPU to be offered", lambda: is_free(pool))
            assert time.monotonic() - killed_at < OFFERED_AGAIN_S
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_c77_an_orphan_that_holds_memory_keeps_the_gpu_out_and_is_named(
    tmp_path: Path, sockets: Path
) -> None:
    with running_pool(tmp_path) as pool:
        pool.add_fleet("gb10:h1", flags=("--local-socket-dir", str(sockets)))
        client = ("-m", "gpupool_agent.simulated.cuda_client", "--memory-mib", str(MEMORY_MIB))
        holder = hold(pool, sockets, sys.executable, *client)
        assert holder.stdout is not None
        assert holder.stdout.readline()
        orphan = orphaned(holder)
        try:
            eventually(
                "the orphan to be named",
                lambda: any(str(orphan) in reason for reason in only_device(pool).reasons),
            )
            assert not is_free(pool)
            waiting = pool.calls.waits("next", whole(1))
        finally:
            os.kill(orphan, signal.SIGKILL)
        eventually("the next lease", lambda: pool.calls.get(waiting.lease_id).state == ACTIVE)
        pool.calls.release(waiting.lease_id)


def test_c76_a_lease_whose_node_is_cut_off_is_ended_there_before_its_gpu_is_offered_again(
    tmp_path: Path,
) -> None:
    """C76: the node's own clock ends the process; nobody else gets the GPU while it lives."""
    spec = replace(whole(1), disconnect_s=DISCONNECT_S)
    with running_pool(tmp_path, "gb10:h1") as pool:
        lease = pool.calls.acquire("cut", spec)
        nodes = pool.fleet.folder / "control" / "nodes"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpupool_agent.simulated.cuda_client"),
                *("--memory-mib", str(MEMORY_MIB)),
            ],
            env={
                **os.environ,
                **lease.members[0].environment,
                "GPUPOOL_SIMULATED_NODES": str(nodes),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline()
            pool.fleet.inject("h1", "cut-off")
            cut_at = time.monotonic()
            eventually("the cut to be noticed", lambda: pool.events("node.unreachable"))
            waiting = pool.calls.waits("next", whole(1))
            eventually("the process to be ended", lambda: process.poll() is not None)
            assert time.monotonic() - cut_at >= DISCONNECT_S
            assert pool.calls.get(waiting.lease_id).state != ACTIVE
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        assert process.returncode == -signal.SIGTERM
        pool.fleet.inject("h1", "reconnect")
        eventually("the next lease", lambda: pool.calls.get(waiting.lease_id).state == ACTIVE)
        assert pool.calls.get(lease.lease_id).state in ENDED
        pool.calls.release(waiting.lease_id)
