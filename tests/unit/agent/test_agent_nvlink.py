"""NVLinks and fabric state through the real pynvml on the simulated driver."""

import contextvars
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest

from gpupool_agent.devices.nvml import NvmlDriver
from gpupool_agent.simulated.machine import FABRIC_STATES
from gpupool_agent.simulated.node import CURRENT_NODE, SimulatedNode
from gpupool_agent.simulated.nvml_library import install
from gpupool_agent.simulated.specs import parse_node
from gpupool_agent.simulated.sysfs import sysfs_root, write_sysfs

Make = Callable[[str], tuple[SimulatedNode, NvmlDriver]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A described machine and the driver that reads it."""
    install()
    tokens: list[contextvars.Token[SimulatedNode | None]] = []
    drivers: list[NvmlDriver] = []

    def made(text: str) -> tuple[SimulatedNode, NvmlDriver]:
        spec = parse_node(text)
        directory = tmp_path / spec.node_id
        directory.mkdir()
        node = SimulatedNode(
            node_id=spec.node_id,
            machine=spec.machine,
            directory=directory,
            domain=spec.domain,
            clique=spec.clique,
        )
        write_sysfs(node, tmp_path / "pci")
        tokens.append(CURRENT_NODE.set(node))
        drivers.append(NvmlDriver(sysfs_root(node)))
        return node, drivers[-1]

    yield made
    for driver in drivers:
        driver.close()
    for token in reversed(tokens):
        CURRENT_NODE.reset(token)


def test_a_tray_is_in_the_domain_that_its_fabric_names(make: Make) -> None:
    node, driver = make("gb200-tray:t,domain=rack-1,clique=7")
    for device in driver.inventory().devices:
        assert device.fabric_state == "completed"
        assert (device.cluster_uuid, device.clique_id) == (str(node.cluster), 7)
        assert device.nvlink_domain == f"{node.cluster}.7"
        assert (device.nvlinks_active, device.nvlinks_expected) == (18, 18)
        assert device.nvlink_peers == {"nvswitch": 18}


def test_the_links_that_are_down_are_missing_and_still_expected(make: Make) -> None:
    node, driver = make("dgx-h100:h")
    node.gpus[3].active_links = 15
    devices = driver.inventory().devices
    assert [device.nvlinks_active for device in devices] == [18, 18, 18, 15, 18, 18, 18, 18]
    assert {device.nvlinks_expected for device in devices} == {18}
    assert devices[3].nvlink_peers == {"nvswitch": 15}


def test_machines_without_links_or_without_the_call_say_nothing(make: Make) -> None:
    _, driver = make("pcie-l40s:l")
    [device, *_] = driver.inventory().devices
    assert (device.nvlinks_expected, device.nvlink_peers) == (0, {})
    assert device.fabric_state == ""
    _, driver = make("dgx-a100:a")
    [device, *_] = driver.inventory().devices
    assert (device.fabric_state, device.nvlink_domain, device.nvlinks_active) == ("", "", 12)


def test_a_device_knows_its_bridges_and_cpus(make: Make) -> None:
    _, driver = make("dgx-h100:h")
    devices = driver.inventory().devices
    assert devices[0].pci_path.startswith("pci0000:15/0000:15:01.0/0000:16:00.0/")
    assert [device.cpus for device in devices] == ["0-111"] * 4 + ["112-223"] * 4


@pytest.mark.parametrize("state", ["not_started", "in_progress"])
def test_an_unfinished_fabric_names_no_domain(state: str, make: Make) -> None:
    node, driver = make("gb200-tray:t,domain=rack-1")
    node.fabric_state = state
    [device, *_] = driver.inventory().devices
    assert (device.fabric_state, device.nvlink_domain) == (state, "")
    assert device.cluster_uuid == str(node.cluster)


STATUS_CODES = {"Success": 0, "Insufficient Resources": 23}


def test_the_cases_that_were_reported_from_the_field(
    shared: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = shared / "data/host_topology/fabric_state/real_world_cases.json"
    if not recording.exists():
        pytest.skip("no recording")
    for number, case in enumerate(json.loads(recording.read_text())):
        node, driver = make(f"gb200-tray:case-{number},clique={case['clique_id']}")
        node.fabric_state = case["state"].lower().replace(" ", "_")
        assert node.fabric_state in FABRIC_STATES
        node.fabric_status = STATUS_CODES[case["status"]]
        cluster = UUID(case["cluster_uuid"] or UUID(int=0).hex)
        monkeypatch.setattr(SimulatedNode, "cluster", cluster)
        [device, *_] = driver.inventory().devices
        whole = case["state"] == "Completed" and case["status"] == "Success" and cluster.int
        expected = f"{cluster}.{case['clique_id']}" if whole else ""
        assert device.nvlink_domain == expected, case["source"]
        driver.close()
