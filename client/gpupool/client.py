"""The SDK for programs without an event loop."""

import weakref
from collections.abc import Collection, Generator, Sequence
from types import TracebackType
from typing import Self, Unpack

from gpupool.aio import AsyncClient
from gpupool.model.event import Event
from gpupool.model.hold import Hold, HoldScope
from gpupool.model.ids import LeaseId
from gpupool.model.lease import Lease as LeaseNow
from gpupool.model.lease import LeaseState, Member
from gpupool.model.views import (
    DeviceView,
    DryRunResult,
    NodeView,
    PoolSummary,
    UnclaimedAssignment,
)
from gpupool.sdk.asking import Ask, Shape
from gpupool.sdk.calls import OnOutage
from gpupool.sdk.channel import resolve_address
from gpupool.sdk.connection import CALL_TIMEOUT_S, RETRY_S
from gpupool.sdk.lease import AsyncLease, OnChange
from gpupool.sdk.loop_thread import LoopThread
from gpupool.wire.agent import Adopted

__all__ = ["Client", "Lease"]


class Client:
    """A client of one pool, used from any number of threads.

    The AsyncClient, run on a thread of its own: the same words, the same errors. It
    ends with ``close()``, with its ``with`` block, or when nobody refers to it.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        retry_s: float = RETRY_S,
        on_outage: OnOutage | None = None,
    ) -> None:
        # Raises for a bad address before there is a thread to end.
        resolved = resolve_address(address)
        self._thread = LoopThread()

        async def connect() -> AsyncClient:
            return AsyncClient(resolved, timeout_s=timeout_s, retry_s=retry_s, on_outage=on_outage)

        self._client = self._thread.run(connect())
        self._end = weakref.finalize(self, _end, self._thread, self._client)

    @property
    def address(self) -> str:
        """Where the client calls."""
        return self._client.address

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every call. Leases that are still held end with their ttl."""
        self._end()

    def lease(self, *, on_change: OnChange | None = None, **ask: Unpack[Ask]) -> "Lease":
        """A lease, for ``with``. See ``Ask`` for the words it takes.

        ``on_change`` is called on the client's thread and must not call the client.
        """
        return Lease(self, self._thread, self._client.lease(on_change=on_change, **ask))

    def acquire(self, *, on_change: OnChange | None = None, **ask: Unpack[Ask]) -> "Lease":
        """An active lease; the caller releases it. See ``AsyncLease.acquire``."""
        lease = self.lease(on_change=on_change, **ask)
        lease.acquire()
        return lease

    def dry_run(self, *, explain: bool = False, **shape: Unpack[Shape]) -> DryRunResult:
        """What ``acquire`` would be answered now; with ``explain`` for each node why not."""
        return self._thread.run(self._client.dry_run(explain=explain, **shape))

    def get_lease(self, lease_id: str) -> LeaseNow:
        """One lease. NotFoundError where there is none."""
        return self._thread.run(self._client.get_lease(lease_id))

    def release(self, lease_id: str, reason: str = "") -> LeaseNow:
        """Ends a lease, anybody's; ending an ended one is no error."""
        return self._thread.run(self._client.release(lease_id, reason))

    def keep_alive(self, lease_ids: Sequence[str]) -> list[str]:
        """Renews up to 1024 leases once; the ids of those that are gone."""
        return self._thread.run(self._client.keep_alive(lease_ids))

    def adopt(self, lease_id: str, pid: int) -> Adopted:
        """Takes an own process on this node into an own lease; see ``AsyncClient.adopt``."""
        return self._thread.run(self._client.adopt(lease_id, pid))

    def watch_lease(self, lease_id: str) -> Generator[LeaseNow, None, None]:
        """Each state of a lease until it has ended, over outages of any length."""
        return self._thread.iterate(self._client.watch_lease(lease_id))

    def list_leases(
        self, *, states: Collection[LeaseState] = (), tenant: str = "", node_id: str = ""
    ) -> Generator[LeaseNow, None, None]:
        """Leases by id; without ``states`` those that have not ended."""
        return self._thread.iterate(
            self._client.list_leases(states=states, tenant=tenant, node_id=node_id)
        )

    def pool(self) -> PoolSummary:
        """Sums of the pool."""
        return self._thread.run(self._client.pool())

    def nodes(self) -> Generator[NodeView, None, None]:
        """Nodes by id."""
        return self._thread.iterate(self._client.nodes())

    def devices(self, *, node_id: str = "") -> Generator[DeviceView, None, None]:
        """Devices by node; with ``node_id`` only that node's."""
        return self._thread.iterate(self._client.devices(node_id=node_id))

    def holds(self) -> Generator[Hold, None, None]:
        """Holds by id."""
        return self._thread.iterate(self._client.holds())

    def add_hold(
        self,
        scope: HoldScope,
        target: str,
        reason: str,
        *,
        allowed_tenants: Sequence[str] = (),
        expire_unix_s: float | None = None,
        request_id: str = "",
    ) -> Hold:
        """Takes a node or device out of use, except for ``allowed_tenants``."""
        return self._thread.run(
            self._client.add_hold(
                scope,
                target,
                reason,
                allowed_tenants=allowed_tenants,
                expire_unix_s=expire_unix_s,
                request_id=request_id,
            )
        )

    def remove_hold(self, hold_id: str) -> None:
        """Removes an operator's hold. NotFoundError where there is none."""
        self._thread.run(self._client.remove_hold(hold_id))

    def unclaimed(self) -> Generator[UnclaimedAssignment, None, None]:
        """What nodes run and the pool's store does not know, by node, lease and rank."""
        return self._thread.iterate(self._client.unclaimed())

    def end_unclaimed(self, node_id: str, lease_id: str) -> None:
        """Ends the unclaimed assignments of a lease on a node; see ``AsyncClient``."""
        self._thread.run(self._client.end_unclaimed(node_id, lease_id))

    def events(
        self, *, after: int = 0, subject: str = "", follow: bool = False
    ) -> Generator[Event, None, None]:
        """Events after a sequence number, oldest first; see ``AsyncClient.events``."""
        return self._thread.iterate(
            self._client.events(after=after, subject=subject, follow=follow)
        )

    def newest_event(self) -> int:
        """Sequence number of the newest event; 0: there is none."""
        return self._thread.run(self._client.newest_event())


