"""Telling systemd: one datagram to $NOTIFY_SOCKET, nothing where there is none."""

import os
import socket


def notify(state: str) -> None:
    """Send a state such as "READY=1"; raises OSError where the socket refuses it."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.sendto(state.encode(), address)
