"""Clients that ask and release without pause, over real gRPC."""

import asyncio
from collections import deque
from types import TracebackType
from typing import Any, Self

import grpc
from grpc import aio
from tests.e2e.crash.ledger import Entry, Ledger

from gpupool.v1 import lease_pb2, lease_pb2_grpc
from gpupool.wire.lease import AcquireAsk, acquire_ask_to_proto
from gpupool.wire.resources import lease_from_proto

CALLS_AT_ONCE = 64
"""Clients, each with one call at a time: more than the 50 that must be in flight."""

HELD_MIN = 500
HELD_MAX = 580

TTL_S = 3600.0
"""Nothing may end by its clock while the test looks on."""

OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    # The next allocator must be found at once, also by calls that already wait for it.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.enable_retries", 0),
)


class Load:
    """The clients; inside ``async with`` they work. Leaving cancels what is in flight.

    ``answers`` counts what they were told; ``busy`` is set once each has a call in flight.
    """

    def __init__(self, address: str, ledger: Ledger) -> None:
        self.in_flight = 0
        self.answers = 0
        self.busy = asyncio.Event()
        self._address = address
        self._ledger = ledger
        self._asking = 0
        self._again = deque(ledger.unsettled())
        self._answered = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._channel = aio.insecure_channel(self._address, options=OPTIONS)
        self._leases: Any = lease_pb2_grpc.LeaseServiceStub(self._channel)
        self._tasks = [asyncio.create_task(self._work()) for _ in range(CALLS_AT_ONCE)]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()
        failed = [each for each in ended if isinstance(each, Exception)]
        if failed and error is None:
            raise failed[0]

    def check(self) -> None:
        """Raises what made a client give up."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def until_held(self) -> None:
        """Returns when the least number of leases is held and every request is settled."""
        while len(self._ledger.held) < HELD_MIN or self._again:
            self.check()
            await self._next_answer()

    async def until_answers(self, count: int) -> None:
        """Returns at the ``count``-th answer from now."""
        goal = self.answers + count
        while self.answers < goal:
            self.check()
            await self._next_answer()

    async def _next_answer(self) -> None:
        async with self._answered:
            await self._answered.wait()

    async def _work(self) -> None:
        while True:
            if self._again:
                await self._settle(self._again.popleft())
            elif self._may_release():
                await self._release(self._ledger.give_up())
            else:
                self._asking += 1
                try:
                    await self._acquire(self._ledger.ask())
                finally:
                    self._asking -= 1

    def _may_release(self) -> bool:
        held = len(self._ledger.held)
        if held <= HELD_MIN:
            return False
        return held + self._asking >= HELD_MAX or self._ledger.chance.random() < 0.5

    async def _settle(self, entry: Entry) -> None:
        """Asks again for what nobody knows the outcome of, or gives it up."""
        known = entry.lease_id is not None
        if entry.release_asked or (known and self._ledger.chance.random() < 0.3):
            entry.release_asked = True
            await self._release(entry)
        else:
            await self._acquire(entry)

    async def _acquire(self, entry: Entry) -> None:
        ask = AcquireAsk(request_id=entry.request_id, spec=entry.spec, ttl_s=TTL_S)
        call = self._leases.Acquire(acquire_ask_to_proto(ask), wait_for_ready=True)
        with self._flying():
            try:
                async for answer in call:
                    self._ledger.hear(entry, lease_from_proto(answer.lease))
                    await self._told()
            except aio.AioRpcError as error:
                self._check_outage(error)

    async def _release(self, entry: Entry) -> None:
        assert entry.lease_id is not None
        request = lease_pb2.ReleaseRequest(lease_id=entry.lease_id)
        with self._flying():
            try:
                await self._leases.Release(request, wait_for_ready=True)
            except aio.AioRpcError as error:
                self._check_outage(error)
                return
        entry.release_told = True
        await self._told()

    def _flying(self) -> "_Flying":
        return _Flying(self)

    async def _told(self) -> None:
        self.answers += 1
        async with self._answered:
            self._answered.notify_all()

    @staticmethod
    def _check_outage(error: aio.AioRpcError) -> None:
        """An outcome that nobody knows is fine, any other error is not."""
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise error


class _Flying:
    """One call that was sent and not yet answered."""

    def __init__(self, load: Load) -> None:
        self._load = load

    def __enter__(self) -> None:
        self._load.in_flight += 1
        if self._load.in_flight == CALLS_AT_ONCE:
            self._load.busy.set()

    def __exit__(self, *_: object) -> None:
        self._load.in_flight -= 1
