"""The queue: by priority, then arrival, with aging.

Aging makes waiting worth priority: ``aging_s`` seconds count as one step. Both
requests of a pair age alike, so their order never changes while they wait, and a
sorted list by a fixed key is enough.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from gpupool.model.ids import LeaseId


class WaitQueue:
    """Waiting requests in the order in which they are served."""

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._order: list[tuple[float, int, LeaseId]] = []
        self._keys: dict[LeaseId, tuple[float, int, LeaseId]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[LeaseId]:
        return (lease_id for _, _, lease_id in self._order)

    def __contains__(self, lease_id: LeaseId) -> bool:
        return lease_id in self._keys

    def add(self, lease_id: LeaseId, *, priority: int, arrival_s: float) -> None:
        """Takes in a request; ``arrival_s`` on any one clock, the same for all."""
        self._arrivals += 1
        key = (arrival_s - priority * self._aging_s, self._arrivals, lease_id)
        insort(self._order, key)
        self._keys[lease_id] = key

    def remove(self, lease_id: LeaseId) -> None:
        """Takes a request out."""
        key = self._keys.pop(lease_id)
        del self._order[bisect_left(self._order, key)]

    def position(self, lease_id: LeaseId) -> int:
        """Place from 1; 0 for one that does not wait."""
        key = self._keys.get(lease_id)
        return bisect_left(self._order, key) + 1 if key is not None else 0

    def first(self) -> LeaseId | None:
        """Head of the queue."""
        return self._order[0][2] if self._order else None
