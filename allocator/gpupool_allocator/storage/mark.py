"""A file beside the store that says: a pool has been stored here.

A store that was emptied or lost looks like one that never was. Served as a new pool, it
would grant what the old pool's jobs run on. So a store that has its tables leaves a mark,
and where the mark is, a store without them is refused.
"""

import errno
import os
from pathlib import Path

from gpupool_allocator.storage.store import StoreUnusableError

_TEXT = (
    b"A pool has been stored here. While this file is here, an allocator refuses to start with a "
    b"store that is empty or gone (setting new_store).\n"
)


class StoreMark:
    """The mark of the store at ``path``."""

    def __init__(self, path: Path) -> None:
        self._store = path
        self._path = path.with_name(path.name + ".mark")
        # Release 0.1.0 left no mark, but kept space back once it had made its store.
        self._of_0_1_0 = path.with_name(path.name + ".reserve")

    @property
    def is_there(self) -> bool:
        """Whether a pool has been stored here."""
        return self._path.exists() or self._of_0_1_0.exists()

    def set(self) -> None:
        """Leaves the mark, durably. OSError, but for a full disk: the next start does it then."""
        if self._path.exists():
            return
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.write(file, _TEXT)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def missed(self) -> StoreUnusableError:
        """The refusal of a store that is not what was left here."""
        return StoreUnusableError(
            f"{self._store} is empty or gone, and a pool has been stored there: put it back from "
            "a backup; or, to give that pool up and begin a new one, start once with --new-store "
            "(new_store = true)"
        )
