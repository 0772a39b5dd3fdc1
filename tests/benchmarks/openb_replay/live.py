"""A pool of the trace's hosts: one allocator daemon, and real agents in a few processes."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.demo_programs import DemoError, Program, Programs
from tests.benchmarks.openb_replay.figures import Usage
from tests.benchmarks.openb_replay.trace import TraceNode

from gpupool import AsyncClient
from gpupool.errors import UnavailableError
from gpupool.model.ids import NodeId
from gpupool.model.views import PoolSummary

START_S = 300.0
"""Longest time until all hosts are there, on a machine with much else to do."""

PROGRESS_S = 5.0
LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """One process of simulated hosts."""

    program: Program
    control: Path
    node_ids: tuple[NodeId, ...]


class LivePool:
    """The pool; ``start`` and ``stop`` it. Everything it writes is under ``work``."""

    def __init__(self, work: Path, nodes_file: Path, hosts: Sequence[TraceNode]) -> None:
        logs = work / "logs"
        logs.mkdir(parents=True)
        self.programs = Programs(logs, {})
        self.address = ""
        self.connected_s = self.offered_s = 0.0
        self._work = work
        self._nodes_file = nodes_file
        self._hosts = hosts
        self._fleets: list[Fleet] = []
        self._allocator_pid = 0

    async def start(self, fleets: int) -> None:
        """Starts everything; returns once every GPU is offered. DemoError."""
        ready = self._work / "allocator.json"
        allocator = self.programs.start(
            "gpupool-allocator",
            [
                *("gpupool-allocator", "--grain-pct", "1", "--log-level", "warning"),
                *("--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"),
                *("--state-dir", self._work / "allocator", "--ready-file", ready),
            ],
        )
        served = await asyncio.to_thread(self.programs.ready, allocator, ready)
        self.address = f"127.0.0.1:{served['grpc']}"
        # Of the process that serves, a child of the one that was started.
        self._allocator_pid = served["pid"]
        begun_s = time.monotonic()
        for number in range(fleets):
            self._fleets.append(self._start_fleet(number, fleets))
        await self._until_offered(begun_s)

    def _start_fleet(self, number: int, fleets: int) -> Fleet:
        # The path of a Unix socket is short, and this one lies in the control directory.
        control = self._work / f"fleet-{number}"
        program = self.programs.start(
            f"fleet-{number}",
            [
                *("python", "-m", "gpupool_agent.simulated", "--allocator", self.address),
                *("--nodes-csv", self._nodes_file, "--part", f"{number + 1}/{fleets}"),
                *("--control", control, "--state-dir", self._work / "agents"),
            ],
        )
        names = [NodeId(host.name) for host in self._hosts[number::fleets]]
        return Fleet(program=program, control=control, node_ids=tuple(names))

    async def _until_offered(self, begun_s: float) -> None:
        gpus = sum(host.gpus for host in self._hosts)
        told_s = begun_s
        async with AsyncClient(self.address) as client:
            while True:
                self.programs.check_alive()
                pool = await _summary(client)
                now = time.monotonic()
                if pool is not None:
                    if pool.nodes_connected == len(self._hosts) and not self.connected_s:
                        self.connected_s = now - begun_s
                    if pool.devices_free == gpus and self.connected_s:
                        self.offered_s = now - begun_s
                        return
                    if now - told_s >= PROGRESS_S:
                        told_s = now
                        print(
                            f"  {pool.nodes_connected} of {len(self._hosts)} nodes connected, "
                            f"{pool.devices_free} of {gpus} GPUs offered",
                            flush=True,
                        )
                if now - begun_s > START_S:
                    raise DemoError(f"not all hosts were offered within {START_S:.0f} s")
                await asyncio.sleep(LOOK_S)

    def stop(self) -> list[str]:
        """Ends everything; the names of programs that had to be killed."""
        return self.programs.stop()

    @property
    def fleets(self) -> Mapping[Path, Sequence[NodeId]]:
        """Which nodes answer in which control directory."""
        return {fleet.control: fleet.node_ids for fleet in self._fleets}

    def usage(self) -> tuple[Usage, Usage]:
        """Of the allocator, and of the fleets. DemoError when one has ended."""
        self.programs.check_alive()
        return (
            Usage.of([self._allocator_pid]),
            Usage.of([fleet.program.process.pid for fleet in self._fleets]),
        )


async def _summary(client: AsyncClient) -> PoolSummary | None:
    try:
        return await client.pool()
    except UnavailableError:
        return None  # busy with a thousand agents; asked again, up to START_S
