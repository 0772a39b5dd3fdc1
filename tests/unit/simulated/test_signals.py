"""A fleet is told to stop however busy it is."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from gpupool_agent.simulated.signals import stop_on_signals


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


async def test_a_signal_is_seen_when_the_loops_wake_up_pipe_is_full() -> None:
    stopping = stop_on_signals(signal.SIGTERM)
    loop = asyncio.get_running_loop()
    # No await in between: nobody empties the pipe, which holds a few hundred wake-ups.
    for _ in range(5000):
        loop.call_soon_threadsafe(int)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(10):
        await stopping.wait()
