"""Metrics of the network adapters' ports."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpupool.model.inventory import Hca
from gpupool_agent.core.rails import usable
from gpupool_agent.core.readings import PortCounters

LABELS = ("hca", "port")


def port_families(hcas: Sequence[Hca], counters: Sequence[PortCounters]) -> Iterable[Metric]:
    """State, rates and counters of every port.

    A counter that starts anew, by a port reset or a driver reload, shows as a decrease,
    which Prometheus takes as the new start that it is.
    """
    up = GaugeMetricFamily("gpupool_agent_port_usable", "Traffic can pass.", labels=LABELS)
    rate = GaugeMetricFamily(
        "gpupool_agent_port_rate_bits_per_second", "What the port runs at.", labels=LABELS
    )
    expected = GaugeMetricFamily(
        "gpupool_agent_port_expected_rate_bits_per_second",
        "What the port should run at.",
        labels=LABELS,
    )
    sm_lid = GaugeMetricFamily(
        "gpupool_agent_port_sm_lid",
        "LID of the master subnet manager; 0: none seen.",
        labels=LABELS,
    )
    for hca in hcas:
        for port in hca.ports:
            labels = (hca.name, str(port.number))
            up.add_metric(labels, usable(port))
            rate.add_metric(labels, port.rate_mbps * 1e6)
            sm_lid.add_metric(labels, port.sm_lid)
            if port.expected_rate_mbps:
                expected.add_metric(labels, port.expected_rate_mbps * 1e6)
    return (up, rate, expected, sm_lid, *_counter_families(counters))


def _counter_families(counters: Sequence[PortCounters]) -> Iterable[Metric]:
    total = CounterMetricFamily(
        "gpupool_agent_port_counter",
        "The kernel's counters of a port; data is in bytes.",
        labels=(*LABELS, "counter"),
    )
    saturated = GaugeMetricFamily(
        "gpupool_agent_port_counter_saturated",
        "A counter that has reached its end and counts no further.",
        labels=(*LABELS, "counter"),
    )
    for each in counters:
        labels = (each.hca, str(each.port))
        for name, value in each.values.items():
            total.add_metric((*labels, name), value)
        for name in sorted(each.saturated):
            saturated.add_metric((*labels, name), 1)
    return total, saturated
