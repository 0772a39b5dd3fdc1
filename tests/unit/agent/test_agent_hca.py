"""Network adapters as /sys has them: real recorded hosts, and what hosts do wrong."""

import errno
import json
from pathlib import Path

import pytest
from tests.unit.agent.sysfs_trees import port_files, real_tree, write_tree

from gpupool.model.ids import DeviceUuid
from gpupool.model.inventory import UNKNOWN_GUID, Device, Hca
from gpupool_agent.core.rails import Rails, expected_rate_mbps, usable
from gpupool_agent.core.readings import PortCounters
from gpupool_agent.devices import hca_counters
from gpupool_agent.devices.hca import SysfsHcaReader


def recorded(shared: Path, name: str) -> Path:
    path = shared / "data" / "sysfs_infiniband" / name
    if not path.exists():
        pytest.skip(f"no recording {name}")
    return path


def read(root: Path) -> dict[str, Hca]:
    return {hca.name: hca for hca in SysfsHcaReader(root).read()}


def counted(root: Path) -> dict[tuple[str, int], PortCounters]:
    return {(each.hca, each.port): each for each in SysfsHcaReader(root).counters()}


# -- real hosts ---------------------------------------------------------------


def test_an_h100_host_has_eight_adapters_and_a_bond(shared: Path, tmp_path: Path) -> None:
    recording = recorded(shared, "gpud_sys-class-infiniband-h100.0.json")
    root = real_tree(tmp_path, recording)
    hcas = read(root)
    assert len(hcas) == 9
    first, bond = hcas["mlx5_0"], hcas["mlx5_bond_0"]
    assert (first.hca_type, first.firmware, first.board_id) == (
        "MT4129",
        "28.41.1000",
        "MT_0000000838",
    )
    [port] = first.ports
    assert (port.state, port.phys_state) == ("ACTIVE", "LinkUp")
    assert (port.rate_mbps, port.width, port.speed) == (400_000, 4, "NDR")
    assert [hca.name for hca in hcas.values() if hca.bonded] == ["mlx5_bond_0"]
    [port] = bond.ports
    assert (port.link_layer, port.rate_mbps, port.width) == ("Ethernet", 200_000, 2)
    assert usable(port)
    # What the recording does not say is unknown, and no error.
    assert first.node_guid == UNKNOWN_GUID
    assert (first.pci_address, first.numa_node) == ("", -1)


def test_data_counters_are_bytes_and_a_counter_at_its_end_is_marked(
    shared: Path, tmp_path: Path
) -> None:
    recording = recorded(shared, "gpud_sys-class-infiniband-h100.0.json")
    found = counted(real_tree(tmp_path, recording))
    first = found["mlx5_0", 1]
    words = json.loads(recording.read_text())
    base = "/sys/class/infiniband/mlx5_0/ports/1/counters"
    assert first.values["port_xmit_bytes"] == 4 * int(words[f"{base}/port_xmit_data"])
    assert first.values["port_rcv_bytes"] == 4 * 230539874932483
    assert first.values["port_xmit_packets"] == 315487941081
    assert first.values["port_xmit_wait"] == 2489603687
    assert first.values["roce_adp_retrans"] == 3
    assert "lifespan" not in first.values
    assert "port_xmit_data" not in first.values
    assert first.saturated == {"excessive_buffer_overrun_errors"}
    assert found["mlx5_1", 1].saturated == {"excessive_buffer_overrun_errors", "link_downed"}


