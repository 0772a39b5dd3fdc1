"""The /sys tree of a simulated node: its PCI devices and its network adapters."""

import hashlib
from pathlib import Path

from gpupool_agent.simulated.machine import HcaDescription, hca_guid
from gpupool_agent.simulated.node import SimulatedNode

_LID_MAX = 0xBFFF
_SPEEDS = {100: "EDR", 200: "HDR", 400: "NDR", 800: "XDR"}
_UP = {"state": "4: ACTIVE", "phys_state": "5: LinkUp"}
_DOWN = {"state": "1: DOWN", "phys_state": "2: Polling"}
_MELLANOX = "0x15b3"
_NVIDIA = "0x10de"


class UnknownHcaError(ValueError):
    """No network adapter of the node has that name."""


def sysfs_root(node: SimulatedNode) -> Path:
    """Where the node's /sys is."""
    return node.directory / "sys"


def write_sysfs(node: SimulatedNode) -> None:
    """Write the tree, every port up."""
    root = sysfs_root(node)
    for slot in node.machine.slots:
        _write_pci(root, slot.pci_address, slot.numa_node, _NVIDIA)
    for hca in node.machine.hcas:
        _write_pci(root, hca.pci_address, hca.numa_node, _MELLANOX)
        _write_hca(root, node.node_id, hca)
        set_port(node, hca.name, up=True)


def set_port(node: SimulatedNode, name: str, *, up: bool) -> None:
    """Have an adapter's port up, or its cable out. Raises UnknownHcaError."""
    names = [hca.name for hca in node.machine.hcas]
    if name not in names:
        raise UnknownHcaError(
            f"adapter {name!r} is not on node {node.node_id}; accepted are {', '.join(names)}"
        )
    port = sysfs_root(node) / "class" / "infiniband" / name / "ports" / "1"
    _write(port, _UP if up else _DOWN)


def _write_pci(root: Path, address: str, numa_node: int, vendor: str) -> None:
    folder = root / "bus" / "pci" / "devices" / address
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, {"numa_node": str(numa_node), "vendor": vendor})


def _write_hca(root: Path, node_id: str, hca: HcaDescription) -> None:
    folder = root / "class" / "infiniband" / hca.name
    gids = folder / "ports" / "1" / "gids"
    gids.mkdir(parents=True, exist_ok=True)
    guid = hca_guid(node_id, hca)
    text = ":".join(guid[at : at + 4] for at in range(0, 16, 4))
    _write(
        folder,
        {
            "node_guid": text,
            "sys_image_guid": text,
            "node_type": "1: CA",
            "node_desc": f"{node_id} {hca.name}",
            "hca_type": "MT4129",
            "fw_ver": "28.41.1000",
        },
    )
    device = folder / "device"
    if not device.is_symlink():
        device.symlink_to(Path("../../../bus/pci/devices") / hca.pci_address)
    # RoCE has no LIDs and no subnet manager.
    infiniband = hca.link_layer == "InfiniBand"
    lid = int(hashlib.sha256(guid.encode()).hexdigest()[:8], 16) % _LID_MAX + 1
    speed = f" (4X {_SPEEDS[hca.rate_gbps]})" if hca.rate_gbps in _SPEEDS else ""
    _write(
        folder / "ports" / "1",
        {
            "rate": f"{hca.rate_gbps} Gb/sec{speed}",
            "lid": hex(lid) if infiniband else "0x0",
            "sm_lid": "0x1" if infiniband else "0x0",
            "lid_mask_count": "0",
            "sm_sl": "0",
            "link_layer": hca.link_layer,
        },
    )
    _write(gids, {"0": f"fe80:0000:0000:0000:{text}"})


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
