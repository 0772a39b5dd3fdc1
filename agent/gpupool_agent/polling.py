"""Reading the machine again and again, however it behaves.

One task asks the driver, call after call, each with a deadline. A driver that hangs
is reported once and asked again as soon as its call returns; one that is not there
is asked again with a growing delay. Neither delays anything else of the agent.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import structlog

from gpupool.model.assignment import DeviceTelemetry
from gpupool.model.inventory import Hca
from gpupool_agent.core.events import (
    DriverSilent,
    HcasRead,
    InventoryRead,
    NodeEvent,
    UsageRead,
)
from gpupool_agent.core.readings import (
    DeviceProcess,
    DeviceState,
    DeviceUsage,
    GpuProcess,
    PortCounters,
)
from gpupool_agent.devices.blocking import BlockingCalls, CallHangsError
from gpupool_agent.devices.interfaces import (
    DriverUnavailableError,
    GpuDriver,
    HcaReader,
    ProcessFacts,
    ProcessTable,
)
from gpupool_agent.recalling import Recall

T = TypeVar("T")

RETRY_S_MIN = 1.0
RETRY_S_MAX = 30.0

CALLS_A_ROUND = 4
LATE_S = 30.0
"""Beyond what the driver may take, what else may delay a round."""


class Periods(Protocol):
    """How often what is read, in seconds; see AgentSettings."""

    @property
    def inventory_period_s(self) -> float: ...  # noqa: D102 - see the class
    @property
    def usage_period_s(self) -> float: ...  # noqa: D102 - see the class
    @property
    def telemetry_period_s(self) -> float: ...  # noqa: D102 - see the class
    @property
    def driver_deadline_s(self) -> float: ...  # noqa: D102 - see the class


class Poller:
    """Reads devices and adapters and tells what it found."""

    def __init__(
        self,
        *,
        periods: Periods,
        driver: GpuDriver,
        hcas: HcaReader,
        processes: ProcessTable,
        calls: BlockingCalls,
        with_leases: Callable[[tuple[DeviceState, ...]], Awaitable[tuple[DeviceState, ...]]],
        handle: Callable[[NodeEvent], None],
        measured: Callable[[tuple[DeviceTelemetry, ...]], None],
        counted: Callable[[tuple[PortCounters, ...]], None],
        is_own: Callable[[ProcessFacts], bool],
    ) -> None:
        self._periods = periods
        self._driver = driver
        self._hcas = hcas
        self._processes = processes
        self._with_leases = with_leases
        self._handle = handle
        self._measured = measured
        self._counted = counted
        self._calls = calls
        self._is_own = is_own
        self._wanted = asyncio.Event()
        self._awaited: list[asyncio.Future[None]] = []
        self._recall = Recall()
        self._retry_s = RETRY_S_MIN
        self._inventory_s = self._usage_s = self._telemetry_s = float("-inf")
        self._log = structlog.get_logger()
        self.has_read = asyncio.Event()
        self.silent = ""
        """Why the driver says nothing; empty where it answers."""
        self._due_s = time.monotonic()

    def stuck(self) -> str:
        """Why reading does not go on although no call hangs; empty where it does.

        A call that hangs is told, and no reason to start anew: it would hang again.
        """
        late_s = time.monotonic() - self._due_s
        limit_s = LATE_S + CALLS_A_ROUND * self._periods.driver_deadline_s
        if self._calls.hangs or late_s <= limit_s:
            return ""
        return f"the devices were to be read {late_s:.0f} s ago"

    def read_usage(self) -> None:
        """Read processes and memory now, not only when their time has come."""
        self._wanted.set()

    async def read_anew(self) -> None:
        """Return after a reading of processes and memory that began after this call."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.append(future)
        self._wanted.set()
        await future

    async def run(self) -> None:
        """Read until cancelled; ``has_read`` is set after the first try."""
        while True:
            self._due_s = time.monotonic()
            try:
                await self._read_due()
                self._retry_s = RETRY_S_MIN
                self.silent = ""
            except CallHangsError as error:
                self._say_silent("nvml_hang", str(error))
                await self._calls.returned()
                self._inventory_s = self._usage_s = time.monotonic()
                continue
            except DriverUnavailableError as error:
                self._say_silent("driver_unavailable", str(error))
                # Whatever else was due would say the same.
                self._inventory_s = time.monotonic() + self._retry_s
                self._usage_s = self._telemetry_s = float("inf")
                self._retry_s = min(self._retry_s * 2, RETRY_S_MAX)
            self.has_read.set()
            await self._wait()

    async def close(self) -> None:
        """Give the driver back, unless it hangs."""
        try:
            await self._calls.call(self._driver.close, self._periods.driver_deadline_s)
        except CallHangsError as error:
            self._log.warning("driver.not_closed", reason=str(error))

    async def _read_due(self) -> None:
        now = time.monotonic()
        if now >= self._inventory_s:
            await self._read_inventory()
            self._inventory_s = now + self._periods.inventory_period_s
            self._usage_s = now
        if now >= self._usage_s or (self._wanted.is_set() and self._usage_s < float("inf")):
            await self._read_usage()
            self._usage_s = now + self._periods.usage_period_s
        if now >= self._telemetry_s or self._telemetry_s == float("inf"):
            self._counted(await self._call(self._hcas.counters))
            self._measured(await self._call(self._driver.telemetry))
            self._telemetry_s = now + self._periods.telemetry_period_s

    async def _read_inventory(self) -> None:
        hcas: tuple[Hca, ...] = await self._call(self._hcas.read)
        self._handle(HcasRead(hcas=hcas))
        inventory = await self._call(self._driver.inventory)
        self._handle(InventoryRead(inventory=inventory, unix_s=time.time()))

    async def _read_usage(self) -> None:
        self._wanted.clear()
        awaited = [each for each in self._awaited if not each.done()]
        started_s = time.monotonic()
        devices = await self._call(self._usage)
        devices = self._recall.complete(await self._with_leases(devices))
        self._handle(UsageRead(started_s=started_s, devices=devices, unix_s=time.time()))
        for each in awaited:
            if not each.done():
                each.set_result(None)
        self._awaited = [each for each in self._awaited if not each.done()]

    def _usage(self) -> tuple[DeviceState, ...]:
        """On the driver's thread: looking up users may block as well."""
        return tuple(describe(each, self._processes, self._is_own) for each in self._driver.usage())

    async def _call(self, function: Callable[[], T]) -> T:
        return await self._calls.call(function, self._periods.driver_deadline_s)

    def _say_silent(self, code: str, reason: str) -> None:
        self.silent = reason
        self._handle(DriverSilent(code=code, reason=reason, unix_s=time.time()))
        self.has_read.set()

    async def _wait(self) -> None:
        due_s = self._due_s = min(self._inventory_s, self._usage_s, self._telemetry_s)
        try:
            async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                await self._wanted.wait()
        except TimeoutError:
            return


def describe(
    usage: DeviceUsage, processes: ProcessTable, is_own: Callable[[ProcessFacts], bool]
) -> DeviceState:
    """Add to each process on a device what tells whose it is; the agent's own are left out."""
    found = None
    if usage.processes is not None:
        every = [(process, processes.describe(process.pid)) for process in usage.processes]
        found = tuple(
            _describe(process, facts)
            for process, facts in every
            if facts is None or not is_own(facts)
        )
    return DeviceState(
        uuid=usage.uuid,
        processes=found,
        memory_used_mib=usage.memory_used_mib,
        failed=usage.failed,
        doubt=usage.doubt,
    )


def _describe(process: GpuProcess, facts: ProcessFacts | None) -> DeviceProcess:
    """A process that the kernel does not know is listed all the same: it holds memory."""
    if facts is None:
        return DeviceProcess(
            pid=process.pid, memory_mib=process.memory_mib, through_mps=process.through_mps
        )
    return DeviceProcess(
        pid=process.pid,
        start_ticks=facts.start_ticks,
        uid=facts.uid,
        user=facts.user,
        command=facts.command,
        memory_mib=process.memory_mib,
        lease_id=facts.lease_id,
        ancestors=facts.ancestors,
        through_mps=process.through_mps,
    )
