"""Unmodified ibstat and the agent's reader see the same adapters.

ibstat looks below /sys/class, which takes no new folder: it runs in a mount namespace
with an overlay over it.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.unit.agent.sysfs_trees import port_files, write_tree

from gpupool.model.inventory import Hca, HcaPort
from gpupool_agent.devices.hca import SysfsHcaReader
from gpupool_agent.simulated.machine import load_machine
from gpupool_agent.simulated.node import SimulatedNode
from gpupool_agent.simulated.sysfs import set_port, sysfs_root, write_sysfs

OVERLAY = 'mount -t overlay overlay -o lowerdir="$1":/sys/class /sys/class && exec ibstat'
STATES = {"ACTIVE": "Active", "DOWN": "Down", "INIT": "Initializing"}
PORT = re.compile(r"^\s*Port (\d+):$", re.MULTILINE)
ADAPTER = re.compile(r"^CA '(?P<name>[^']+)'$", re.MULTILINE)


def in_namespace(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell command as root of a mount namespace of its own."""
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    return subprocess.run(
        [
            *("unshare", *user, "--mount", "--propagation", "private"),
            *("sh", "-c", command, "sh", *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def described(folder: Path) -> Path:
    """The class folder of a described DGX with a cable out."""
    node = SimulatedNode(node_id="n", machine=load_machine("dgx-h100"), directory=folder)
    write_sysfs(node, folder / "pci")
    set_port(node, "mlx5_4", up=False)
    return sysfs_root(node) / "class"


def mixed(folder: Path) -> Path:
    """An adapter with two ports, one slow and one that waits for a subnet manager; RoCE; a bond."""
    base = "class/infiniband"
    roce = {"link_layer": "Ethernet", "lid": "0x0", "sm_lid": "0x0"}
    files = {
        **port_files("mlx4_0", rate="25 Gb/sec (1X EDR)"),
        **port_files(
            "mlx4_0", 2, state="2: INIT", lid="0x0", sm_lid="0x0", rate="100 Gb/sec (4X EDR)",
            gids__0="fe80:0000:0000:0000:b83f:d203:0012:3457",
        ),
        **port_files("rocep12s0f0", **roce, rate="100 Gb/sec (4X EDR)"),
        **port_files("mlx5_bond_0", **roce, rate="200 Gb/sec (2X NDR)"),
    }  # fmt: skip
    for number, name in enumerate(("mlx4_0", "rocep12s0f0", "mlx5_bond_0")):
        files |= {
            f"{base}/{name}/node_guid": f"b83f:d203:0012:345{number}",
            f"{base}/{name}/sys_image_guid": f"b83f:d203:0012:346{number}",
            f"{base}/{name}/fw_ver": "28.41.1000",
            f"{base}/{name}/hca_type": "MT4129",
        }
    write_tree(folder, files)
    return folder / "class"


@pytest.fixture(params=[described, mixed])
def classes(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A class folder with what only ibstat wants beside it, and an overlay that works."""
    for program in ("ibstat", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    made: Path = request.param(tmp_path)
    add_what_ibstat_wants(made)
    probe = in_namespace(OVERLAY.replace("exec ibstat", "true"), str(made))
    if probe.returncode:
        pytest.skip(f"no overlay in a mount namespace here: {probe.stderr.strip()}")
    return made


def add_what_ibstat_wants(folder: Path) -> None:
    mads = folder / "infiniband_mad"
    for adapter in sorted((folder / "infiniband").iterdir()):
        (adapter / "node_type").write_text("1: CA\n")
        (adapter / "hw_rev").write_text("0\n")
        for port in sorted((adapter / "ports").iterdir()):
            more = {"sm_sl": "0", "lid_mask_count": "0", "cap_mask": "0xa651e848"}
            for name, text in more.items():
                (port / name).write_text(f"{text}\n")
            (port / "pkeys").mkdir()
            (port / "pkeys" / "0").write_text("0xffff\n")
            mad = mads / f"umad{len(list(mads.glob('*')))}"
            mad.mkdir(parents=True)
            (mad / "ibdev").write_text(f"{adapter.name}\n")
            (mad / "port").write_text(f"{port.name}\n")
    (mads / "abi_version").write_text("5\n")


def of_the_adapter(hca: Hca) -> dict[str, str]:
    """What ibstat says of an adapter, made of what the reader says of it."""
    return {
        "CA type": hca.hca_type,
        "Number of ports": str(len(hca.ports)),
        "Firmware version": hca.firmware,
        "Node GUID": f"0x{hca.node_guid}",
        "System image GUID": f"0x{hca.system_image_guid}",
    }


def of_the_port(port: HcaPort) -> dict[str, str]:
    """What it says of a port."""
    return {
        "State": STATES[port.state],
        "Physical state": port.phys_state,
        "Rate": str(port.rate_mbps // 1000),
        "Base lid": str(port.lid),
        "SM lid": str(port.sm_lid),
        "Port GUID": f"0x{port.port_guid}",
        "Link layer": port.link_layer,
    }


def test_ibstat_and_the_reader_agree_on_every_adapter_and_port(classes: Path) -> None:
    printed = in_namespace(OVERLAY, str(classes))
    assert printed.returncode == 0, printed.stderr
    names = ADAPTER.findall(printed.stdout)
    blocks = ADAPTER.split(printed.stdout)[2::2]
    ours = {hca.name: hca for hca in SysfsHcaReader(classes.parent).read()}
    assert set(names) == set(ours)
    for name, block in zip(names, blocks, strict=True):
        hca = ours[name]
        # "Port 1:" begins what is said of that port; "Port GUID" is one of its lines.
        head, *parts = PORT.split(block)
        assert {key: said(head).get(key) for key in of_the_adapter(hca)} == of_the_adapter(hca), (
            name
        )
        numbers, ports = parts[::2], parts[1::2]
        assert [int(number) for number in numbers] == [port.number for port in hca.ports]
        for port, text in zip(hca.ports, ports, strict=True):
            expected = of_the_port(port)
            assert {key: said(text).get(key) for key in expected} == expected, name


def said(block: str) -> dict[str, str]:
    return dict(line.strip().split(": ", 1) for line in block.splitlines() if ": " in line)
