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

from gpupool.model.inventory import Hca
from gpupool_agent.devices.hca import SysfsHcaReader
from gpupool_agent.simulated.machine import load_machine
from gpupool_agent.simulated.node import SimulatedNode
from gpupool_agent.simulated.sysfs import set_port, sysfs_root, write_sysfs

OVERLAY = 'mount -t overlay overlay -o lowerdir="$1":/sys/class /sys/class && exec ibstat'
RATES = {100_000: "100", 200_000: "200", 400_000: "400"}
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


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """The class folder of a described DGX, with what only ibstat wants beside it."""
    for program in ("ibstat", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    node = SimulatedNode(node_id="n", machine=load_machine("dgx-h100"), directory=tmp_path)
    write_sysfs(node, tmp_path / "pci")
    set_port(node, "mlx5_4", up=False)
    folder = sysfs_root(node) / "class"
    for number, adapter in enumerate(sorted((folder / "infiniband").iterdir())):
        (adapter / "node_type").write_text("1: CA\n")
        (adapter / "hw_rev").write_text("0\n")
        port = adapter / "ports" / "1"
        for name, text in {"sm_sl": "0", "lid_mask_count": "0", "cap_mask": "0xa651e848"}.items():
            (port / name).write_text(f"{text}\n")
        (port / "pkeys").mkdir()
        (port / "pkeys" / "0").write_text("0xffff\n")
        mad = folder / "infiniband_mad" / f"umad{number}"
        mad.mkdir(parents=True)
        (mad / "ibdev").write_text(f"{adapter.name}\n")
        (mad / "port").write_text("1\n")
    (folder / "infiniband_mad" / "abi_version").write_text("5\n")
    probe = in_namespace(OVERLAY.replace("exec ibstat", "true"), str(folder))
    if probe.returncode:
        pytest.skip(f"no overlay in a mount namespace here: {probe.stderr.strip()}")
    return folder


def as_ibstat(hca: Hca) -> dict[str, str]:
    """What ibstat says of an adapter, made of what the reader says of it."""
    [port] = hca.ports
    return {
        "CA type": hca.hca_type,
        "Number of ports": "1",
        "Firmware version": hca.firmware,
        "Node GUID": f"0x{hca.node_guid}",
        "System image GUID": f"0x{hca.system_image_guid}",
        "State": {"ACTIVE": "Active", "DOWN": "Down"}[port.state],
        "Physical state": port.phys_state,
        "Rate": RATES[port.rate_mbps],
        "Base lid": str(port.lid),
        "SM lid": str(port.sm_lid),
        "Port GUID": f"0x{port.port_guid}",
        "Link layer": port.link_layer,
    }


def test_ibstat_and_the_reader_agree_on_every_adapter(classes: Path) -> None:
    printed = in_namespace(OVERLAY, str(classes))
    assert printed.returncode == 0, printed.stderr
    names = ADAPTER.findall(printed.stdout)
    blocks = ADAPTER.split(printed.stdout)[2::2]
    seen = {
        name: dict(line.strip().split(": ", 1) for line in block.splitlines() if ": " in line)
        for name, block in zip(names, blocks, strict=True)
    }
    ours = {hca.name: hca for hca in SysfsHcaReader(classes.parent).read()}
    assert set(seen) == set(ours)
    for name, hca in ours.items():
        expected = as_ibstat(hca)
        assert {key: seen[name].get(key) for key in expected} == expected, name
    assert seen["mlx5_4"]["Physical state"] == "Polling"
