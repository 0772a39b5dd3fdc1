"""Renews the TTL leases of one client, all in one batch."""

import asyncio
import logging
from collections import Counter
from typing import Protocol

from gpupool.errors import GpupoolError
from gpupool.model.ids import LeaseId
from gpupool.model.limits import KEEP_ALIVE_MAX
from gpupool.sdk.calls import Backoff
from gpupool.sdk.connection import Connection
from gpupool.v1 import lease_pb2

RENEWALS_PER_TTL = 3
"""Two of three renewals may be lost without harm."""

log = logging.getLogger("gpupool")


class Renewed(Protocol):
    """A held lease, as the renewer sees it."""

    def gone(self) -> None:
        """The pool does not know the lease any more, or is ending it."""
        ...


class Renewer:
    """Sends KeepAlive for every lease added, at a third of the shortest TTL."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._held: dict[LeaseId, tuple[float, Renewed]] = {}
        # A client holds thousands of leases, but few different TTLs.
        self._ttls_s: Counter[float] = Counter()
        self._shorter = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, lease_id: LeaseId, ttl_s: float, holder: Renewed) -> None:
        """Renews a lease from now on."""
        shorter = ttl_s < self._shortest_s()
        self.remove(lease_id)
        self._held[lease_id] = (ttl_s, holder)
        self._ttls_s[ttl_s] += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="gpupool renewals")
        elif shorter:
            self._shorter.set()

    def remove(self, lease_id: LeaseId) -> None:
        """Renews a lease no more; one that is not renewed is no error."""
        self._pop(lease_id)

    async def close(self) -> None:
        """Renews nothing any more."""
        self._held.clear()
        self._ttls_s.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _shortest_s(self) -> float:
        return min(self._ttls_s, default=float("inf"))

    def _pop(self, lease_id: LeaseId) -> Renewed | None:
        held = self._held.pop(lease_id, None)
        if held is None:
            return None
        ttl_s, holder = held
        self._ttls_s[ttl_s] -= 1
        if not self._ttls_s[ttl_s]:
            del self._ttls_s[ttl_s]
        return holder

    async def _run(self) -> None:
        while self._held:
            self._shorter.clear()
            pause_s = self._shortest_s() / RENEWALS_PER_TTL
            try:
                await asyncio.wait_for(self._shorter.wait(), pause_s)
            except TimeoutError:
                await self._renew_all(pause_s)

    async def _renew_all(self, patience_s: float) -> None:
        lease_ids = list(self._held)
        for start in range(0, len(lease_ids), KEEP_ALIVE_MAX):
            batch = lease_ids[start : start + KEEP_ALIVE_MAX]
            try:
                gone = await self._connection.change(
                    self._connection.leases.KeepAlive,
                    lease_pb2.KeepAliveRequest(lease_ids=batch),
                    lambda response: list(response.gone_lease_ids),
                    backoff=Backoff(patience_s),
                )
            except GpupoolError as error:
                # The next round tries again; the pool's clock for a lease stands
                # still while it does not serve.
                noun = "lease" if len(batch) == 1 else "leases"
                log.warning("renewal of %d %s failed: %s", len(batch), noun, error)
                continue
            for lease_id in gone:
                holder = self._pop(LeaseId(lease_id))
                if holder is not None:
                    holder.gone()
