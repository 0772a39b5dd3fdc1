"""Durations and times: float seconds in the pool, nanoseconds on the wire."""

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from gpupool.wire.door import path
from gpupool.wire.errors import BadField

_NANOS = 1_000_000_000
_DURATION_SECONDS_MAX = 315_576_000_000
_UNIX_S_MAX = 253_402_300_799
"""End of the year 9999, the wire's last moment."""


def duration_to_proto(seconds: float) -> Duration:
    """Rounded to the nanosecond."""
    whole, nanos = _split(seconds)
    return Duration(seconds=whole, nanos=nanos)


def duration_from_proto(
    at: str, name: str, value: Duration, least_s: float, most_s: float
) -> float:
    """Seconds in least_s..most_s; BadField also for parts that disagree in sign."""
    whole, nanos = value.seconds, value.nanos
    if (
        not -_DURATION_SECONDS_MAX <= whole <= _DURATION_SECONDS_MAX
        or not -_NANOS < nanos < _NANOS
        or (whole < 0 < nanos)
        or (nanos < 0 < whole)
    ):
        accepted = f"{least_s:.15g}..{most_s:.15g} s, well-formed"
        raise BadField(path(at, name), (whole, nanos), accepted, unit="(s, ns)")
    seconds = (whole * _NANOS + nanos) / _NANOS
    if not least_s <= seconds <= most_s:
        accepted = f"{least_s:.15g}..{most_s:.15g} s"
        raise BadField(path(at, name), seconds, accepted, unit="s")
    return seconds


def timestamp_to_proto(unix_s: float) -> Timestamp:
    """Rounded to the nanosecond."""
    whole, nanos = _split(unix_s)
    return Timestamp(seconds=whole, nanos=nanos)


def timestamp_from_proto(at: str, name: str, value: Timestamp) -> float:
    """Seconds since 1970, up to the year 9999."""
    if not 0 <= value.seconds <= _UNIX_S_MAX or not 0 <= value.nanos < _NANOS:
        shown = (value.seconds, value.nanos)
        raise BadField(path(at, name), shown, "times from 1970 to 9999", unit="(s, ns)")
    return (value.seconds * _NANOS + value.nanos) / _NANOS


def _split(seconds: float) -> tuple[int, int]:
    # The fraction of a float is exact, so only the last step rounds.
    whole = int(seconds)
    nanos = round((seconds - whole) * _NANOS)
    if abs(nanos) == _NANOS:
        return whole + (1 if nanos > 0 else -1), 0
    return whole, nanos
