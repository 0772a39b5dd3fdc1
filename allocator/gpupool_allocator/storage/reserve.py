"""Disk space kept back, so that a full disk can still take the way out.

When the disk is full, the allocator must still write the ends of leases. A file of
allocated blocks beside the database is given up then, once, and made again when
there is room for it and as much again.
"""

import os
from pathlib import Path


class Reserve:
    """The file that holds the space; ``size`` in bytes, 0 keeps nothing back."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        try:
            self._held = path.stat().st_size == size
        except FileNotFoundError:
            self._held = False

    @property
    def held(self) -> bool:
        """Whether the space is kept back now."""
        return self._held

    def free_bytes(self) -> int:
        """Bytes that this process may still write on the file system."""
        disk = os.statvfs(self._path.parent)
        return disk.f_bavail * disk.f_frsize

    def restore(self) -> None:
        """Keeps the space back again. OSError when there is too little."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            if self._size:
                # Allocated, not only sized: a sparse file would keep nothing back.
                os.posix_fallocate(file, 0, self._size)
        except OSError:
            self._path.unlink()
            raise
        finally:
            os.close(file)
        self._held = True

    def give_up(self) -> bool:
        """Frees the space; False when none was kept back."""
        held, self._held = self._held, False
        self._path.unlink(missing_ok=True)
        return held and self._size > 0
