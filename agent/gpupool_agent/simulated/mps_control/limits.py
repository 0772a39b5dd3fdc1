"""Limits of servers and clients, with the real program's odd rules for names of devices.

A pinned memory limit is kept under exactly the name that it was set with, an ordinal or
a UUID: it is read back under that name only. Where both names of one GPU have one, the
last that was set counts. An ordinal that is too high is passed over in silence; a name
that is neither takes away the limit of device 0. "1024M" reads back as "1G", a number
with no unit or an unknown one is in MiB, and what is no number takes the limit away.
"""

ORDINALS_MAX = 32


def parse_mib(text: str) -> int:
    """Read "2G", "300M", "300MB" or "12"; 0: it is no amount."""
    digits = len(text) - len(text.lstrip("0123456789"))
    if not digits:
        return 0
    return int(text[:digits]) * (1024 if text[digits : digits + 1].upper() == "G" else 1)


def format_mib(mib: int) -> str:
    """Write an amount as the real program does."""
    return f"{mib // 1024}G" if mib % 1024 == 0 else f"{mib}M"


def parse_percentage(text: str) -> float | None:
    """Read a percentage in (0, 100]; None: it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 < value <= 100.0 else None


def parse_environment(text: str) -> dict[str, int]:
    """Read CUDA_MPS_PINNED_DEVICE_MEM_LIMIT: MiB by name of device."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, amount = part.partition("=")
        mib = parse_mib(amount.strip())
        if name.strip() and mib:
            found[name.strip()] = mib
    return found


class MemoryLimits:
    """Pinned memory limits by name of device; ``uuids`` are the daemon's own, in order."""

    def __init__(self, uuids: tuple[str, ...]) -> None:
        self._uuids = uuids
        self._mib: dict[str, int] = {}

    def copy(self) -> "MemoryLimits":
        """Give limits of their own to a new server."""
        new = MemoryLimits(self._uuids)
        new._mib = dict(self._mib)
        return new

    def set(self, name: str, mib: int) -> None:
        """Set one; 0 takes it away, an unknown device changes nothing."""
        if name not in self._uuids and not name.isdecimal():
            self._mib.pop("0", None)
            return
        if name.isdecimal() and int(name) >= ORDINALS_MAX:
            return
        self._mib.pop(name, None)
        if mib:
            self._mib[name] = mib

    def get(self, name: str) -> int | None:
        """Give what was set under exactly this name."""
        return self._mib.get(name)

    def effective(self, uuid: str) -> int | None:
        """Give what counts for a GPU of the daemon: the last that was set."""
        names = {uuid, str(self._uuids.index(uuid))} if uuid in self._uuids else {uuid}
        return next((mib for name, mib in reversed(self._mib.items()) if name in names), None)
