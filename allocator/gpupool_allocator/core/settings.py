"""Settings of the core: what the pool's behaviour depends on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Validated by the program that reads them; the core trusts the ranges.

    ``grain_pct``: smallest step of a share, 1..100, divides 100.
    ``heartbeat_timeout_s``: silence after which a node counts as unreachable.
    ``report_interval_s``: how often a node reports when nothing changes.
    ``queue_max``: requests that may wait; one more is refused.
    ``aging_s``: waiting this long is worth one step of priority.
    ``ended_kept``: ended leases remembered, so that a late retry finds its lease.
    ``prepare_attempts``: times that a member is tried which its node cannot prepare, or
    prepares and loses again.
    ``reservation_s``: how often the places kept for the queue's head are chosen anew.
    ``reconnects_per_s``: agents told to come back each second after a restart.
    ``version``: told to agents.
    """

    grain_pct: int = 10
    heartbeat_timeout_s: float = 10.0
    report_interval_s: float = 5.0
    queue_max: int = 10_000
    aging_s: float = 3600.0
    ended_kept: int = 10_000
    prepare_attempts: int = 3
    reservation_s: float = 5.0
    reconnects_per_s: int = 500
    version: str = ""
