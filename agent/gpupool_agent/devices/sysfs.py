"""Reading small kernel files that may be missing, refuse to be read, or say "N/A".

A host has hundreds in /sys and thousands in /proc, and they are read again and again,
which with pathlib takes several times as long: so paths are plain texts here.
"""

import os

BYTES_MAX = 4096
"""No file that is read here is longer."""


def read_file(path: str) -> str:
    """Content without surrounding blanks. OSError where it cannot be read."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        content = os.read(descriptor, BYTES_MAX)
    finally:
        os.close(descriptor)
    return content.decode(errors="replace").strip()


def read_text(path: str) -> str:
    """Content without surrounding blanks; empty where it cannot be read."""
    try:
        return read_file(path)
    except OSError:
        return ""


def read_int(path: str, *, unknown: int) -> int:
    """A number, decimal or with 0x; ``unknown`` where there is none."""
    try:
        return int(read_text(path), 0)
    except ValueError:
        return unknown


def names_in(folder: str) -> frozenset[str]:
    """Names in a folder; none where it cannot be read."""
    try:
        return frozenset(os.listdir(folder))  # noqa: PTH208 - see above
    except OSError:
        return frozenset()


def real_path(path: str) -> str:
    """Where a path leads in the end, as the kernel sees it; empty: nowhere."""
    try:
        descriptor = os.open(path, os.O_PATH)
        try:
            return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - see above
        finally:
            os.close(descriptor)
    except OSError:
        return ""
