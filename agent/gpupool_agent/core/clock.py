"""The node's own clock: how long it goes on without hearing from any allocator.

Each assignment has its own ``disconnect_s``. A while before it is over the node
warns; then it ends the assignment, and the processes that it finds on its devices are
ended (see ``stopping``). Jobs thus survive every outage of the allocator below that.
"""

import math
from collections.abc import Iterator

from gpupool_agent.core.assignments import Kept
from gpupool_agent.core.book import Book
from gpupool_agent.core.events import Log, NodeEffect

WARN_BEFORE_S = 60.0
"""Warn so long before the end, but not before nine tenths of the time are over."""


class NodeClock:
    """Time since the last contact; ``lost_s`` None: connected now."""

    def __init__(self, lost_s: float | None) -> None:
        self.lost_s = lost_s

    def contact(self) -> bool:
        """An allocator speaks to us; True when that ends a silence."""
        if self.lost_s is None:
            return False
        self.lost_s = None
        return True

    def lose(self, now: float) -> bool:
        """The stream is gone; True when that begins a silence."""
        if self.lost_s is not None:
            return False
        self.lost_s = now
        return True

    def settle(self, book: Book, now: float) -> list[NodeEffect]:
        """Warn about and end what has had its time."""
        effects: list[NodeEffect] = []
        for kept in list(book.kept.values()):
            if kept.active and now >= self._end_s(kept):
                reason = f"no allocator for {kept.assignment.disconnect_s:g} s"
                book.end(kept, now, reason)
                kept.stop_since_s = now
                effects.append(_log("assignment.out_of_time", kept, reason))
            elif kept.active and not kept.warned and now >= self._warn_s(kept):
                kept.warned = True
                left_s = self._end_s(kept) - now
                effects.append(_log("assignment.warned", kept, f"ends in {left_s:.0f} s"))
            elif self.lost_s is None:
                kept.warned = False
        return effects

    def deadlines(self, book: Book) -> Iterator[float]:
        """When an assignment is to be warned or ended."""
        for kept in book.kept.values():
            if kept.active and self.lost_s is not None:
                yield self._end_s(kept) if kept.warned else self._warn_s(kept)

    def _end_s(self, kept: Kept) -> float:
        if self.lost_s is None:
            return math.inf
        return self.lost_s + kept.assignment.disconnect_s

    def _warn_s(self, kept: Kept) -> float:
        return self._end_s(kept) - min(WARN_BEFORE_S, kept.assignment.disconnect_s / 10)


def _log(event: str, kept: Kept, reason: str) -> Log:
    return Log(
        event=event,
        details={
            "lease_id": kept.assignment.key.lease_id,
            "rank": str(kept.assignment.key.rank),
            "reason": reason,
        },
    )
