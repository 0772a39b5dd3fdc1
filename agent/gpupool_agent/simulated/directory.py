"""The directory of a fleet: control socket, and the hardware of each node under nodes/."""

import fcntl
import os
from pathlib import Path


class DirectoryTakenError(RuntimeError):
    """Another fleet runs on the control directory."""


class ControlDirectory:
    """A fleet's directory, locked while the object is open. Raises DirectoryTakenError."""

    def __init__(self, path: Path) -> None:
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
