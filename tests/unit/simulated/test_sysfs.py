"""The /sys tree of a simulated node, through the agent's own reader."""

from pathlib import Path

import pytest

from gpupool_agent.devices.hca import SysfsHcaReader
from gpupool_agent.simulated.machine import hca_guid, load_machine
from gpupool_agent.simulated.node import SimulatedNode
from gpupool_agent.simulated.sysfs import UnknownHcaError, set_port, sysfs_root, write_sysfs


def make_node(tmp_path: Path, machine: str, node_id: str = "n1") -> SimulatedNode:
    directory = tmp_path / node_id
    directory.mkdir()
    node = SimulatedNode(node_id=node_id, machine=load_machine(machine), directory=directory)
    write_sysfs(node, tmp_path / "pci")
    return node


def test_adapters_are_read_as_they_are_described(tmp_path: Path) -> None:
    node = make_node(tmp_path, "dgx-h100")
    read = {hca.name: hca for hca in SysfsHcaReader(sysfs_root(node)).read()}
    assert set(read) == {hca.name for hca in node.machine.hcas}
    for described in node.machine.hcas:
        hca = read[described.name]
        assert hca.node_guid == hca_guid("n1", described)
        assert (hca.pci_address, hca.numa_node) == (described.pci_address, described.numa_node)
        [port] = hca.ports
        assert (port.state, port.link_layer) == ("ACTIVE", described.link_layer)
        assert port.rate_mbps == described.rate_gbps * 1000
        assert port.port_guid == hca.node_guid
        assert (port.lid > 0, port.sm_lid) == (
            (True, 1) if described.link_layer == "InfiniBand" else (False, 0)
        )


def test_nodes_of_a_machine_share_their_pci_devices_and_nothing_else(tmp_path: Path) -> None:
    first, second = (make_node(tmp_path, "gb200-tray", name) for name in ("a", "b"))
    make_node(tmp_path, "pcie-l40s", "c")
    assert len(list((tmp_path / "pci").iterdir())) == 2
    pci = sysfs_root(first) / "bus" / "pci" / "devices"
    assert (pci / "0018:01:00.0" / "numa_node").read_text() == "1\n"
    set_port(first, "mlx5_0", up=False)
    states = [SysfsHcaReader(sysfs_root(node)).read()[0].ports[0].state for node in (first, second)]
    assert states == ["DOWN", "ACTIVE"]


def test_written_again_every_port_is_up(tmp_path: Path) -> None:
    node = make_node(tmp_path, "gb10")
    set_port(node, "rocep1s0f0", up=False)
    write_sysfs(node, tmp_path / "pci")
    assert {hca.ports[0].state for hca in SysfsHcaReader(sysfs_root(node)).read()} == {"ACTIVE"}


def test_an_adapter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    node = make_node(tmp_path, "dgx-a100")
    with pytest.raises(UnknownHcaError, match=r"'mlx5_99' is not on node n1; accepted are mlx5_0,"):
        set_port(node, "mlx5_99", up=False)
