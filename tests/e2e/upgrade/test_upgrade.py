"""From the last release to this tree, under running work, and both beside each other."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.pool_fixture import (
    ACTIVE,
    Fleet,
    Pool,
    eventually,
    part,
    running_pool,
    whole,
)
from tests.e2e.upgrade.release import Release, last_release
from tests.integration.allocator_daemon import Daemon

from gpupool.v1 import pool_pb2, resources_pb2


@pytest.fixture(scope="module")
def release() -> Release:
    return last_release()


def old_daemon(release: Release) -> type[Daemon]:
    """The release's allocator, which knows no keeper."""

    class OldDaemon(Daemon):
        python = release.python

        def __init__(self, folder: Path, **settings: object) -> None:
            super().__init__(folder, **settings)
            del self._settings["keeper"]

    return OldDaemon


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short one, as paths of Unix sockets are; its name is the node's, and no other's."""
    made = Path(tempfile.mkdtemp(prefix="gpupool-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def fleet_of(pool: Pool, python: str, *flags: str) -> Fleet:
    """A node whose agent keeps its state over upgrades."""
    state = ("--state-dir", str(pool.folder / "agents"), "--local-socket-dir", str(pool.folder))
    node = f"dgx-h100:{pool.folder.name}"
    fleet = Fleet(pool.folder / "hosts", pool.address, [node], *state, *flags)
    fleet.python = python
    pool.fleets.append(fleet)
    fleet.start()
    pool.until_offered(fleet)
    return fleet


def environment(pool: Pool, **more: str) -> dict[str, str]:
    nodes = pool.fleet.folder / "control" / "nodes"
    return {"PATH": os.environ["PATH"], "GPUPOOL_SIMULATED_NODES": str(nodes), **more}


@contextmanager
def client(python: str, pool: Pool, lease: resources_pb2.Lease) -> Generator[Any]:
    """A CUDA client under a lease, at work for the block."""
    started = subprocess.Popen(
        [python, "-m", "gpupool_agent.simulated.cuda_client", "--memory-mib", "1000"],
        env=environment(pool, **lease.members[0].environment),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout is not None
        assert json.loads(started.stdout.readline())["memory_mib"] == 1000
        yield started
    finally:
        started.kill()
        started.communicate()


@contextmanager
def holder(python: str, pool: Pool) -> Generator[subprocess.Popen[str]]:
    """``gpupool run`` on a whole GPU, through its node's socket."""
    socket = pool.folder / f"{pool.folder.name}.sock"
    command = ("-m", "gpupool_agent.simulated.cuda_client", "--memory-mib", "1000")
    started = subprocess.Popen(
        [
            *(python, "-m", "gpupool.cli.main", "--address", f"unix:{socket}"),
            *("run", "--gpus", "1", "--", python, *command),
        ],
        env=environment(pool),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout is not None
        assert started.stdout.readline()
        yield started
    finally:
        started.terminate()
        started.communicate()


def held(pool: Pool) -> list[tuple[str, int, int, tuple[str, ...]]]:
    """Every lease: its state, its token and where it is."""
    return sorted(
        (
            lease.lease_id,
            lease.state,
            lease.members[0].token,
            tuple(share.device_uuid for share in lease.members[0].place.devices),
        )
        for lease in pool.leases()
    )


def versions(pool: Pool) -> set[str]:
    return {node.agent_version for node in pool.nodes()}


@pytest.mark.parametrize("mps", [(), ("--mps-programs",)], ids=["values", "programs"])
def test_allocator_and_agent_are_upgraded_under_a_slice_and_a_held_gpu(
    folder: Path, release: Release, mps: tuple[str, ...]
) -> None:
    """As docs/install.md says, the allocator first: leases, tokens and holders go on."""
    with running_pool(folder, daemon=old_daemon(release)) as pool:
        fleet = fleet_of(pool, release.python)
        lease = pool.calls.acquire("slice", part(30))
        with (
            client(release.python, pool, lease) as work,
            holder(release.python, pool) as run,
        ):
            eventually("both leases", lambda: len(pool.leases(ACTIVE)) == 2)
            pool.check()
            before = held(pool)
            upgrade_allocator(pool)
            eventually("the old agent", lambda: fleet_is_connected(pool))
            assert held(pool) == before
            last = pool.events()[-1].sequence
            fleet.end()
            fleet.python, fleet.flags = Fleet.python, (*fleet.flags, *mps)
            fleet.start()
            pool.check()
            eventually("no trouble", lambda: not troubles(pool))
            changed = {each.subject for each in pool.events("member.preparing")}
            now = {lease_id: rest for lease_id, *rest in held(pool)}
            for lease_id, *rest in before:
                # What is prepared anew has an event, and a token of its own.
                assert now[lease_id][0] == ACTIVE
                assert (now[lease_id] == rest) != (lease_id in changed)
                assert now[lease_id][2] == rest[2]
            about = [each for each in pool.events() if each.sequence > last]
            kinds = {each.kind for each in about if each.subject in now}
            assert kinds <= {"member.preparing", "lease.active"}
            assert (work.poll(), run.poll()) == (None, None)
        # Whose holder is gone is over; the slice is its client's to release.
        eventually(
            "one lease", lambda: [each.lease_id for each in pool.leases()] == [lease.lease_id]
        )
        pool.calls.release(lease.lease_id)
        eventually("its end", lambda: pool.leases() == [])
        pool.until_offered(fleet)
        assert pool.calls.acquire("again", part(40)).state == ACTIVE


def upgrade_allocator(pool: Pool) -> None:
    """The same store and ports under this tree's program."""
    old = pool.daemon
    assert old.terminate() == 0
    new = Daemon(pool.folder, **{**old._settings, "keeper": "false"})
    new.start()
    pool.daemon = new
    pool.reconnect()


def fleet_is_connected(pool: Pool) -> bool:
    return all(node.state == pool_pb2.NODE_STATE_CONNECTED for node in pool.nodes())


def troubles(pool: Pool) -> list[str]:
    return [reason for each in pool.devices() for reason in each.reasons]


@pytest.mark.parametrize("mps", [(), ("--mps-programs",)], ids=["values", "programs"])
def test_a_new_agent_serves_under_the_last_releases_allocator(
    folder: Path, release: Release, mps: tuple[str, ...]
) -> None:
    with running_pool(folder, daemon=old_daemon(release)) as pool:
        fleet_of(pool, Fleet.python, *mps)
        take_and_give_back(pool, Fleet.python)


def test_the_last_releases_agent_serves_under_a_new_allocator(
    folder: Path, release: Release
) -> None:
    with running_pool(folder) as pool:
        fleet_of(pool, release.python)
        take_and_give_back(pool, release.python)


def take_and_give_back(pool: Pool, python: str) -> None:
    """A slice, a gang's member and a held GPU, each with its work."""
    lease = pool.calls.acquire("slice", part(30))
    gang = pool.calls.acquire("gang", whole(2))
    for each in (lease, gang):
        assert each.state == ACTIVE, each.explanation.summary
    with (
        client(python, pool, lease),
        client(python, pool, gang),
        holder(python, pool),
    ):
        eventually("three leases", lambda: len(pool.leases(ACTIVE)) == 3)
        pool.check()
    eventually("the holder's end", lambda: len(pool.leases()) == 2)
    for each in (lease, gang):
        pool.calls.release(each.lease_id)
    eventually("all to end", lambda: pool.leases() == [])
    pool.until_offered(pool.fleet)
