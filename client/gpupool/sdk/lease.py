"""A lease in an async program: asked for, kept, watched and released."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from gpupool.errors import (
    GpupoolError,
    LeaseEndedError,
    NotFoundError,
    UnavailableError,
    WrongStateError,
)
from gpupool.model.ids import LeaseId
from gpupool.model.lease import ENDED, Lease, LeaseState, Member
from gpupool.sdk.calls import Backoff, worth_retrying
from gpupool.sdk.connection import Connection
from gpupool.sdk.members import environment_of, member_here
from gpupool.sdk.renewal import Renewer
from gpupool.v1 import lease_pb2
from gpupool.wire.lease import AcquireAsk, acquire_ask_to_proto
from gpupool.wire.resources import lease_from_proto

GIVE_UP_S = 5.0
"""Longest time that leaving a request may take, for its lease to be found and ended."""

LEAVE_S = 10.0
"""Longest time that leaving a lease may take: over a restart of the pool. It ends by its own
clock or with its holder in any case."""

HURRY_S = 1.0
"""The same for somebody who is interrupted once more, or where nobody answers anyway."""

OnChange = Callable[[Lease], None]

log = logging.getLogger("gpupool")


def read_lease(response: Any) -> Lease:
    """The lease of any response that carries one."""
    return lease_from_proto(response.lease)


async def watch(connection: Connection, lease_id: LeaseId) -> AsyncGenerator[Lease, None]:
    """Each state of a lease, the present one first, until it has ended.

    Goes on over outages of any length. Raises GpupoolError.
    """
    backoff = Backoff(None)
    last: Lease | None = None
    while True:
        request = lease_pb2.WatchLeaseRequest(lease_id=lease_id)
        error: GpupoolError = UnavailableError("the pool ended the stream")
        try:
            stream = connection.stream(connection.leases.WatchLease, request, read_lease)
            async with aclosing(stream) as states:
                async for lease in states:
                    backoff.reset()
                    if lease != last:
                        last = lease
                        yield lease
                    if lease.state in ENDED:
                        return
        except GpupoolError as failure:
            if not worth_retrying(failure):
                raise
            error = failure
        await backoff.pause(error)


class AsyncLease:
    """A lease of an AsyncClient, best used as ``async with client.lease(...) as lease``.

    Entering waits until every node has prepared; leaving releases, whichever way.
    A TTL lease is renewed in the background meanwhile. ``on_change`` is called with
    each state: pending with position and reason, and every later change.
    """

    def __init__(
        self,
        connection: Connection,
        renewer: Renewer,
        ask: AcquireAsk,
        on_change: OnChange | None = None,
    ) -> None:
        self._connection = connection
        self._renewer = renewer
        self._ask = ask
        self._on_change = on_change
        self._lease: Lease | None = None
        self._asked = False
        self._unreachable = False
        self._lost = False
        self._following: asyncio.Task[None] | None = None

    @property
    def current(self) -> Lease:
        """The lease as last heard of. Raises WrongStateError before the first answer."""
        if self._lease is None:
            raise WrongStateError("the lease has not been acquired")
        return self._lease

    @property
    def id(self) -> LeaseId:
        """The lease's id. Raises WrongStateError before the first answer."""
        return self.current.lease_id

    @property
    def state(self) -> LeaseState:
        """State as last heard of."""
        return self.current.state

    @property
    def members(self) -> tuple[Member, ...]:
        """Members by rank."""
        return self.current.members

    @property
    def lost(self) -> bool:
        """The pool has ended the lease, or forgotten it: stop using it."""
        return self._lost or (self._lease is not None and self._lease.state in ENDED)

    @property
    def env(self) -> dict[str, str]:
        """Environment of the member on this host, else of rank 0. WrongStateError: none yet."""
        return environment_of(self.current, member_here(self.current))

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await _to_the_end(self._leave("released"))

    async def acquire(self) -> None:
        """Asks, and waits until the lease is active.

        Tried again with the same request id while the pool cannot be reached, for the
        client's ``retry_s`` per outage. Raises GpupoolError: NoCapacityError where it
        does not fit in time, LeaseEndedError where it ended first. However this ends
        early, also by cancellation, nothing stays held.
        """
        try:
            await self._until_active()
        except BaseException:
            await _to_the_end(self._give_up())
            raise
        if self._on_change is not None:
            self._following = asyncio.create_task(self._follow(), name=f"follow {self.id}")

    async def release(self, reason: str = "") -> None:
        """Ends the lease; ending an ended one is no error. Raises GpupoolError."""
        await self._release(reason, self._connection.retry_s)

    async def _release(self, reason: str, patience_s: float) -> None:
        self._stop_following()
        if self._lease is None:
            return
        self._renewer.remove(self._lease.lease_id)
        if self._lease.state in ENDED:
            return
        request = lease_pb2.ReleaseRequest(lease_id=self._lease.lease_id, reason=reason)
        try:
            released = await self._connection.change(
                self._connection.leases.Release,
                request,
                read_lease,
                backoff=self._connection.backoff(patience_s),
            )
        except NotFoundError:
            self._lost = True  # ended so long ago that the pool has forgotten it
        else:
            self._see(released)

    async def changes(self) -> AsyncGenerator[Lease, None]:
        """Each state of the lease, the present one first, until it has ended.

        Goes on over outages of any length. Raises GpupoolError.
        """
        async with aclosing(watch(self._connection, self.id)) as states:
            async for lease in states:
                self._see(lease)
                yield lease

    def gone(self) -> None:
        """The renewer heard that the lease is unknown or ending."""
        self._lost = True

    async def _until_active(self) -> None:
        backoff = self._connection.backoff(self._connection.retry_s)
        request = acquire_ask_to_proto(self._ask)
        while True:
            self._asked = True
            error: GpupoolError = UnavailableError("the pool ended the stream before the grant")
            try:
                if await self._ask_once(request, backoff):
                    return
            except GpupoolError as failure:
                if not worth_retrying(failure):
                    self._asked = False  # a clear answer: nothing is held unseen
                    raise
                self._unreachable = True
                error = failure
            if self._lease is not None and self._lease.state in ENDED:
                raise LeaseEndedError(self._lease)
            await backoff.pause(error)

    async def _ask_once(self, request: lease_pb2.AcquireRequest, backoff: Backoff) -> bool:
        """One call, followed until the lease is active (True) or the stream has ended."""
        stream = self._connection.stream(self._connection.leases.Acquire, request, read_lease)
        async with aclosing(stream) as states:
            async for lease in states:
                backoff.reset()
                self._unreachable = False
                self._see(lease)
                if lease.state is LeaseState.ACTIVE:
                    return True
        return False

    def _see(self, lease: Lease) -> None:
        first = self._lease is None
        changed = lease != self._lease
        self._lease = lease
        if first and lease.ttl_s is not None:
            self._renewer.add(lease.lease_id, lease.ttl_s, self)
        if lease.state in ENDED:
            self._renewer.remove(lease.lease_id)
        if changed and self._on_change is not None:
            self._on_change(lease)

    async def _follow(self) -> None:
        try:
            async with aclosing(self.changes()) as states:
                async for _ in states:
                    pass  # seen, and told on, by changes()
        except GpupoolError as error:
            self._lost = isinstance(error, NotFoundError)
            log.warning("lease %s is followed no more: %s", self.id, error)

    def _stop_following(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None

    async def _give_up(self) -> None:
        try:
            async with asyncio.timeout(HURRY_S if self._unreachable else GIVE_UP_S):
                if self._lease is None and self._asked:
                    await self._find()
                await self._leave("given up")
        except TimeoutError:
            log.warning("request %s may hold until its ttl ends", self._ask.request_id)

    async def _find(self) -> None:
        # The call may have been cut between the grant and its answer. Asking again
        # with the same request id names the lease, so that it can be ended.
        request = acquire_ask_to_proto(self._ask)
        stream = self._connection.stream(self._connection.leases.Acquire, request, read_lease)
        try:
            async with aclosing(stream) as states:
                async for lease in states:
                    self._see(lease)
                    return
        except GpupoolError as error:
            log.debug("nothing to give up: %s", error)

    async def _leave(self, reason: str) -> None:
        patience_s = min(self._connection.retry_s, LEAVE_S)
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._release(reason, patience_s)
        except (GpupoolError, TimeoutError) as error:
            # The work is done; that its lease ends by its clock must not undo it.
            why = str(error) or f"no answer within {LEAVE_S:g} s"
            log.warning("lease %s was not released and ends by itself: %s", self.id, why)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Does ``work`` though the caller is cancelled meanwhile: then it has to hurry."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if (await asyncio.wait({task}, timeout=HURRY_S))[1]:
            task.cancel()
            await asyncio.wait({task})
        raise
