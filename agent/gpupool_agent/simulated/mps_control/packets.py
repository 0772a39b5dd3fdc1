"""Unix sockets that keep the borders of messages, as the real programs use.

``socket`` would cost more to import than everything else here together.
"""

import _socket
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SEQPACKET = 5
PACKET_BYTES_MAX = 65536
BACKLOG = 128
_PEERCRED = 17
_CREDENTIALS_BYTES = 12


class Packets:
    """One end of a connection. ``receive`` gives None once the other end is gone."""

    def __init__(self, raw: _socket.socket) -> None:
        self._raw = raw

    def fileno(self) -> int:
        """For poll."""
        return self._raw.fileno()

    def send(self, text: str) -> bool:
        """Send one message; False when nobody is there any more."""
        try:
            self._raw.send(text.encode())
        except OSError:
            return False
        return True

    def receive(self) -> str | None:
        """Wait for one message; None at the end, and after the time limit if there is one."""
        try:
            return self._raw.recv(PACKET_BYTES_MAX).decode(errors="replace") or None
        except OSError:
            return None

    def limit(self, seconds: float) -> None:
        """Wait no longer than this in ``receive``."""
        self._raw.settimeout(seconds)

    def peer(self) -> tuple[int, int]:
        """Process id and user id of the other end, as the kernel knows them."""
        raw = self._raw.getsockopt(_socket.SOL_SOCKET, _PEERCRED, _CREDENTIALS_BYTES)
        return int.from_bytes(raw[:4], "little"), int.from_bytes(raw[4:8], "little")

    def close(self) -> None:
        """Close this end."""
        self._raw.close()


class Door:
    """A socket that others connect to, open to every user who can reach its directory."""

    def __init__(self, path: str) -> None:
        self._raw = _socket.socket(_socket.AF_UNIX, SEQPACKET)
        if os.path.exists(path):
            os.unlink(path)
        self._raw.bind(path)
        os.chmod(path, 0o666)  # noqa: S103 - clients of any user connect
        self._raw.listen(BACKLOG)

    def fileno(self) -> int:
        """For poll."""
        return self._raw.fileno()

    def accept(self) -> Packets:
        """Give the next connection."""
        # What socket.socket.accept is built on; the stubs leave it out.
        accept: Callable[[], tuple[int, object]] = getattr(self._raw, "_accept")  # noqa: B009 - see above
        descriptor, _ = accept()
        return Packets(_socket.socket(fileno=descriptor))

    def close(self) -> None:
        """Listen no more."""
        self._raw.close()


def connect(path: str) -> Packets | None:
    """Connect to a door; None when nobody listens there."""
    raw = _socket.socket(_socket.AF_UNIX, SEQPACKET)
    try:
        raw.connect(path)
    except OSError:
        raw.close()
        return None
    return Packets(raw)


def pair() -> tuple[Packets, Packets]:
    """Two ends of one connection."""
    left, right = _socket.socketpair(_socket.AF_UNIX, SEQPACKET)
    return Packets(left), Packets(right)
