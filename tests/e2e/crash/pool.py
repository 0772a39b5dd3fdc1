"""The pool that crashes: the real allocator, and simulated hosts that stay up."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from scripts.demo_programs import Programs
from tests.benchmarks.openb_replay import checks
from tests.benchmarks.openb_replay.picture import Picture, look
from tests.integration.allocator_daemon import Daemon

from gpupool import AsyncClient
from gpupool.model.ids import NodeId
from gpupool.model.lease import Lease, LeaseState
from gpupool.model.views import NodeState
from gpupool_allocator.daemon import STORE_FILE

HOSTS = 40
KIND = "dgx-h100"
CALM_S = 90.0
"""Longest time until every node is back, on a machine with much else to do."""

SELDOM_S = "60"
"""How often agents look at their GPUs unasked: rarely, the cores are for the crashes."""

MOVING = frozenset({LeaseState.PENDING, LeaseState.GRANTED, LeaseState.RELEASING})


class CrashingPool:
    """One allocator on an SQLite file, and a fleet."""

    def __init__(self, folder: Path) -> None:
        self.daemon = Daemon(
            folder / "allocator",
            log_level="warning",
            # More than one round ends, and little to list in the next.
            ended_kept=1000,
            # Agents and clients of this test share two cores with the allocator.
            heartbeat_timeout_s=60,
        )
        self.start_s = 0.0
        self._folder = folder
        self._control = folder / "c"
        logs = folder / "logs"
        logs.mkdir()
        (folder / "allocator").mkdir()
        self._programs = Programs(logs, {})
        self._nodes: list[NodeId] = []

    @property
    def address(self) -> str:
        """Where it serves."""
        return f"127.0.0.1:{self.daemon.grpc}"

    def start_allocator(self) -> None:
        """Starts it and waits until it serves."""
        begun_s = time.monotonic()
        self.daemon.start()
        self.start_s = time.monotonic() - begun_s

    def start_fleet(self) -> None:
        """Starts the hosts and waits until all are connected."""
        ready = self._folder / "fleet.json"
        fleet = self._programs.start(
            "fleet",
            [
                *("python", "-m", "gpupool_agent.simulated", "--allocator", self.address),
                *("--count", f"{KIND}={HOSTS}", "--ready-file", ready),
                *("--control", self._control, "--state-dir", self._folder / "agents"),
                *("--usage-period-s", SELDOM_S, "--telemetry-period-s", SELDOM_S),
                *("--inventory-period-s", SELDOM_S),
            ],
        )
        self._programs.ready(fleet, ready, limit_s=CALM_S)
        self._nodes = [NodeId(name) for name in json.loads(ready.read_text())["nodes"]]

    def kill_in_commit(self, delay_s: float, patience_s: float) -> bool:
        """SIGKILL ``delay_s`` after the store's log is next written; False: it was not.

        Blocks, in a thread of its own: the moment is shorter than a turn of the loop.
        """
        log = self.daemon.state_dir / f"{STORE_FILE}-wal"
        before = log.stat().st_mtime_ns
        deadline = time.monotonic() + patience_s
        while log.stat().st_mtime_ns == before:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0002)
        time.sleep(delay_s)
        self.daemon.kill()
        return True

    async def everything(self) -> list[Lease]:
        """All leases that the allocator knows, the ended ones too."""
        async with AsyncClient(self.address, timeout_s=CALM_S) as client:
            return [lease async for lease in client.list_leases(states=list(LeaseState))]

    async def until_calm(self) -> tuple[Picture, list[str]]:
        """How it looks when nothing moves any more, and what is wrong then.

        Nodes' books must agree with the allocator's: what is wrong is looked at again
        until it is gone or the time is over.
        """
        deadline = time.monotonic() + CALM_S
        async with AsyncClient(self.address, timeout_s=CALM_S) as client:
            while True:
                self._programs.check_alive()
                picture = await look(client, {self._control: self._nodes})
                wrong = list(wrong_when_calm(picture))
                if not wrong or time.monotonic() > deadline:
                    return picture, wrong
                await asyncio.sleep(0.05)

    def end(self) -> None:
        """Ends everything."""
        self.daemon.end()
        self._programs.stop()


def wrong_when_calm(picture: Picture) -> Iterator[str]:
    """Nodes that are missing, leases on their way, over-booking, books that disagree."""
    for node in picture.nodes:
        if node.state is not NodeState.CONNECTED:
            yield f"node {node.node_id} is {node.state}"
    for lease in picture.leases:
        if lease.state in MOVING:
            yield f"lease {lease.lease_id} is {lease.state}: {lease.explanation.summary}"
    yield from checks.wrong_capacity(picture)
    yield from checks.wrong_sums(picture)
    yield from checks.wrong_agents(picture)


@asynccontextmanager
async def crashing_pool(folder: Path) -> AsyncGenerator[CrashingPool, None]:
    """A pool that serves, with all its hosts connected."""
    pool = CrashingPool(folder)
    try:
        pool.start_allocator()
        await asyncio.to_thread(pool.start_fleet)
        yield pool
    finally:
        await asyncio.to_thread(pool.end)
