"""Reading small kernel files that may be missing, refuse to be read, or say "N/A"."""

import os
from pathlib import Path

BYTES_MAX = 4096
"""No file of sysfs is longer."""


def read_text(path: Path) -> str:
    """Content without surrounding blanks; empty where it cannot be read."""
    try:
        # A third of the cost of Path.read_text, and a host has hundreds of these files.
        descriptor = os.open(path, os.O_RDONLY)
        try:
            content = os.read(descriptor, BYTES_MAX)
        finally:
            os.close(descriptor)
    except OSError:
        return ""
    return content.decode(errors="replace").strip()


def read_int(path: Path, *, unknown: int) -> int:
    """A number, decimal or with 0x; ``unknown`` where there is none."""
    try:
        return int(read_text(path), 0)
    except ValueError:
        return unknown
