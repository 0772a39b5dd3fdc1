"""A clock that jumps from event to event, and seeded chance."""

import heapq
from collections.abc import Callable
from random import Random


class Clock:
    """Everything that will happen, in order of time, then of being planned."""

    def __init__(self, seed: int) -> None:
        self.now = 1000.0
        self.chance = Random(seed)
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def unix_s(self) -> float:
        """Wall time, an hour-like distance away from the monotonic one."""
        return 1.7e9 + self.now

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        """Plans something."""
        self._count += 1
        heapq.heappush(self._planned, (self.now + max(0.0, delay_s), self._count, do))

    def step(self) -> bool:
        """Lets the next thing happen; False when nothing is planned."""
        if not self._planned:
            return False
        self.now, _, do = heapq.heappop(self._planned)
        do()
        return True

    def run_for(self, seconds: float) -> None:
        """Lets everything happen that is planned within a time."""
        until = self.now + seconds
        while self._planned and self._planned[0][0] <= until:
            self.step()
        self.now = until