class Lease:
    """A lease of a Client, best used as ``with client.lease(...) as lease``."""

    def __init__(self, client: Client, thread: LoopThread, lease: AsyncLease) -> None:
        self._client = client  # keeps it alive: the lease may be all that is left of it
        self._thread = thread
        self._lease = lease

    @property
    def current(self) -> LeaseNow:
        """The lease as last heard of. Raises WrongStateError before the first answer."""
        return self._lease.current

    @property
    def id(self) -> LeaseId:
        """The lease's id. Raises WrongStateError before the first answer."""
        return self._lease.id

    @property
    def state(self) -> LeaseState:
        """State as last heard of."""
        return self._lease.state

    @property
    def members(self) -> tuple[Member, ...]:
        """Members by rank."""
        return self._lease.members

    @property
    def lost(self) -> bool:
        """The pool has ended the lease, or forgotten it: stop using it."""
        return self._lease.lost

    @property
    def env(self) -> dict[str, str]:
        """Environment of the member on this host, else of rank 0. WrongStateError: none yet."""
        return self._lease.env

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.run(self._lease.__aexit__(kind, error, traceback))

    def acquire(self) -> None:
        """Asks, and waits until the lease is active; see ``AsyncLease.acquire``."""
        self._thread.run(self._lease.acquire())

    def release(self, reason: str = "") -> None:
        """Ends the lease; ending an ended one is no error. Raises GpupoolError."""
        self._thread.run(self._lease.release(reason))

    def changes(self) -> Generator[LeaseNow, None, None]:
        """Each state of the lease, the present one first, until it has ended."""
        return self._thread.iterate(self._lease.changes())


def _end(thread: LoopThread, client: AsyncClient) -> None:
    thread.stop(client.close())
