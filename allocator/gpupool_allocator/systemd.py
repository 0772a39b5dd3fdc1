"""Tells systemd how the service is (sd_notify); does nothing elsewhere."""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

PINGS_PER_INTERVAL = 3


def notify(message: str) -> None:
    """Sends "READY=1", "STOPPING=1" or "STATUS=..." to the service manager, if any."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    # A leading @ stands for the abstract namespace's zero byte.
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.sendto(message.encode(), address)


@contextmanager
def reloading() -> Generator[None]:
    """Tells systemd that settings are being read anew, and that they have been."""
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
    try:
        yield
    finally:
        notify("READY=1")


def watchdog_interval_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """How long systemd waits for a sign of life, seconds; None where it does not wait.

    It waits for the process that it started, which may be the keeper of this one.
    """
    mine = {str(os.getpid()), str(os.getppid())}
    if environment.get("WATCHDOG_PID", str(os.getpid())) not in mine:
        return None
    try:
        return int(environment["WATCHDOG_USEC"]) / 1e6
    except (KeyError, ValueError):
        return None


async def feed_watchdog(stuck: Callable[[], str]) -> None:
    """Gives signs of life until cancelled, as long as ``stuck`` gives no reason."""
    every_s = watchdog_interval_s()
    if every_s is None:
        return
    while True:
        reason = stuck()
        notify(f"STATUS=stuck: {reason}" if reason else "WATCHDOG=1")
        await asyncio.sleep(every_s / PINGS_PER_INTERVAL)
