"""Reading small kernel files that may be missing, refuse to be read, or say "N/A"."""

from pathlib import Path


def read_text(path: Path) -> str:
    """Content without surrounding blanks; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_int(path: Path, *, unknown: int) -> int:
    """A number, decimal or with 0x; ``unknown`` where there is none."""
    try:
        return int(read_text(path), 0)
    except ValueError:
        return unknown
