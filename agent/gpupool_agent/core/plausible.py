"""Readings that cannot be. A driver in trouble tells them, and nobody must act on one.

Each function says what is wrong with a value, in words; empty: nothing is. Usage is always
what the device says now, never a running difference, so a wrong value is gone with the next
right one.
"""

from gpupool.model.limits import GPU_MEMORY_MIB_MAX

MIB = 2**20
MEMORY_BYTES_MAX = GPU_MEMORY_MIB_MAX * MIB

UTILIZATION_PCT = (0, 100)
TEMPERATURE_C = (-50, 250)
POWER_MW = (0, 100_000_000)


def memory_doubt(used_bytes: int, total_bytes: int, reserved_bytes: int) -> str:
    """Of a device's memory; ``reserved_bytes`` are the driver's own part of it."""
    if not 0 < total_bytes <= MEMORY_BYTES_MAX:
        return f"{_mib(total_bytes)} of memory"
    if not 0 <= reserved_bytes <= total_bytes:
        return f"{_mib(reserved_bytes)} reserved of {_mib(total_bytes)}"
    if not 0 <= used_bytes <= total_bytes:
        return f"{_mib(used_bytes)} in use of {_mib(total_bytes)}"
    return ""


def process_doubt(pid: int, used_bytes: int, total_bytes: int) -> str:
    """Of the memory of a process on a device that has ``total_bytes``."""
    if 0 <= used_bytes <= total_bytes:
        return ""
    return f"{_mib(used_bytes)} in use by process {pid}, of {_mib(total_bytes)}"


def range_doubt(what: str, value: int | None, accepted: tuple[int, int]) -> str:
    """Of a measurement; None was not measured."""
    low, high = accepted
    if value is None or low <= value <= high:
        return ""
    return f"{what} {value}, which is not in {low}..{high}"


def _mib(number: int) -> str:
    return f"{number // MIB} MiB"
