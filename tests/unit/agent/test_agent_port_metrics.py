"""What the agent's metrics say of network ports."""

from prometheus_client.core import Metric

from gpupool.model.inventory import Hca, HcaPort
from gpupool_agent.core.readings import PortCounters
from gpupool_agent.metrics_ports import port_families


def samples(*families: Metric) -> dict[tuple[str, str], float]:
    return {
        (sample.name.removeprefix("gpupool_agent_port_"), ",".join(sample.labels.values())): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }


def test_ports_show_their_state_rates_and_counters() -> None:
    port = HcaPort(
        number=1,
        port_guid="0" * 16,
        lid=4,
        sm_lid=9,
        state="ACTIVE",
        phys_state="LinkUp",
        rate_mbps=100_000,
        expected_rate_mbps=400_000,
    )
    hca = Hca(name="mlx5_0", node_guid="0" * 16, ports=(port,))
    counters = PortCounters(
        hca="mlx5_0",
        port=1,
        values={"port_rcv_bytes": 28, "link_downed": 255},
        saturated=frozenset({"link_downed"}),
    )
    assert samples(*port_families([hca], [counters])) == {
        ("usable", "mlx5_0,1"): 1,
        ("rate_bits_per_second", "mlx5_0,1"): 1e11,
        ("expected_rate_bits_per_second", "mlx5_0,1"): 4e11,
        ("sm_lid", "mlx5_0,1"): 9,
        ("counter_total", "mlx5_0,1,port_rcv_bytes"): 28,
        ("counter_total", "mlx5_0,1,link_downed"): 255,
        ("counter_saturated", "mlx5_0,1,link_downed"): 1,
    }
