"""The SDK for async programs."""

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from gpupool.errors import (
    GpupoolError,
    InvalidRequestError,
    UnavailableError,
    WrongStateError,
)
from gpupool.model.event import Event
from gpupool.model.hold import Hold, HoldScope
from gpupool.model.ids import HoldId, LeaseId
from gpupool.model.lease import Lease, LeaseState
from gpupool.model.limits import PAGE_MAX
from gpupool.model.views import (
    DeviceView,
    DryRunResult,
    NodeView,
    PoolSummary,
    UnclaimedAssignment,
)
from gpupool.sdk.asking import Ask, Shape, acquire_ask, lease_spec
from gpupool.sdk.calls import Backoff, OnOutage, worth_retrying
from gpupool.sdk.channel import is_agent_socket
from gpupool.sdk.connection import CALL_TIMEOUT_S, RETRY_S, Connection
from gpupool.sdk.lease import AsyncLease, OnChange, read_lease, watch
from gpupool.sdk.renewal import Renewer
from gpupool.v1 import lease_pb2, pool_pb2
from gpupool.wire.agent import (
    PID_MIN,
    AdoptAsk,
    Adopted,
    adopt_ask_to_proto,
    adopted_from_proto,
)
from gpupool.wire.door import INT64_MAX
from gpupool.wire.enums import LEASE_STATES
from gpupool.wire.pool import HoldAsk, event_from_proto, hold_ask_to_proto, hold_from_proto
from gpupool.wire.request import lease_spec_to_proto
from gpupool.wire.resources import PID_MAX, lease_from_proto
from gpupool.wire.views import (
    device_view_from_proto,
    dry_run_result_from_proto,
    node_view_from_proto,
    pool_summary_from_proto,
    unclaimed_from_proto,
)

__all__ = ["AsyncClient", "AsyncLease"]

_Item = TypeVar("_Item")


