"""Being told to stop."""

import asyncio
import signal
from collections.abc import Callable
from types import FrameType


def call_on_hangup(action: Callable[[], None]) -> None:
    """Call on the running loop at each SIGHUP; call this on the main thread."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, action)


def stop_on_signals(*numbers: signal.Signals) -> asyncio.Event:
    """Give an event of the running loop that the first of these signals sets.

    However busy the loop is, and until it is closed. Call it on the main thread.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        if not loop.is_closed():
            loop.call_soon_threadsafe(stopping.set)

    for number in numbers:
        # Wakes a loop that is just going to sleep, and goes when the loop is closed. But
        # it loses the signal when it finds the loop's wake-up pipe full, as it is when
        # many threads report at once.
        loop.add_signal_handler(number, stopping.set)
        # Loses none, in the place of the handler that does nothing.
        signal.signal(number, stop)
    # A full pipe is then no cause for a complaint on standard error.
    signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)
    return stopping
