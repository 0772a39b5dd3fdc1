"""Distances in the PCI tree, rails by position, and the adapters that a lease is given."""

from pathlib import Path

import pytest
from tests.agent_bench import Bench, assignment, last_report, whole

from gpupool.model.inventory import Device, Hca, HcaPort
from gpupool.model.locality import Distance, distance
from gpupool_agent.core.events import HcasRead, InventoryRead
from gpupool_agent.core.rails import Rails, compute_hcas
from gpupool_agent.core.readings import DriverInventory
from gpupool_agent.devices.hca import SysfsHcaReader
from gpupool_agent.simulated.machine import load_machine
from gpupool_agent.simulated.node import SimulatedNode
from gpupool_agent.simulated.sysfs import sysfs_root, write_sysfs

ROOT = "pci0000:15/0000:15:01.0"


def gpu(number: int, path: str = "", numa_node: int = -1) -> Device:
    return Device(
        uuid=f"GPU-{number}",  # type: ignore[arg-type] # a plain word will do
        model="H100",
        pci_address=f"0000:{number:02x}:00.0",
        pci_path=path,
        numa_node=numa_node,
        index=number,
    )


def hca(
    name: str,
    address: str,
    path: str = "",
    numa_node: int = -1,
    *,
    state: str = "ACTIVE",
    layer: str = "InfiniBand",
    rate_mbps: int = 400_000,
    ports: int = 1,
) -> Hca:
    return Hca(
        name=name,
        node_guid="0" * 16,
        pci_address=address,
        pci_path=path,
        numa_node=numa_node,
        ports=tuple(
            HcaPort(
                number=number + 1,
                port_guid="0" * 16,
                state=state,
                link_layer=layer,
                lid=3,
                sm_lid=1,
                rate_mbps=rate_mbps,
                width=4,
            )
            for number in range(ports)
        ),
    )


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (f"{ROOT}/0000:16:00.0/0000:17:00.0", f"{ROOT}/0000:16:00.0/0000:17:02.0", "PIX"),
        (f"{ROOT}/0000:16:00.0/0000:17:00.0", f"{ROOT}/0000:16:00.0/0000:17:00.0", "PIX"),
        (
            f"{ROOT}/0000:16:00.0/0000:17:00.0",
            f"{ROOT}/0000:16:00.0/0000:17:02.0/0000:19:00.0/0000:1a:00.0",
            "PXB",
        ),
        (f"{ROOT}/0000:16:00.0", "pci0000:15/0000:15:03.0", "PHB"),
        ("pci0000:15", "pci0000:15/0000:15:03.0", "PHB"),
        (ROOT, "pci0000:30/0000:30:01.0", "NODE"),
        ("", "", "NODE"),
    ],
)
def test_distances_are_those_of_nvidia_smi(one: str, other: str, expected: str) -> None:
    first, second = gpu(1, one, numa_node=0), hca("m", "0000:99:00.0", other, numa_node=0)
    assert distance(first, second) is Distance[expected]
    assert distance(second, first) is Distance[expected]


def test_what_is_not_known_is_far_and_a_device_is_at_itself() -> None:
    assert distance(gpu(1), hca("m", "0000:99:00.0")) is Distance.SYS
    assert distance(gpu(1, numa_node=0), gpu(2, numa_node=1)) is Distance.SYS
    assert distance(gpu(1), gpu(1)) is Distance.SAME


def tree(tmp_path: Path, machine: str) -> tuple[list[Device], tuple[Hca, ...]]:
    """GPUs and adapters of a described machine, by its /sys."""
    from gpupool_agent.devices.pci import numa_node, pci_device, pci_path

    node = SimulatedNode(node_id="n", machine=load_machine(machine), directory=tmp_path)
    write_sysfs(node, tmp_path / "pci")
    root = sysfs_root(node)
    devices = [
        Device(
            uuid=f"GPU-{index}",  # type: ignore[arg-type] # a plain word will do
            model="m",
            index=index,
            pci_address=slot.pci_address,
            pci_path=pci_path(pci_device(root, slot.pci_address)),
            numa_node=numa_node(pci_device(root, slot.pci_address)),
        )
        for index, slot in enumerate(node.machine.slots)
    ]
    return devices, SysfsHcaReader(root).read()


def test_a_dgx_h100_is_as_far_apart_as_a_recorded_one(shared: Path, tmp_path: Path) -> None:
    """The recorded host has the compute adapters at NIC0, 3, 4, 5, 6, 9, 10 and 11."""
    recording = shared / "data/host_topology/topo_m/8gpu_nv18_12nic_truncated_after_nic5.txt"
    if not recording.exists():
        pytest.skip("no recording")
    devices, hcas = tree(tmp_path, "dgx-h100")
    by_name = {each.name: each for each in hcas}
    nics = {
        0: "mlx5_0", 1: "mlx5_1", 3: "mlx5_3", 4: "mlx5_4", 5: "mlx5_5", 6: "mlx5_6",
        7: "mlx5_7", 9: "mlx5_9", 10: "mlx5_10", 11: "mlx5_11",
    }  # fmt: skip
    rows = [line.split() for line in recording.read_text().splitlines()[1:9]]
    for index, row in enumerate(rows):
        assert row[0] == f"GPU{index}"
        told = {nic: row[9 + nic] for nic in nics}
        ours = {nic: distance(devices[index], by_name[name]).name for nic, name in nics.items()}
        assert ours == told, f"GPU{index}"


