"""The agent's metrics, read from its state at each scrape."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpupool.model.assignment import AssignmentState
from gpupool.model.inventory import StrayCause
from gpupool_agent.agent import Agent
from gpupool_agent.metrics_ports import port_families

ADDRESS = "127.0.0.1"
SCRAPE_DEADLINE_S = 5.0


class AgentCollector(Collector):
    """Figures of one agent. Scrapes come on other threads, its state is the loop's."""

    def __init__(self, agent: Agent, loop: asyncio.AbstractEventLoop) -> None:
        self._agent = agent
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        """Ask the loop, and wait a bounded time for it."""
        return asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(SCRAPE_DEADLINE_S)

    async def _read(self) -> list[Metric]:
        node = self._agent.node
        summary = node.summary()
        states = Counter(report.state for report in node.assignments())
        devices = Counter(
            "failed" if report.failed else "clean" if report.clean else "unclean"
            for report in node.devices()
        )
        return [
            _gauge(
                "connected", "An allocator serves this agent (1) or not (0).", summary.connected
            ),
            _gauge("epoch", "Highest term of an allocator heard of.", summary.epoch),
            _gauge(
                "without_helper",
                "There is no root helper, and the agent only reads (1).",
                bool(self._agent.privileges.missing),
            ),
            _gauge("holders", "Processes watched because they hold leases.", summary.holders),
            _by("faults", "Open faults.", "code", Counter(summary.faults)),
            _by(
                "assignments",
                "Assignments on the node.",
                "state",
                {state.value: states[state] for state in AssignmentState},
            ),
            _by(
                "devices",
                "Devices of the node.",
                "state",
                {state: devices[state] for state in ("clean", "unclean", "failed")},
            ),
            _by(
                "strays",
                "Processes on devices that belong to no lease, or are outside its limits.",
                "cause",
                {cause.value: summary.strays.get(cause.value, 0) for cause in StrayCause},
            ),
            _gauge("adopted_processes", "Processes that were taken into leases.", summary.adopted),
            CounterMetricFamily(
                "gpupool_agent_processes_stopped",
                "Processes ended on devices since the agent's start.",
                value=summary.stopped,
            ),
            *self._measurements(),
            *port_families(node.hcas, self._agent.port_counters),
        ]

    def _measurements(self) -> Iterable[GaugeMetricFamily]:
        measured = self._agent.telemetry
        yield _by(
            "gpu_utilization_percent",
            "Time that a kernel ran.",
            "uuid",
            {each.uuid: each.utilization_pct for each in measured},
        )
        yield _by(
            "gpu_memory_used_bytes",
            "Memory in use.",
            "uuid",
            {each.uuid: _scaled(each.memory_used_mib, 2**20) for each in measured},
        )
        yield _by(
            "gpu_temperature_celsius",
            "Temperature of the device.",
            "uuid",
            {each.uuid: each.temperature_c for each in measured},
        )
        yield _by(
            "gpu_power_watts",
            "Power drawn.",
            "uuid",
            {each.uuid: _scaled(each.power_mw, 0.001) for each in measured},
        )


def serve_metrics(agent: Agent, port: int) -> WSGIServer:
    """Serve /metrics on loopback; the server's ``server_port`` tells a port of 0."""
    registry = CollectorRegistry()
    registry.register(AgentCollector(agent, asyncio.get_running_loop()))
    server, _ = start_http_server(port, addr=ADDRESS, registry=registry)
    return server


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"gpupool_agent_{name}", text, value=value)


def _by(
    name: str, text: str, label: str, values: "dict[str, float | None] | Counter[str]"
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"gpupool_agent_{name}", text, labels=[label])
    for key, value in values.items():
        if value is not None:
            family.add_metric([key], value)
    return family


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor
