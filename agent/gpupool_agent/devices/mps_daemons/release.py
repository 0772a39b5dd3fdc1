"""Ending what is left of a slice, and of a daemon: from asking to killing, step by step.

Every step is logged. What does not help is followed by the next; what is left at the
end is told.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable
from pathlib import Path

import structlog

from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool_agent.devices.interfaces import MpsError, ProcessTable
from gpupool_agent.devices.mps_daemons.control import COMMAND_DEADLINE_S, Control, within
from gpupool_agent.devices.mps_daemons.foreign import runs
from gpupool_agent.devices.privileged import NotPermittedError, Privileged, PrivilegedError

TERM_GRACE_S = 2.0
KILL_GRACE_S = 5.0
_LOOK_S = 0.01


class Release:
    """The ladder on one GPU's slot."""

    def __init__(
        self,
        *,
        privileged: Privileged,
        processes: ProcessTable,
        control: Control,
        slot: str,
        gpu: DeviceUuid,
        proc: Path,
    ) -> None:
        self._privileged = privileged
        self._processes = processes
        self._control = control
        self._slot = slot
        self._gpu = gpu
        self._proc = proc
        self._log = structlog.get_logger().bind(gpu=gpu)

    # -- clients -------------------------------------------------------------

    async def end_clients(self, lease_id: LeaseId | None) -> None:
        """End the clients of a lease, all of them for None; raises MpsError if one stays."""
        for server in await self._control.servers():
            for client in await self._control.clients(server):
                ticks = self._processes.start_ticks(client)
                if ticks is None:
                    continue
                if lease_id is None or await self._lease_of(client, ticks) == lease_id:
                    await self._end_client(server, client, ticks)

    async def _end_client(self, server: int, client: int, ticks: int) -> None:
        await self._try("terminate_client", client, self._control.terminate(server, client))
        for number, grace_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, KILL_GRACE_S)):
            if not runs(self._proc, client, ticks):
                break
            await self._try(
                number.name,
                client,
                self._privileged.end_process(self._gpu, client, ticks, number),
            )
            await self._gone(client, ticks, grace_s)
        deadline_s = time.monotonic() + COMMAND_DEADLINE_S
        while client in await self._control.clients(server):
            if time.monotonic() > deadline_s:
                raise MpsError(f"{self._gpu}: client {client} stays on its MPS server {server}")
            await asyncio.sleep(_LOOK_S)

    async def _lease_of(self, pid: int, ticks: int) -> str:
        facts = self._processes.describe(pid)
        if facts is not None and facts.lease_id is not None:
            return facts.lease_id
        with contextlib.suppress(NotPermittedError, PrivilegedError):
            return await self._privileged.lease_of(self._gpu, pid, ticks)
        return ""

    # -- daemon and servers --------------------------------------------------

    async def end_daemon(self) -> None:
        """Have servers and daemon end, by force in the end; raises MpsError if one stays."""
        for step in (self._ask_to_end, self._stop):
            await step()

    async def _ask_to_end(self) -> None:
        daemon = await within(
            self._privileged.mps_daemon(self._slot), COMMAND_DEADLINE_S, "no answer to mps_daemon"
        )
        if daemon is None:
            return
        with contextlib.suppress(MpsError):
            for server in await self._control.servers():
                await self._try(
                    "shutdown_server", server, self._control.shut_down(server, force=True)
                )
        await self._try("quit", daemon.pid, self._control.quit())
        await self._gone(daemon.pid, daemon.start_ticks, TERM_GRACE_S)

    async def _stop(self) -> None:
        """Kill by pid file what still runs; take away the directories."""
        self._log.info("mps.release", step="stop", slot=self._slot)
        await within(
            self._privileged.stop_mps(self._slot),
            COMMAND_DEADLINE_S + KILL_GRACE_S,
            f"{self._gpu}: its MPS daemon cannot be ended",
        )

    async def kill_server(self, pid: int, ticks: int) -> None:
        """Kill a server that its daemon has left behind; raises MpsError if it stays."""
        if not runs(self._proc, pid, ticks):
            return
        await self._try(
            "kill server",
            pid,
            self._privileged.end_process(self._gpu, pid, ticks, signal.SIGKILL),
        )
        if not await self._gone(pid, ticks, KILL_GRACE_S):
            raise MpsError(f"{self._gpu}: its MPS server {pid} cannot be ended")

    async def _gone(self, pid: int, ticks: int, within_s: float) -> bool:
        deadline_s = time.monotonic() + within_s
        while runs(self._proc, pid, ticks):
            if time.monotonic() > deadline_s:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    async def _try(self, step: str, pid: int, work: Awaitable[object]) -> None:
        """Take a step; when it fails the next one follows."""
        failed = ""
        try:
            async with asyncio.timeout(COMMAND_DEADLINE_S):
                await work
        except (MpsError, NotPermittedError, PrivilegedError) as error:
            failed = str(error)
        except TimeoutError:
            failed = f"no answer within {COMMAND_DEADLINE_S:g} s"
        self._log.info("mps.release", step=step, pid=pid, failed=failed)