def test_dual_port_degraded_and_omni_path_adapters(shared: Path, tmp_path: Path) -> None:
    root = real_tree(tmp_path, recorded(shared, "procfs_sys_class_infiniband.json"))
    hcas = read(root)
    assert set(hcas) == {"hfi1_0", "mlx4_0", "mlx5_0"}
    assert [port.number for port in hcas["mlx4_0"].ports] == [1, 2]
    assert {port.rate_mbps for port in hcas["mlx4_0"].ports} == {40_000}
    assert {port.link_layer for port in hcas["mlx4_0"].ports} == {"InfiniBand"}
    mlx5 = hcas["mlx5_0"]
    assert mlx5.node_guid == "0a7fbc1245efd23b"
    [port] = mlx5.ports
    assert (port.rate_mbps, port.width, port.speed) == (25_000, 1, "EDR")
    assert expected_rate_mbps(mlx5, port, list(hcas.values())) == 100_000
    # An Omni-Path adapter has no hca_type.
    assert hcas["hfi1_0"].hca_type == ""
    assert counted(root)["mlx4_0", 2].values["port_xmit_wait"] == 3846


def test_adapters_that_wait_for_a_subnet_manager_are_not_usable(
    shared: Path, tmp_path: Path
) -> None:
    hcas = read(real_tree(tmp_path, recorded(shared, "gcm_learn_stuck_ib_intf.json")))
    states = {name: hca.ports[0].state for name, hca in hcas.items()}
    assert sorted(name for name, state in states.items() if state == "INIT") == ["mlx5_6", "mlx5_8"]
    assert not usable(hcas["mlx5_6"].ports[0])
    assert hcas["mlx5_0"].pci_address == "0000:0c:00.0"
    # This recording has words where numbers were.
    assert hcas["mlx5_0"].ports[0].lid == 0


def test_an_hdr_host_has_its_adapters_at_their_slots(shared: Path, tmp_path: Path) -> None:
    hcas = read(real_tree(tmp_path, recorded(shared, "gcm_learn_good.json")))
    assert [hca.pci_address for hca in hcas.values()] == [
        f"0000:{bus}:00.0" for bus in ("0c", "12", "4b", "54", "8d", "94", "ba", "cc")
    ]
    assert {(hca.ports[0].rate_mbps, hca.ports[0].speed) for hca in hcas.values()} == {
        (200_000, "HDR")
    }


def test_a_host_whose_adapters_are_all_slow_needs_the_operators_word(
    shared: Path, tmp_path: Path
) -> None:
    """Real: eight adapters of 200 Gb/s that came up with 100, so no peer gives one away."""
    hcas = tuple(
        read(real_tree(tmp_path, recorded(shared, "gcm_learn_ib_intf_bad_rate.json"))).values()
    )
    assert [hca.ports[0].rate_mbps for hca in hcas] == [100_000] * 8
    gpus = [
        Device(uuid=DeviceUuid(hca.name), model="A100", pci_address=hca.pci_address) for hca in hcas
    ]
    for word, expected in ((0, 100_000), (200_000, 200_000)):
        numbered = Rails(word).number(hcas, gpus)
        assert {hca.ports[0].expected_rate_mbps for hca in numbered} == {expected}


# -- what hosts do wrong --------------------------------------------------------


def test_a_whole_adapter_is_read(tmp_path: Path) -> None:
    slot = "devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:18:00.0"
    write_tree(
        tmp_path,
        {
            f"{slot}/numa_node": "1",
            "class/infiniband/mlx5_0/node_guid": "B83F:D203:0012:3456",
            "class/infiniband/mlx5_0/sys_image_guid": "b83f:d203:0012:3450",
            **port_files("mlx5_0"),
        },
    )
    (tmp_path / "class/infiniband/mlx5_0/device").symlink_to(tmp_path / slot)
    hca = read(tmp_path)["mlx5_0"]
    assert (hca.node_guid, hca.system_image_guid) == ("b83fd20300123456", "b83fd20300123450")
    assert (hca.pci_address, hca.numa_node) == ("0000:18:00.0", 1)
    assert hca.pci_path == "pci0000:15/0000:15:01.0/0000:16:00.0"
    [port] = hca.ports
    assert (port.lid, port.sm_lid, port.port_guid) == (0x2F, 1, "b83fd20300123456")
    assert usable(port)


