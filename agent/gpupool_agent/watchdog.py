"""Telling systemd's watchdog that the program is alive, from the loop that does its work."""

import asyncio
import os
from collections.abc import Callable, Mapping

from gpupool_agent.notify import notify

PINGS_PER_INTERVAL = 3
STATUS_S = 5.0
"""How old a status may be."""


def interval_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """How long systemd waits for a sign of life, None where it does not."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    try:
        return int(environment["WATCHDOG_USEC"]) / 1e6
    except (KeyError, ValueError):
        return None


async def feed(stuck: Callable[[], str] = lambda: "", status: Callable[[], str] = str) -> None:
    """Give signs of life, and the status when it changes, until cancelled.

    ``stuck`` is asked before each sign: a reason means that the program is of no use and
    shall be started anew, so none is given. What a new start would not mend, such as a
    driver that hangs, belongs into ``status`` instead.
    """
    every_s = interval_s()
    told = ""
    while True:
        said = status()
        if said != told:
            notify(f"STATUS={said}")
            told = said
        if every_s is not None:
            reason = stuck()
            notify(f"STATUS=stuck: {reason}" if reason else "WATCHDOG=1")
        await asyncio.sleep(min((every_s or STATUS_S) / PINGS_PER_INTERVAL, STATUS_S))
