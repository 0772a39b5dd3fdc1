"""What Prometheus reads. The names are a contract: dashboards and alerts use them.

Counters are counted where things happen; the pool's own figures are derived from
one summary at each scrape, so they can neither drift nor cost anything in between.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from gpupool.model.views import PoolSummary
from gpupool_allocator.telemetry import TelemetryTotals

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_ITEMS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
MIB = 1024 * 1024


class Metrics:
    """The allocator's counters, in a registry of their own."""

    def __init__(self, version: str) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._pool = _PoolFigures()
        registry.register(self._pool)
        ProcessCollector(registry=registry)
        Gauge("gpupool_build_info", "Always 1.", ["version"], registry=registry).labels(
            version=version
        ).set(1)
        self.grants = Counter("gpupool_grants_total", "Leases granted.", registry=registry)
        self.refusals = Counter(
            "gpupool_refusals_total", "Commands refused.", ["code"], registry=registry
        )
        self.events = Counter(
            "gpupool_events_total", "Changes of the pool.", ["kind"], registry=registry
        )
        self.alarms = Counter(
            "gpupool_alarms_total", "Things that must never happen.", ["code"], registry=registry
        )
        self.commits = Counter(
            "gpupool_store_commits_total",
            "Transactions committed, each with one sync to disk.",
            registry=registry,
        )
        self.commit_changes = Counter(
            "gpupool_store_changes_total", "Records and events committed.", registry=registry
        )
        self.commit_seconds = Histogram(
            "gpupool_store_commit_seconds",
            "Time until a batch was durable.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.batch_items = Histogram(
            "gpupool_engine_batch_items",
            "Events and reads handled in one batch.",
            buckets=_ITEMS,
            registry=registry,
        )
        self.acquire_seconds = Histogram(
            "gpupool_acquire_seconds",
            "Time from a request's arrival to its durable grant.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.agents_connected = Gauge(
            "gpupool_agent_streams", "Open streams of agents.", registry=registry
        )

    def count_event(self, kind: str) -> None:
        """Counts one committed change."""
        self.events.labels(kind=kind).inc()
        if kind == "lease.granted":
            self.grants.inc()

    def render(self, summary: PoolSummary, telemetry: TelemetryTotals) -> bytes:
        """The text that a scrape gets."""
        self._pool.show(summary, telemetry)
        return generate_latest(self._registry)


class _PoolFigures(Collector):
    """Gauges from the summary of one moment."""

    def __init__(self) -> None:
        self._families: list[GaugeMetricFamily] = []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        return iter(self._families)

    def show(self, summary: PoolSummary, telemetry: TelemetryTotals) -> None:
        nodes = GaugeMetricFamily("gpupool_nodes", "Nodes known, by state.", labels=["state"])
        nodes.add_metric(["connected"], summary.nodes_connected)
        nodes.add_metric(["unreachable"], summary.nodes - summary.nodes_connected)
        devices = GaugeMetricFamily("gpupool_devices", "Devices known.", labels=["state"])
        devices.add_metric(["free"], summary.devices_free)
        devices.add_metric(["used"], summary.devices_used)
        devices.add_metric(["unavailable"], summary.devices_unavailable)
        self._families = [
            nodes,
            devices,
            _gauge("gpupool_granted_gpus", "GPUs granted.", summary.granted_share_pct / 100),
            _gauge("gpupool_leases", "Leases that hold something.", summary.leases),
            _gauge("gpupool_waiting_requests", "Requests in the queue.", summary.waiting),
            _gauge(
                "gpupool_stray_processes",
                "Processes on devices that belong to no lease, or are outside its limits.",
                summary.strays,
            ),
            _gauge("gpupool_epoch", "Term of office.", summary.epoch),
            _gauge(
                "gpupool_writes_refused",
                "1 while changes are refused, else 0.",
                int(bool(summary.read_only_reason)),
            ),
            # Sums, not one series a GPU: each agent exports its own.
            _gauge(
                "gpupool_device_memory_used_bytes",
                "GPU memory in use.",
                telemetry.memory_used_mib * MIB,
            ),
            _gauge("gpupool_device_power_watts", "GPU power.", telemetry.power_mw / 1000),
            _gauge(
                "gpupool_device_utilization_ratio",
                "Mean share of time that a kernel ran, over the GPUs that say.",
                telemetry.utilization_pct_mean / 100,
            ),
        ]


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, meaning, value=value)