@pytest.mark.parametrize(
    ("machine", "rails"),
    [
        (
            "dgx-h100",
            "mlx5_0 mlx5_3 mlx5_4 mlx5_5 mlx5_6 mlx5_9 mlx5_10 mlx5_11",
        ),
        ("dgx-a100", "mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_6 mlx5_7 mlx5_8 mlx5_9"),
        ("gb200-tray", "mlx5_0 mlx5_1 mlx5_3 mlx5_4"),
        ("pcie-l40s", "mlx5_0 mlx5_1"),
    ],
)
def test_rails_are_compute_adapters_in_the_order_of_their_slots(
    machine: str, rails: str, tmp_path: Path
) -> None:
    devices, hcas = tree(tmp_path, machine)
    numbered = Rails().number(hcas, devices)
    by_rail = {port.rail: each.name for each in numbered for port in each.ports}
    by_rail.pop(None, None)
    assert [by_rail[rail] for rail in range(len(by_rail))] == rails.split()


def test_a_slot_keeps_its_rail_while_its_adapter_or_its_gpu_is_away() -> None:
    devices = [gpu(n, f"pci0000:{n:02x}/0000:{n:02x}:01.0", 0) for n in (1, 2, 3)]
    hcas = tuple(
        hca(f"mlx5_{n}", f"0000:{n:02x}:10.0", f"pci0000:{n:02x}/0000:{n:02x}:01.0", 0)
        for n in (1, 2, 3)
    )
    rails = Rails()
    assert [each.ports[0].rail for each in rails.number(hcas, devices)] == [0, 1, 2]
    assert [each.ports[0].rail for each in rails.number(hcas[1:], devices)] == [1, 2]
    assert [each.ports[0].rail for each in rails.number(hcas, devices[1:])] == [0, 1, 2]


def test_both_ports_of_an_adapter_have_rails_and_roce_does_where_there_is_no_infiniband() -> None:
    two = Rails().number((hca("mlx4_0", "0000:05:00.0", ports=2),), [gpu(1)])
    assert [port.rail for port in two[0].ports] == [0, 1]
    roce = hca("mlx5_bond_0", "0000:06:00.0", layer="Ethernet")
    assert Rails().number((roce,), [gpu(1)])[0].ports[0].rail == 0
    mixed = Rails().number((roce, *two), [gpu(1)])
    assert mixed[0].ports[0].rail is None


def test_a_storage_adapter_that_is_never_the_nearest_is_of_no_rail() -> None:
    near = hca("mlx5_0", "0000:18:00.0", ROOT, 0)
    storage = hca("mlx5_1", "0000:29:00.0", "pci0000:28/0000:28:01.0", 0)
    assert [each.name for each in compute_hcas((near, storage), [gpu(1, ROOT, 0)])] == ["mlx5_0"]


def test_a_slow_port_is_told_by_its_peers_or_by_the_operator() -> None:
    hcas = (hca("a", "0000:01:00.0"), hca("b", "0000:02:00.0", rate_mbps=100_000))
    by_peers = Rails().number(hcas, [gpu(9)])
    assert [each.ports[0].expected_rate_mbps for each in by_peers] == [400_000, 400_000]
    all_slow = tuple(hca(name, f"0000:0{n}:00.0", rate_mbps=100_000) for n, name in enumerate("ab"))
    by_word = Rails(200_000).number(all_slow, [gpu(9)])
    assert [each.ports[0].expected_rate_mbps for each in by_word] == [200_000, 200_000]


# -- the lease environment ------------------------------------------------------


def bench_of(devices: list[Device], hcas: tuple[Hca, ...]) -> Bench:
    bench = Bench(*(device.index for device in devices))
    bench.send(InventoryRead(inventory=DriverInventory(devices=tuple(devices))))
    bench.send(HcasRead(hcas=hcas))
    return bench


def names_given(devices: list[Device], hcas: tuple[Hca, ...], *gpus: int) -> str:
    bench = bench_of(devices, hcas)
    bench.desire(1, assignment("a", 1, *(whole(number) for number in gpus)))
    return last_report(bench, "a").environment.get("NCCL_IB_HCA", "")


def test_a_part_of_a_host_gets_the_nearest_adapters_and_a_whole_one_all_rails(
    tmp_path: Path,
) -> None:
    devices, hcas = tree(tmp_path, "dgx-h100")
    assert names_given(devices, hcas, 0) == "=mlx5_0"
    assert names_given(devices, hcas, 6) == "=mlx5_10"
    assert names_given(devices, hcas, 1, 4) == "=mlx5_3,mlx5_6"
    every = "=mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11"
    assert names_given(devices, hcas, *range(8)) == every


def test_an_adapter_without_a_way_is_left_out_and_the_next_nearest_taken(tmp_path: Path) -> None:
    from dataclasses import replace

    devices, hcas = tree(tmp_path, "dgx-h100")
    broken = tuple(
        replace(each, ports=(replace(each.ports[0], phys_state="Polling", state="DOWN"),))
        if each.name == "mlx5_0"
        else each
        for each in hcas
    )
    assert names_given(devices, broken, 0) == "=mlx5_3,mlx5_4,mlx5_5"
    assert "mlx5_0," not in names_given(devices, broken, *range(8))
