"""Looking after the daemons: whether they run, what state their servers are in.

A process that ends is seen at the next look, a state every few looks, since that costs
a program's start. What is wrong is told before it is repaired. FAULT may pass by
itself, once the clients that it has hit are gone; it gets a little time to.
"""

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from gpupool.model.ids import DeviceUuid
from gpupool_agent.devices.interfaces import MpsError
from gpupool_agent.devices.mps_daemons.control import FAULT

if TYPE_CHECKING:
    from gpupool_agent.devices.mps_daemons.daemons import MpsDaemons

LOOK_PERIOD_S = 0.5
STATE_PERIOD_S = 5.0
FOREIGN_PERIOD_S = 10.0
FOREIGN_WHOLE_PERIOD_S = 60.0
FAULT_GRACE_S = 3.0
SILENCE_GRACE_S = 15.0
"""A daemon that runs and does not answer may only be busy, and its repair ends clients."""

RETRY_S_MAX = 30.0


class Watch:
    """The loop over every GPU."""

    def __init__(self, daemons: "MpsDaemons") -> None:
        self._daemons = daemons
        self._state_s = self._foreign_s = self._foreign_whole_s = float("-inf")
        self._since_s: dict[DeviceUuid, float] = {}
        self._retry_at_s: dict[DeviceUuid, float] = {}
        self._retry_s: dict[DeviceUuid, float] = {}
        self._looking: set[DeviceUuid] = set()
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Look until cancelled. A GPU that takes its time holds no other one up."""
        async with asyncio.TaskGroup() as group:
            while True:
                now = time.monotonic()
                self._daemons.troubles.forgive()
                ask = now >= self._state_s + STATE_PERIOD_S
                if ask:
                    self._state_s = now
                if now >= self._foreign_s + FOREIGN_PERIOD_S:
                    # Not again before it is done.
                    self._foreign_s = float("inf")
                    group.create_task(self._look_for_foreign(now))
                for gpu in self._daemons.sliced():
                    if gpu not in self._looking:
                        self._looking.add(gpu)
                        group.create_task(self._look(gpu, ask=ask or gpu in self._since_s))
                for gpu in self._daemons.mode_left():
                    if gpu not in self._looking and now >= self._retry_at_s.get(gpu, 0.0):
                        self._looking.add(gpu)
                        group.create_task(self._restore_mode(gpu))
                await asyncio.sleep(LOOK_PERIOD_S)

    async def _look_for_foreign(self, now: float) -> None:
        whole = now >= self._foreign_whole_s + FOREIGN_WHOLE_PERIOD_S
        if whole:
            self._foreign_whole_s = now
        self._daemons.troubles.found_foreign(await self._daemons.foreign(whole=whole))
        self._foreign_s = time.monotonic()

    async def _look(self, gpu: DeviceUuid, *, ask: bool) -> None:
        try:
            await self._look_and_repair(gpu, ask=ask)
        finally:
            self._looking.discard(gpu)

    async def _look_and_repair(self, gpu: DeviceUuid, *, ask: bool) -> None:
        async with self._daemons.lock(gpu):
            problem = await self._daemons.examine(gpu, ask=ask)
            if not problem:
                self._well(gpu)
                return
            now = time.monotonic()
            since_s = self._since_s.setdefault(gpu, now)
            if gpu not in self._retry_at_s:
                self._daemons.troubles.report(gpu, problem)
            if now < since_s + _grace_s(problem):
                return
            if now >= self._retry_at_s.get(gpu, 0.0):
                await self._repair(gpu, problem)

    async def _repair(self, gpu: DeviceUuid, problem: str) -> None:
        self._log.warning("mps.repair", gpu=gpu, reason=problem)
        try:
            await self._daemons.repair(gpu)
        except MpsError as error:
            self._try_later(gpu)
            self._daemons.troubles.report(gpu, f"{problem}; repair failed: {error}")
        else:
            self._well(gpu)

    async def _restore_mode(self, gpu: DeviceUuid) -> None:
        try:
            async with self._daemons.lock(gpu):
                self._since_s.setdefault(gpu, time.monotonic())
                await self._daemons.restore_mode(gpu)
                self._well(gpu)
        except MpsError as error:
            self._try_later(gpu)
            self._daemons.troubles.report(gpu, f"quarantined: {error}")
        finally:
            self._looking.discard(gpu)

    def _try_later(self, gpu: DeviceUuid) -> None:
        delay_s = self._retry_s.get(gpu, LOOK_PERIOD_S)
        self._retry_s[gpu] = min(2 * delay_s, RETRY_S_MAX)
        self._retry_at_s[gpu] = time.monotonic() + delay_s

    def _well(self, gpu: DeviceUuid) -> None:
        if self._since_s.pop(gpu, None) is None:
            return
        self._retry_at_s.pop(gpu, None)
        self._retry_s.pop(gpu, None)
        self._daemons.troubles.over(gpu)


def _grace_s(problem: str) -> float:
    """How long a problem may last before its repair."""
    if problem.endswith("is gone"):
        return 0.0
    return FAULT_GRACE_S if problem.endswith(FAULT) else SILENCE_GRACE_S