@pytest.mark.parametrize(
    ("files", "good"),
    [
        ({}, True),
        ({"sm_lid": "0x0"}, False),
        ({"lid": "0xffff"}, False),
        ({"phys_state": "2: Polling"}, False),
        ({"state": "3: ARMED"}, False),
        ({"link_layer": "Ethernet", "lid": "0x0", "sm_lid": "0x0"}, True),
        ({"link_layer": "Ethernet", "phys_state": "3: Disabled"}, False),
    ],
)
def test_a_port_is_usable_when_traffic_can_pass(
    files: dict[str, str], good: bool, tmp_path: Path
) -> None:
    write_tree(tmp_path, port_files("mlx5_0", **files))
    assert usable(read(tmp_path)["mlx5_0"].ports[0]) is good


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        ("400 Gb/sec (4X NDR)", (400_000, 4, "NDR")),
        ("2.5 Gb/sec (1X SDR)", (2_500, 1, "SDR")),
        ("10 Gb/sec (4X)", (10_000, 4, "")),
        ("56 Gb/sec (4X FDR)", (56_000, 4, "FDR")),
        ("40 Gb/sec (4X FDR10)", (40_000, 4, "FDR10")),
        ("no rate", (0, 0, "")),
    ],
)
def test_rates_of_old_and_new_kernels(
    rate: str, expected: tuple[int, int, str], tmp_path: Path
) -> None:
    write_tree(tmp_path, port_files("mlx5_0", rate=rate))
    [port] = read(tmp_path)["mlx5_0"].ports
    assert (port.rate_mbps, port.width, port.speed) == expected


def test_a_bond_is_known_by_its_network_device_too(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            **port_files("rocep12s0f0", link_layer="Ethernet", gid_attrs__ndevs__0="bond0"),
            **port_files("rocep13s0f0", link_layer="Ethernet", gid_attrs__ndevs__0="eth1"),
            "class/net/bond0/bonding/mode": "802.3ad 4",
            "class/net/eth1/mtu": "9000",
        },
    )
    assert [hca.name for hca in read(tmp_path).values() if hca.bonded] == ["rocep12s0f0"]


def test_a_counter_that_refuses_is_asked_once_until_its_adapter_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = "class/infiniband/mlx5_0"
    write_tree(
        tmp_path,
        {
            f"{base}/node_guid": "b83f:d203:0012:3456",
            **port_files("mlx5_0", counters__link_downed="1", counters__symbol_error="2"),
        },
    )
    asked: list[str] = []
    original = hca_counters.read_file

    def refusing(path: str) -> str:
        name = path.rpartition("/")[2]
        asked.append(name)
        if name == "symbol_error":
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return original(path)

    monkeypatch.setattr(hca_counters, "read_file", refusing)
    reader = SysfsHcaReader(tmp_path)
    reader.read()
    for _ in range(3):
        assert [each.values for each in reader.counters()] == [{"link_downed": 1}]
        reader.read()
    assert asked.count("symbol_error") == 1
    assert asked.count("link_downed") == 3
    # A file that is only missing is looked for again: it may come with a driver.
    write_tree(tmp_path, port_files("mlx5_0", counters__port_xmit_wait="3"))
    assert [each.values["port_xmit_wait"] for each in reader.counters()] == [3]
    write_tree(tmp_path, {f"{base}/node_guid": "b83f:d203:0012:9999"})
    reader.read()
    reader.counters()
    assert asked.count("symbol_error") == 2


def test_counters_that_are_no_numbers_or_not_there_are_left_out(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            **port_files("mlx5_0", counters__symbol_error="N/A (no PMA)"),
            **port_files("mlx5_1", counters__port_rcv_data="7"),
        },
    )
    [only] = SysfsHcaReader(tmp_path).counters()
    assert (only.hca, only.port, only.values) == ("mlx5_1", 1, {"port_rcv_bytes": 28})
