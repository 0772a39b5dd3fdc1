"""A small pool on the test's own loop, or on a thread beside a test without one."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
import pytest_asyncio
from tests.unit.client.small_pool import SmallPool


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[SmallPool]:
    """A pool of two GPUs."""
    small = SmallPool()
    await small.start()
    yield small
    await small.stop()


class PoolThread:
    """A SmallPool served by a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.pool = self.run(self._made)

    async def _made(self) -> SmallPool:
        small = SmallPool()
        await small.start()
        return small

    def run(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result(30)

    def stop(self) -> None:
        self.run(self.pool.stop)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()


@pytest.fixture
def pool_thread() -> Iterator[PoolThread]:
    served = PoolThread()
    yield served
    served.stop()
