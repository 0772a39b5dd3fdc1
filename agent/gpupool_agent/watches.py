"""Watching the processes that the core wants watched: holders of leases, and adopted ones."""

import asyncio
from collections.abc import Callable
from typing import assert_never

from gpupool.model.ids import LeaseId
from gpupool_agent.core.events import (
    AdoptedEnded,
    HolderEnded,
    NodeEvent,
    UnwatchAdopted,
    UnwatchHolder,
    WatchAdopted,
    WatchHolder,
)
from gpupool_agent.devices.interfaces import ProcessTable, ProcessWatch

WatchEffect = WatchHolder | UnwatchHolder | WatchAdopted | UnwatchAdopted


class Watches:
    """Every open watch: of a holder by its lease, of an adopted process by its pid."""

    def __init__(self, processes: ProcessTable, handle: Callable[[NodeEvent], None]) -> None:
        self._processes = processes
        self._handle = handle
        self._open: dict[LeaseId | int, ProcessWatch] = {}

    def perform(self, effect: WatchEffect) -> None:
        """Begin or end a watch; one that ends by itself, or finds nobody, is told once."""
        match effect:
            case WatchHolder(watch=watch):
                process = watch.process
                self._begin(
                    watch.lease_id,
                    process.pid,
                    process.start_ticks,
                    lambda reason: HolderEnded(watch=watch, reason=reason),
                )
            case WatchAdopted(adoption=adoption):
                self._begin(
                    adoption.pid,
                    adoption.pid,
                    adoption.start_ticks,
                    lambda _: AdoptedEnded(adoption=adoption),
                )
            case UnwatchHolder(lease_id=lease_id):
                self._end(lease_id)
            case UnwatchAdopted(pid=pid):
                self._end(pid)
            case _:
                assert_never(effect)

    def close(self) -> None:
        """End every watch."""
        for key in list(self._open):
            self._end(key)

    def _begin(
        self, key: LeaseId | int, pid: int, start_ticks: int, event: Callable[[str], NodeEvent]
    ) -> None:
        def ended(reason: str) -> None:
            self._open.pop(key, None)
            self._handle(event(reason))

        self._end(key)
        opened = self._processes.watch(pid, start_ticks, ended)
        if opened is None:
            asyncio.get_running_loop().call_soon(ended, "not found")
        else:
            self._open[key] = opened

    def _end(self, key: LeaseId | int) -> None:
        opened = self._open.pop(key, None)
        if opened is not None:
            opened.close()
