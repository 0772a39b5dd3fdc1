"""Amounts as people write them: "10GiB", "0.5", "30s"."""

import math
import re

from gpupool.errors import InvalidRequestError

_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?(MiB|GiB|TiB|MB|GB|TB)?").fullmatch
_MIB = {
    "MiB": 1.0,
    "GiB": 1024.0,
    "TiB": 1024.0**2,
    "MB": 1000.0**2 / 1024.0**2,
    "GB": 1000.0**3 / 1024.0**2,
    "TB": 1000.0**4 / 1024.0**2,
}

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?").fullmatch
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_WHOLE_PCT = 100


def memory_mib(value: int | str, field: str = "memory") -> int:
    """MiB of a number of MiB or a text with MiB, GiB, TiB, MB, GB or TB, rounded up.

    Raises InvalidRequestError naming ``field``.
    """
    if isinstance(value, int):
        return value
    found = _MEMORY(value.strip())
    if found is None:
        raise _bad(field, value, 'sizes as "10GiB", "512MiB" or whole MiB')
    # Rounded up: a GPU with less than was asked for must not be granted.
    mib = float(found[1]) * _MIB[found[2] or "MiB"]
    return int(mib) + (mib > int(mib))


def duration_s(value: float | str, field: str = "duration") -> float:
    """Seconds of a number of seconds or a text with ms, s, m, h or d.

    Raises InvalidRequestError naming ``field``.
    """
    if isinstance(value, (int, float)):
        if not math.isfinite(value):
            raise _bad(field, value, "finite numbers of seconds")
        return float(value)
    found = _DURATION(value.strip())
    if found is None:
        raise _bad(field, value, 'durations as "30s", "5m", "2h", "1d" or seconds')
    return float(found[1]) * _SECONDS[found[2] or "s"]


def whole_or_share(gpus: float) -> tuple[int, int]:
    """(whole GPUs, share in percent), exactly one of them not 0, or both 0 for none.

    A number below 1 is a share of one GPU, which must be whole percent; 1 and above
    are whole GPUs. Raises InvalidRequestError naming "gpus".
    """
    accepted = "0.01..0.99 in whole percent, or whole numbers from 0"
    if not math.isfinite(gpus) or gpus < 0:
        raise _bad("gpus", gpus, accepted)
    if gpus == int(gpus):
        return int(gpus), 0
    share_pct = round(gpus * _WHOLE_PCT)
    if gpus > 1 or abs(gpus * _WHOLE_PCT - share_pct) > 1e-6 or share_pct == 0:
        raise _bad("gpus", gpus, accepted)
    return 0, share_pct


def _bad(field: str, value: object, accepted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {value!r} is not in {accepted}", field=field)
