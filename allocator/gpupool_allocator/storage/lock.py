"""One allocator a store: an exclusive lock on a file beside the database.

SQLite's own locks last for one transaction. This one lasts as long as the process
(the kernel drops it with the last descriptor, however the process ends), so that a
second allocator is refused at its start instead of at its first commit.
"""

import fcntl
import os
from pathlib import Path

from gpupool_allocator.storage.store import StoreLockedError

_PID_CHARS = 20


class StoreLock:
    """Holds the lock of the store at ``path`` from its making to ``release``.

    Raises StoreLockedError, which names the store and the holder's pid, and OSError.
    """

    def __init__(self, path: Path) -> None:
        # The file stays when the lock goes: removing it would let two processes
        # lock two files of one name.
        self._file = os.open(lock_path(path), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, _PID_CHARS, 0).decode("ascii", "replace").strip()
            os.close(self._file)
            who = f"process {holder}" if holder else "a process that is just starting"
            raise StoreLockedError(f"{path} is in use by {who}: one allocator a store") from None
        except OSError:
            os.close(self._file)
            raise
        # Written over in place: a truncated file would need a new block, which a full
        # disk does not have at a restart.
        os.pwrite(self._file, f"{os.getpid():<{_PID_CHARS}}".encode(), 0)

    def release(self) -> None:
        """Lets the next allocator in."""
        os.close(self._file)


def lock_path(path: Path) -> Path:
    """Where the lock of a store is."""
    return path.with_name(path.name + ".lock")
