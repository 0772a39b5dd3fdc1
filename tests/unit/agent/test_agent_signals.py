"""A program is told to stop however busy it is."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from gpupool_agent.signals import stop_on_signals


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


async def told(stopping: asyncio.Event) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(10):
        await stopping.wait()


async def test_a_signal_is_seen_when_the_loops_wake_up_pipe_is_full(
    capfd: pytest.CaptureFixture[str],
) -> None:
    stopping = stop_on_signals(signal.SIGTERM)
    loop = asyncio.get_running_loop()
    # No await in between: nobody empties the pipe, which holds a few hundred wake-ups.
    for _ in range(5000):
        loop.call_soon_threadsafe(int)
    await told(stopping)
    assert capfd.readouterr().err == ""


def test_the_signal_means_what_it_meant_once_the_loop_is_closed() -> None:
    async def main() -> None:
        await told(stop_on_signals(signal.SIGTERM))

    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
