"""Where a command's answers go: to a call that waits for one, or for several."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from gpupool.model.errors import Refused
from gpupool.model.hold import Hold
from gpupool.model.lease import Lease
from gpupool_allocator.core.effects import Done, KeptAlive

Result = Lease | Hold | KeptAlive | Done | Refused
"""What an Answer carries."""

STREAM_RESULTS_MAX = 64
"""States of one lease that wait for a slow reader; see ``AnswerStream``."""


class RefusedError(Exception):
    """Carries a refusal out of a call."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused


class Sink(Protocol):
    """Takes the answers of one command, in order; called on the event loop."""

    def deliver(self, result: Result, *, final: bool) -> None:
        """Takes one answer; must neither block nor raise."""
        ...


class FinalAnswer:
    """Keeps only the last answer of a command."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    def deliver(self, result: Result, *, final: bool) -> None:
        """Resolves the future with the final answer."""
        if final and not self.future.done():
            self.future.set_result(result)


class AnswerStream:
    """Hands a command's answers to one reader, until the final one.

    Each answer is a whole picture of its lease, so a reader that falls more than
    STREAM_RESULTS_MAX behind loses the oldest pictures, never the newest.
    """

    __slots__ = ("_ended", "_results", "_waiter")

    def __init__(self) -> None:
        self._results: deque[Result] = deque(maxlen=STREAM_RESULTS_MAX)
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, result: Result, *, final: bool) -> None:
        """Queues an answer and wakes the reader."""
        self._results.append(result)
        self._ended = self._ended or final
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aiter__(self) -> AsyncIterator[Result]:
        while True:
            while self._results:
                yield self._results.popleft()
            if self._ended:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