class AsyncClient:
    """A client of one pool, used inside one running event loop.

    ``address``: "host:port" or "unix:/path"; without it $GPUPOOL_ADDRESS, else this
    node's agent, else 127.0.0.1:7070. ``timeout_s`` bounds each try of a call,
    ``retry_s`` how long a change is tried again while the pool cannot be reached;
    ``on_outage`` is called with the error and that time when such an outage begins.
    Every call raises GpupoolError. Close it, or use it with ``async with``.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        retry_s: float = RETRY_S,
        on_outage: OnOutage | None = None,
    ) -> None:
        self._connection = Connection(
            address, timeout_s=timeout_s, retry_s=retry_s, on_outage=on_outage
        )
        self._renewer = Renewer(self._connection)

    @property
    def address(self) -> str:
        """Where the client calls."""
        return self._connection.address

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every call. Leases that are still held end with their ttl."""
        await self._renewer.close()
        await self._connection.close()

    def lease(self, *, on_change: OnChange | None = None, **ask: Unpack[Ask]) -> AsyncLease:
        """A lease, for ``async with``. See ``Ask`` for the words it takes."""
        made = acquire_ask(ask, at_agent=is_agent_socket(self.address))
        return AsyncLease(self._connection, self._renewer, made, on_change)

    async def acquire(self, *, on_change: OnChange | None = None, **ask: Unpack[Ask]) -> AsyncLease:
        """An active lease; the caller releases it. See ``Ask`` and ``AsyncLease.acquire``."""
        lease = self.lease(on_change=on_change, **ask)
        await lease.acquire()
        return lease

    async def dry_run(self, *, explain: bool = False, **shape: Unpack[Shape]) -> DryRunResult:
        """What ``acquire`` would be answered now; with ``explain`` for each node why not."""
        request = lease_pb2.DryRunRequest(
            spec=lease_spec_to_proto(lease_spec(shape)), explain=explain
        )
        return await self._connection.read(
            self._connection.leases.DryRun, request, dry_run_result_from_proto
        )

    async def get_lease(self, lease_id: str) -> Lease:
        """One lease. NotFoundError where there is none."""
        request = lease_pb2.GetLeaseRequest(lease_id=lease_id)
        return await self._connection.read(self._connection.leases.GetLease, request, read_lease)

    async def release(self, lease_id: str, reason: str = "") -> Lease:
        """Ends a lease, anybody's; ending an ended one is no error."""
        request = lease_pb2.ReleaseRequest(lease_id=lease_id, reason=reason)
        return await self._connection.change(self._connection.leases.Release, request, read_lease)

    async def keep_alive(self, lease_ids: Sequence[str]) -> list[str]:
        """Renews up to 1024 leases once; the ids of those that are gone."""
        return await self._connection.change(
            self._connection.leases.KeepAlive,
            lease_pb2.KeepAliveRequest(lease_ids=lease_ids),
            lambda response: list(response.gone_lease_ids),
        )

    async def adopt(self, lease_id: str, pid: int) -> Adopted:
        """Takes an own process on this node into an own lease, and it is ended with it.

        Only through the socket of this node's agent, and only a process that is on a GPU
        of the lease; root may do it for anybody.
        """
        if not is_agent_socket(self.address):
            raise WrongStateError(
                f"address: {self.address} is no agent's socket: a process is adopted through "
                "the socket of its node's agent"
            )
        if not PID_MIN <= pid <= PID_MAX:
            raise InvalidRequestError(f"pid: {pid} is not in {PID_MIN}..{PID_MAX}", field="pid")
        request = adopt_ask_to_proto(AdoptAsk(lease_id=LeaseId(lease_id), pid=pid))
        return await self._connection.change(
            self._connection.agent.AdoptProcess, request, adopted_from_proto
        )

    def watch_lease(self, lease_id: str) -> AsyncGenerator[Lease, None]:
        """Each state of a lease until it has ended, over outages of any length."""
        return watch(self._connection, LeaseId(lease_id))

    def list_leases(
        self, *, states: Collection[LeaseState] = (), tenant: str = "", node_id: str = ""
    ) -> AsyncGenerator[Lease, None]:
        """Leases by id; without ``states`` those that have not ended."""

        def request(token: str) -> lease_pb2.ListLeasesRequest:
            return lease_pb2.ListLeasesRequest(
                page_size=PAGE_MAX,
                page_token=token,
                states=[LEASE_STATES.to_proto(state) for state in states],
                tenant=tenant,
                node_id=node_id,
            )

        return self._pages(
            self._connection.leases.ListLeases,
            request,
            lambda response: [lease_from_proto(lease) for lease in response.leases],
        )

    async def pool(self) -> PoolSummary:
        """Sums of the pool."""
        return await self._connection.read(
            self._connection.pool.GetPool, pool_pb2.GetPoolRequest(), pool_summary_from_proto
        )

    def nodes(self) -> AsyncGenerator[NodeView, None]:
        """Nodes by id."""
        return self._pages(
            self._connection.pool.ListNodes,
            lambda token: pool_pb2.ListNodesRequest(page_size=PAGE_MAX, page_token=token),
            lambda response: [node_view_from_proto(node) for node in response.nodes],
        )

    def devices(self, *, node_id: str = "") -> AsyncGenerator[DeviceView, None]:
        """Devices by node; with ``node_id`` only that node's."""
        return self._pages(
            self._connection.pool.ListDevices,
            lambda token: pool_pb2.ListDevicesRequest(
                page_size=PAGE_MAX, page_token=token, node_id=node_id
            ),
            lambda response: [device_view_from_proto(device) for device in response.devices],
        )

    def holds(self) -> AsyncGenerator[Hold, None]:
        """Holds by id."""
        return self._pages(
            self._connection.pool.ListHolds,
            lambda token: pool_pb2.ListHoldsRequest(page_size=PAGE_MAX, page_token=token),
            lambda response: [hold_from_proto(hold) for hold in response.holds],
        )

    async def add_hold(
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
        ask = HoldAsk(
            request_id=request_id or f"sdk-{secrets.token_hex(12)}",
            scope=scope,
            target=target,
            reason=reason,
            allowed_tenants=tuple(allowed_tenants),
            expire_unix_s=expire_unix_s,
        )
        return await self._connection.change(
            self._connection.pool.CreateHold,
            hold_ask_to_proto(ask),
            lambda response: hold_from_proto(response.hold),
        )

    async def remove_hold(self, hold_id: str) -> None:
        """Removes an operator's hold. NotFoundError where there is none."""
        await self._connection.change(
            self._connection.pool.DeleteHold,
            pool_pb2.DeleteHoldRequest(hold_id=HoldId(hold_id)),
            lambda _: None,
        )

    def unclaimed(self) -> AsyncGenerator[UnclaimedAssignment, None]:
        """What nodes run and the pool's store does not know, by node, lease and rank."""
        return self._pages(
            self._connection.pool.ListUnclaimed,
            lambda token: pool_pb2.ListUnclaimedRequest(page_size=PAGE_MAX, page_token=token),
            lambda response: [unclaimed_from_proto(each) for each in response.assignments],
        )

    async def end_unclaimed(self, node_id: str, lease_id: str) -> None:
        """Ends the unclaimed assignments of a lease on a node; for operators.

        It returns once that is ordered; ``unclaimed()`` lists them until their node has
        nothing of them left. NotFoundError where there is none.
        """
        await self._connection.change(
            self._connection.pool.EndUnclaimed,
            pool_pb2.EndUnclaimedRequest(node_id=node_id, lease_id=lease_id),
            lambda _: None,
        )

    async def events(
        self, *, after: int = 0, subject: str = "", follow: bool = False
    ) -> AsyncGenerator[Event, None]:
        """Events after a sequence number, oldest first; -1: only new ones.

        Without ``follow`` it ends with the newest; with it, it goes on over outages
        and resumes where it was.
        """
        if after >= 0:
            async with aclosing(self._past_events(after, subject)) as past:
                async for event in past:
                    after = event.sequence
                    yield event
        if follow:
            async with aclosing(self._coming_events(after)) as coming:
                async for event in coming:
                    if not subject or event.subject == subject:
                        yield event

    async def newest_event(self) -> int:
        """Sequence number of the newest event; 0: there is none."""
        # After the last that there can be: only the bounds are asked for.
        request = pool_pb2.ListEventsRequest(page_size=1, after_sequence=INT64_MAX)
        return await self._connection.read(
            self._connection.pool.ListEvents, request, lambda response: int(response.last_sequence)
        )

    async def _past_events(self, after: int, subject: str) -> AsyncGenerator[Event, None]:
        while True:
            request = pool_pb2.ListEventsRequest(
                page_size=PAGE_MAX, after_sequence=after, subject=subject
            )
            events = await self._connection.read(
                self._connection.pool.ListEvents,
                request,
                lambda response: [event_from_proto(event) for event in response.events],
            )
            for event in events:
                yield event
            if len(events) < PAGE_MAX:
                return
            after = events[-1].sequence

    async def _coming_events(self, after: int) -> AsyncGenerator[Event, None]:
        backoff = Backoff(None)
        while True:
            request = pool_pb2.WatchEventsRequest(after_sequence=after)
            error: GpupoolError = UnavailableError("the pool ended the stream")
            stream = self._connection.stream(
                self._connection.pool.WatchEvents,
                request,
                lambda response: [event_from_proto(event) for event in response.events],
            )
            try:
                async with aclosing(stream) as batches:
                    async for batch in batches:
                        backoff.reset()
                        for event in batch:
                            after = event.sequence
                            yield event
            except GpupoolError as failure:
                if not worth_retrying(failure):
                    raise
                error = failure
            await backoff.pause(error)

    async def _pages(
        self,
        method: Callable[..., Awaitable[Any]],
        request: Callable[[str], object],
        read: Callable[[Any], list[_Item]],
    ) -> AsyncGenerator[_Item, None]:
        token = ""
        while True:
            items, token = await self._connection.read(
                method, request(token), lambda response: (read(response), response.next_page_token)
            )
            for item in items:
                yield item
            if not token:
                return
