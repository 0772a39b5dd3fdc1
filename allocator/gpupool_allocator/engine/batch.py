"""One round of the engine: what it has taken in, and what follows from it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gpupool.model.event import Event
from gpupool_allocator.core.effects import Delete, Effect, Put, Record
from gpupool_allocator.core.pool import Pool
from gpupool_allocator.engine.commit import Change

BATCH_ITEMS_MAX = 256
"""Inbox items in one batch, so that one answer never waits for thousands."""

BATCH_CHANGES_TARGET = 100
"""A batch ends with the event that reaches it: about one transaction."""


class Read:
    """A question to the pool between two events; answered after the batch's commit."""

    __slots__ = ("_ask", "_error", "_value", "future")

    def __init__(self, ask: Callable[[Pool], object]) -> None:
        self.future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._ask = ask
        self._value: object = None
        self._error: Exception | None = None

    def run(self, pool: Pool) -> None:
        """Asks; what the question raises is the asker's."""
        try:
            self._value = self._ask(pool)
        except Exception as error:  # passed on whole to the asker
            self._error = error

    def answer(self) -> None:
        """Gives the asker what was seen."""
        if self.future.done():
            return
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(self._value)


@dataclass(slots=True)
class Batch:
    """What one round does: commit ``changes`` (one list a core event), then ``tells``."""

    changes: list[list[Change]] = field(default_factory=list[list[Change]])
    events: list[Event] = field(default_factory=list[Event])
    tells: list[Effect | Read] = field(default_factory=list[Effect | Read])
    items: int = 0
    change_count: int = 0

    def add(self, effects: list[Effect]) -> None:
        """Takes the effects of one core event."""
        changes: list[Change] = []
        for effect in effects:
            if isinstance(effect, Put | Delete):
                changes.append(effect)
            elif isinstance(effect, Record):
                changes.append(effect)
                self.events.append(effect.event)
            else:
                self.tells.append(effect)
        if changes:
            self.changes.append(changes)
            self.change_count += len(changes)

    @property
    def is_full(self) -> bool:
        """Whether what comes next belongs to the next round."""
        return self.items >= BATCH_ITEMS_MAX or self.change_count >= BATCH_CHANGES_TARGET
