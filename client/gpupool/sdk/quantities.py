"""Amounts as people write them: "10GiB", "0.5", "30s"."""

import math
import re

from gpupool.errors import InvalidRequestError
from gpupool.model.limits import GPUS_PER_MEMBER_MAX

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

_SHOWN_CHARS_MAX = 80
_WHOLE_PCT = 100
_ROUNDING = 1e-9
"""What sums of floats may be off by; a share that is off by more is another one."""


def memory_mib(value: int | str, field: str = "memory", most: int = 2**63 - 1) -> int:
    """MiB of a number of MiB or a text with MiB, GiB, TiB, MB, GB or TB, rounded up.

    Raises InvalidRequestError naming ``field``, also for less than 0 or over ``most``.
    """
    mib = value if isinstance(value, int) else _mib_of_text(value, field)
    if not 0 <= mib <= most:
        raise _bad(field, value, f"0..{most} MiB")
    # Rounded up: a GPU with less than was asked for must not be granted.
    return math.ceil(mib)


def _mib_of_text(value: str, field: str) -> float:
    found = _MEMORY(value.strip())
    if found is None:
        raise _bad(field, value, 'sizes as "10GiB", "512MiB" or whole MiB')
    return float(found[1]) * _MIB[found[2] or "MiB"]


def duration_s(
    value: float | str, field: str = "duration", least: float = 0.0, most: float = math.inf
) -> float:
    """Seconds of a number of seconds or a text with ms, s, m, h or d.

    Raises InvalidRequestError naming ``field``, also for what is no finite number in
    ``least``..``most``.
    """
    seconds = float(value) if isinstance(value, (int, float)) else _seconds_of_text(value, field)
    if not (math.isfinite(seconds) and least <= seconds <= most):
        raise _bad(field, value, f"{least:g}..{most:.0f} s")
    return seconds


def _seconds_of_text(value: str, field: str) -> float:
    found = _DURATION(value.strip())
    if found is None:
        raise _bad(field, value, 'durations as "30s", "5m", "2h", "1d" or seconds')
    return float(found[1]) * _SECONDS[found[2] or "s"]


def whole_or_share(gpus: float) -> tuple[int, int]:
    """(whole GPUs, share in percent), exactly one of them not 0, or both 0 for none.

    A number below 1 is a share of one GPU, which must be whole percent; 1 and above
    are whole GPUs. Raises InvalidRequestError naming "gpus".
    """
    accepted = f"0.01..0.99 in whole percent, or whole numbers in 0..{GPUS_PER_MEMBER_MAX}"
    if not 0 <= gpus <= GPUS_PER_MEMBER_MAX:
        raise _bad("gpus", gpus, accepted)
    if gpus == int(gpus):
        return int(gpus), 0
    if gpus > 1:
        why = "a process can use one MPS daemon, so no parts of several GPUs: take replicas"
        raise _bad("gpus", gpus, f"{accepted}; {why}")
    share_pct = round(gpus * _WHOLE_PCT)
    if abs(gpus * _WHOLE_PCT - share_pct) > _ROUNDING or share_pct == 0:
        raise _bad("gpus", gpus, accepted)
    return 0, share_pct


def _bad(field: str, value: object, accepted: str) -> InvalidRequestError:
    shown = repr(value)
    if len(shown) > _SHOWN_CHARS_MAX:
        shown = f"{shown[:_SHOWN_CHARS_MAX]}..."
    return InvalidRequestError(f"{field}: {shown} is not in {accepted}", field=field)
