"""Being told to stop."""

import asyncio
import signal
from types import FrameType


def stop_on_signals(*numbers: signal.Signals) -> asyncio.Event:
    """Give an event of the running loop that the first of these signals sets.

    Not ``loop.add_signal_handler``: that loses a signal when it finds the loop's
    wake-up pipe full, as it is when hundreds of driver threads report at once. Call
    it on the main thread.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        loop.call_soon_threadsafe(stopping.set)

    for number in numbers:
        signal.signal(number, stop)
    return stopping
