"""The history as the outside reads it: pages, and a wait for what comes next."""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor

from gpupool.model.event import Event
from gpupool_allocator.storage.store import History

RECENT_MAX = 4096
"""Committed events kept at hand, so that live watchers do not read the store."""


class ForgottenError(Exception):
    """Events after the asked sequence number are no longer kept."""

    def __init__(self, after_sequence: int, oldest: int) -> None:
        super().__init__(
            f"events after {after_sequence} are no longer kept; the oldest is {oldest}"
        )


class EventFeed:
    """Committed events in their order. Watchers hold a number, never a queue."""

    def __init__(
        self,
        history: History,
        in_thread: Executor,
        *,
        newest: int,
    ) -> None:
        self.newest = newest
        self._history = history
        self._thread = in_thread
        self._recent: deque[Event] = deque(maxlen=RECENT_MAX)
        self._arrived: asyncio.Event = asyncio.Event()

    async def bounds(self) -> tuple[int, int]:
        """Sequence numbers of the oldest and the newest event kept; (0, 0) when none."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._history.bounds)

    def publish(self, events: Sequence[Event]) -> None:
        """Shows events that have just been committed."""
        if not events:
            return
        self._recent.extend(events)
        self.newest = events[-1].sequence
        # Whoever waits holds the old event; later waiters get the new one.
        self._arrived.set()
        self._arrived = asyncio.Event()

    async def page(self, after_sequence: int, limit: int, subject: str = "") -> list[Event]:
        """Events after a number, oldest first; fewer when some are no longer kept."""
        if self._recent and after_sequence >= self._recent[0].sequence - 1:
            found = (event for event in self._recent if event.sequence > after_sequence)
            matching = [event for event in found if subject in ("", event.subject)]
            return matching[:limit]
        return await asyncio.get_running_loop().run_in_executor(
            self._thread,
            lambda: self._history.read(after_sequence=after_sequence, limit=limit, subject=subject),
        )

    async def next_page(self, after_sequence: int, limit: int) -> list[Event]:
        """As ``page``, but waits until there is one. ForgottenError when there is a gap."""
        while True:
            arrived = self._arrived
            if events := await self.page(after_sequence, limit):
                if events[0].sequence != after_sequence + 1:
                    raise ForgottenError(after_sequence, events[0].sequence)
                return events
            await arrived.wait()
