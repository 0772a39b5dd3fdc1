"""Tells systemd how the service is (sd_notify); does nothing elsewhere."""

import os
import socket


def notify(message: str) -> None:
    """Sends "READY=1", "STOPPING=1" or "STATUS=..." to the service manager, if any."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    # A leading @ stands for the abstract namespace's zero byte.
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.sendto(message.encode(), address)
