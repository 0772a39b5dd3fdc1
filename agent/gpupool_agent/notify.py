"""Telling systemd: one datagram to $NOTIFY_SOCKET, nothing where there is none."""

import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager


def notify(state: str) -> None:
    """Send a state such as "READY=1"; raises OSError where the socket refuses it."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.sendto(state.encode(), address)


@contextmanager
def reloading() -> Generator[None]:
    """Tell systemd that settings are being read anew, and that they have been."""
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
    try:
        yield
    finally:
        notify("READY=1")
