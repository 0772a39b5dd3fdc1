"""What the agent does through its root helper, and saying so where it has none."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from gpupool.model.ids import DeviceUuid
from gpupool_agent.core.events import NodeEvent, NodeFault
from gpupool_agent.core.readings import DeviceProcess, DeviceState
from gpupool_agent.devices.helper_client import WITHOUT
from gpupool_agent.devices.privileged import NotPermittedError, Privileged, PrivilegedError

CHECK_S = 60.0
READ_S = 2.0
"""Longest time that a report waits for the helper to read whose processes are."""

END_S = 5.0
"""Longest wait for a signal to be sent: less than the grace before the next one."""

NO_HELPER_FAULT = "no_root_helper"


class Privileges:
    """The root helper of one agent. None: nothing on its machine needs root."""

    def __init__(self, privileged: Privileged | None, handle: Callable[[NodeEvent], None]) -> None:
        self._privileged = privileged
        self._handle = handle
        self._leases: dict[tuple[int, int], str] = {}
        self._log = structlog.get_logger()
        self.missing = ""
        """Why there is no helper; empty where there is one or none is needed."""

    async def watch(self) -> None:
        """Look for the helper again and again; a change is logged and reported once."""
        if self._privileged is None:
            return
        while True:
            missing = await self._look(self._privileged)
            if bool(missing) != bool(self.missing):
                self._tell(missing)
            self.missing = missing
            await asyncio.sleep(CHECK_S)

    async def end_process(self, gpu: DeviceUuid, pid: int, start_ticks: int, number: int) -> str:
        """Signal a process of another user; why not, where that fails."""
        if self._privileged is None:
            return "this machine has no root helper"
        try:
            async with asyncio.timeout(END_S):
                await self._privileged.end_process(gpu, pid, start_ticks, number)
        except (NotPermittedError, PrivilegedError) as error:
            return str(error)
        except TimeoutError:
            return f"the helper has not answered for {END_S:g} s"
        return ""

    async def with_leases(self, devices: tuple[DeviceState, ...]) -> tuple[DeviceState, ...]:
        """Fill in the lease of each process whose environment only root may read.

        Each is asked about once; what cannot be told stays None, and is asked again.
        """
        unknown = [
            (device.uuid, process)
            for device in devices
            for process in device.processes or ()
            if process.lease_id is None
        ]
        if not unknown or self._privileged is None or self.missing:
            return devices
        asked = {(process.pid, process.start_ticks) for _, process in unknown}
        self._leases = {key: lease for key, lease in self._leases.items() if key in asked}
        reading = [
            asyncio.create_task(self._read(self._privileged, gpu, process))
            for gpu, process in unknown
            if (process.pid, process.start_ticks) not in self._leases
        ]
        if reading:
            _, late = await asyncio.wait(reading, timeout=READ_S)
            for task in late:
                task.cancel()
        return tuple(self._filled(device) for device in devices)

    async def _look(self, privileged: Privileged) -> str:
        try:
            await privileged.cdi_leases()
        except (NotPermittedError, PrivilegedError) as error:
            return str(error)
        return ""

    def _tell(self, missing: str) -> None:
        if missing:
            cannot = sorted(WITHOUT.values())
            self._log.warning("agent.read_only", reason=missing, cannot=cannot)
        else:
            self._log.info("agent.helper_found")
        fault = NodeFault(
            code=NO_HELPER_FAULT, evidence=missing, open=bool(missing), unix_s=time.time()
        )
        self._handle(fault)

    async def _read(self, privileged: Privileged, gpu: DeviceUuid, process: DeviceProcess) -> None:
        pid, ticks = process.pid, process.start_ticks
        try:
            self._leases[pid, ticks] = await privileged.lease_of(gpu, pid, ticks)
        except (NotPermittedError, PrivilegedError) as error:
            # It may just have ended; if not, it is asked about at the next reading.
            self._log.debug("process.lease_unknown", pid=pid, reason=str(error))

    def _filled(self, device: DeviceState) -> DeviceState:
        if device.processes is None:
            return device
        return replace(
            device,
            processes=tuple(
                replace(each, lease_id=self._leases.get((each.pid, each.start_ticks)))
                if each.lease_id is None
                else each
                for each in device.processes
            ),
        )
