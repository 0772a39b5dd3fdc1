"""Deadlines: one heap entry per (subject, kind), checked against the truth when it comes up.

Renewals are far more frequent than expiries. So a renewal only moves the deadline
in the table; the heap entry stays where it is and is pushed on when it surfaces.
"""

import heapq
from enum import StrEnum


class ClockKind(StrEnum):
    """What a deadline is for."""

    HOLDER = "holder"
    WAIT = "wait"
    END = "end"
    HOLD = "hold"
    RESERVATION = "reservation"


class Clocks:
    """Deadlines in monotonic seconds, by subject and kind."""

    def __init__(self) -> None:
        self._at: dict[tuple[str, ClockKind], float] = {}
        self._heap: list[tuple[float, str, ClockKind]] = []
        self._in_heap: dict[tuple[str, ClockKind], float] = {}

    def set(self, subject: str, kind: ClockKind, at: float) -> None:
        """Sets or moves a deadline."""
        key = (subject, kind)
        self._at[key] = at
        known = self._in_heap.get(key)
        if known is None or at < known:
            heapq.heappush(self._heap, (at, subject, kind))
            self._in_heap[key] = at

    def clear(self, subject: str, *kinds: ClockKind) -> None:
        """Forgets deadlines; forgetting one that is not set is no error."""
        for kind in kinds:
            self._at.pop((subject, kind), None)

    def get(self, subject: str, kind: ClockKind) -> float | None:
        """The deadline, or None."""
        return self._at.get((subject, kind))

    def next(self) -> float | None:
        """Earliest time at which ``due`` may return something."""
        self._settle()
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[tuple[str, ClockKind]]:
        """Takes the deadlines that have come, in order of time and name."""
        taken: list[tuple[str, ClockKind]] = []
        while True:
            self._settle()
            if not self._heap or self._heap[0][0] > now:
                return taken
            _, subject, kind = heapq.heappop(self._heap)
            del self._in_heap[subject, kind], self._at[subject, kind]
            taken.append((subject, kind))

    def _settle(self) -> None:
        """Brings the top of the heap in line with the table."""
        while self._heap:
            at, subject, kind = self._heap[0]
            key = (subject, kind)
            if self._in_heap.get(key) != at:
                heapq.heappop(self._heap)  # a later push replaced this entry
                continue
            truth = self._at.get(key)
            if truth == at:
                return
            heapq.heappop(self._heap)
            if truth is None:
                del self._in_heap[key]
            else:
                heapq.heappush(self._heap, (truth, subject, kind))
                self._in_heap[key] = truth
