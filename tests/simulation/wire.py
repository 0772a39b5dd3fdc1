"""Streams between nodes and the allocator: in order, late, and cut without notice.

A message can also be lost on a stream that lives on, as by a bug at either end of it.
"""

from collections.abc import Callable
from typing import Protocol

from tests.simulation.clock import Clock

from gpupool.model.assignment import DesiredState, Hello, Report, Welcome
from gpupool.model.ids import ConnectionId


class Link:
    """One stream. What is on its way when it is cut never arrives."""

    def __init__(self, clock: Clock, connection: ConnectionId) -> None:
        self.clock = clock
        self.connection = connection
        self.open = True
        self.silent = False
        self.lose_up = self.lose_down = 0
        self.down: Callable[[Welcome | DesiredState], None] = lambda _: None
        self.up: Callable[[Report], None] = lambda _: None
        self.closed: Callable[[], None] = lambda: None
        self.closed_above: Callable[[], None] = lambda: None
        self._up_free = self._down_free = 0.0

    def send_up(self, report: Report) -> None:
        """The agent sends; later messages never overtake."""
        # An inventory is said once: it is what no later report puts right.
        if self.lose_up and report.inventory is None:
            self.lose_up -= 1
            return
        self._up_free = max(self._up_free, self.clock.now + self._delay())
        self.clock.after(
            self._up_free - self.clock.now, lambda: self.up(report) if self._alive() else None
        )

    def send_down(self, message: Welcome | DesiredState) -> None:
        """The allocator sends."""
        if self.lose_down and isinstance(message, DesiredState):
            self.lose_down -= 1
            return
        self._down_free = max(self._down_free, self.clock.now + self._delay())
        self.clock.after(
            self._down_free - self.clock.now,
            lambda: self.down(message) if self._alive() else None,
        )

    def close(self) -> None:
        """Either end closes; the other hears of it a moment later."""
        if not self.open:
            return
        self.open = False
        if not self.silent:
            self.clock.after(self._delay(), self.closed_above)
            self.clock.after(self._delay(), self.closed)

    def _alive(self) -> bool:
        return self.open and not self.silent

    def _delay(self) -> float:
        # Mostly quick, sometimes a second late.
        quick = self.clock.chance.uniform(0.0005, 0.02)
        return quick if self.clock.chance.random() < 0.95 else quick + 1.0


class Allocator(Protocol):
    """What a machine needs of the allocator's side."""

    serving: bool

    def next_id(self) -> int: ...

    def accept(self, link: Link, hello: Hello) -> None: ...
