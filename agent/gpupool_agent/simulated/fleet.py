"""Many simulated hosts in one process: start, watch, break and stop them."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpupool_agent.simulated import control
from gpupool_agent.simulated.directory import ControlDirectory
from gpupool_agent.simulated.faults import ActionError, apply
from gpupool_agent.simulated.host import SimulatedHost

STARTS_AT_ONCE = 32
"""Agents that start and connect at the same time. All at once would share the
processor so thinly that each hits its deadlines, and then tries again."""

_LOOK_S = 0.05
LOOKS_A_TURN = 200
"""How often one of them is looked at before the next has its turn; it goes on beside."""

_PROGRESS_S = 1.0


class Fleet:
    """The hosts of one process, and their control socket in ``directory``."""

    def __init__(self, directory: ControlDirectory, hosts: Sequence[SimulatedHost]) -> None:
        self.directory = directory
        self.hosts = {host.node.node_id: host for host in hosts}
        self._control: asyncio.Server | None = None

    async def start(self) -> None:
        """Open the control socket and switch every host on, in turn."""
        self._control = await control.serve(self.directory.path, self._handle)
        room = asyncio.Semaphore(STARTS_AT_ONCE)

        async def start(host: SimulatedHost) -> None:
            async with room:
                await host.start()
                for _ in range(LOOKS_A_TURN):
                    if host.connected:
                        break
                    await asyncio.sleep(_LOOK_S)

        async with asyncio.TaskGroup() as group:
            for host in self.hosts.values():
                group.create_task(start(host))

    async def wait_connected(self, progress: Callable[[int], None]) -> None:
        """Wait until every agent is connected; tells ``progress`` how many are."""
        told, told_s = -1, 0.0
        while True:
            connected = sum(host.connected for host in self.hosts.values())
            due = time.monotonic() - told_s >= _PROGRESS_S
            if connected != told and (due or connected == len(self.hosts)):
                progress(connected)
                told, told_s = connected, time.monotonic()
            if connected == len(self.hosts):
                return
            await asyncio.sleep(_LOOK_S)

    async def wait_failed(self) -> None:
        """Wait until an agent fails, which none should; raises what it raised."""
        failed = [host.failed for host in self.hosts.values()]
        await asyncio.wait(failed, return_when=asyncio.FIRST_COMPLETED)
        for each in failed:
            if each.done():
                each.result()

    async def stop(self) -> None:
        """Stop every agent, leaving what runs under leases, and close the socket."""
        if self._control is not None:
            self._control.close()
            await self._control.wait_closed()
        await asyncio.gather(*(host.stop() for host in self.hosts.values()))

    def write_ready_file(self, path: Path, connected_s: float) -> None:
        """Say that all are connected, after how long, and where each one is; atomic."""
        content = {
            "pid": os.getpid(),
            "control": str(self.directory.path),
            "nodes_directory": str(self.directory.nodes),
            "connected_s": round(connected_s, 3),
            "nodes": {node_id: host.show() for node_id, host in self.hosts.items()},
        }
        temporary = path.with_name(f"{path.name}.new")
        temporary.write_text(json.dumps(content))
        temporary.replace(path)

    async def _handle(self, node: str, action: str, arguments: list[str]) -> Any:
        host = self.hosts.get(node)
        if host is None:
            raise ActionError(f"node {node!r} is not one of this fleet's {len(self.hosts)} nodes")
        return await apply(host, action, arguments)
