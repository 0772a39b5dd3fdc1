"""The directory of a fleet: control socket, and the hardware of each node under nodes/."""

import fcntl
import os
from pathlib import Path

from gpupool_agent.settings import SOCKET_PATH_BYTES_MAX

SOCKET_NAME = "control.sock"


class DirectoryTakenError(RuntimeError):
    """Another fleet runs on the control directory."""


class ControlPathError(RuntimeError):
    """The control directory's path is too long for a socket in it."""


class ControlDirectory:
    """A fleet's directory, locked while the object is open.

    Raises DirectoryTakenError, ControlPathError.
    """

    def __init__(self, path: Path) -> None:
        longest = len(os.fsencode(path.absolute() / SOCKET_NAME))
        if longest > SOCKET_PATH_BYTES_MAX:
            raise ControlPathError(
                f"--control {path}: its socket's path has {longest} bytes, "
                f"at most {SOCKET_PATH_BYTES_MAX} are possible"
            )
        path.mkdir(parents=True, exist_ok=True)
        # Holders of any user find their node in here; the control socket stays closed.
        path.chmod(0o755)
        self.path = path
        self.pci_trees = path / "pci"
        self.nodes = path / "nodes"
        self.nodes.mkdir(exist_ok=True)
        self._lock = os.open(path / "fleet.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise DirectoryTakenError(f"another fleet runs on {path}") from error

    def close(self) -> None:
        """Let another fleet have it."""
        os.close(self._lock)
