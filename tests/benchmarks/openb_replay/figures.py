"""What one replay cost and achieved, and how it is shown."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
from tests.benchmarks.openb_replay.holder import Outcome
from tests.benchmarks.openb_replay.trace import TracePod

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """CPU time used so far and memory resident now, of some processes together."""

    cpu_s: float
    rss_mib: float

    @classmethod
    def of(cls, pids: Sequence[int]) -> "Usage":
        """Reads it. Raises psutil.NoSuchProcess."""
        processes = [psutil.Process(pid) for pid in pids]
        times = [process.cpu_times() for process in processes]
        return cls(
            cpu_s=sum(each.user + each.system for each in times),
            rss_mib=sum(process.memory_info().rss for process in processes) / MIB,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU seconds of one phase, and memory at its end, of one kind of process."""

    cpu_s: float
    rss_mib: float

    @classmethod
    def between(cls, before: Usage, after: Usage) -> "Cost":
        """What was used from one reading to the next."""
        return cls(cpu_s=round(after.cpu_s - before.cpu_s, 2), rss_mib=round(after.rss_mib, 1))

    def __str__(self) -> str:
        return f"{self.cpu_s:.1f} s CPU, {self.rss_mib:.0f} MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One order of pods, offered, kept and given back.

    Percentages are of the GPUs of all hosts, in requested thousandths; milliseconds
    are from the client's call to its answer.
    """

    order: str
    pods: int
    granted: int
    refused: int
    arrived_pct: float
    allocated_pct: float
    offering_s: float
    grants_per_s: float
    grant_ms_p50: float
    grant_ms_p99: float
    refusal_ms_p50: float
    refusal_ms_p99: float
    allocator: Cost
    allocator_cpu_ms_per_grant: float
    fleets: Cost
    clients: Cost
    release_s: float
    empty_s: float

    def lines(self) -> list[str]:
        """For people."""
        allocator, fleets, clients = self.allocator, self.fleets, self.clients
        return [
            f"{self.granted} of {self.pods} pods granted, {self.refused} refused",
            f"{self.offering_s:.1f} s, {self.grants_per_s:.1f} grants/s",
            f"GPU share allocated {self.allocated_pct:.2f} % at {self.arrived_pct:.1f} % arrived",
            f"call to grant p50 {self.grant_ms_p50:.1f} ms, p99 {self.grant_ms_p99:.1f} ms",
            f"call to refusal p50 {self.refusal_ms_p50:.1f} ms, p99 {self.refusal_ms_p99:.1f} ms",
            f"allocator {allocator} ({self.allocator_cpu_ms_per_grant:.2f} ms CPU a grant)",
            f"fleets {fleets}, clients {clients}",
            f"all released in {self.release_s:.1f} s, pool empty after {self.empty_s:.1f} s",
        ]


def share_pct(pods: Sequence[TracePod], capacity_milli: int) -> float:
    """What pods ask for, in percent of the capacity."""
    return 100 * sum(pod.demand_milli for pod in pods) / capacity_milli


def percentiles(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """The 50th and 99th of the times, in ms; zeros without any."""
    if len(outcomes) < 2:
        only = outcomes[0].elapsed_ms if outcomes else 0.0
        return only, only
    cuts = statistics.quantiles((each.elapsed_ms for each in outcomes), n=100, method="inclusive")
    return round(cuts[49], 2), round(cuts[98], 2)
