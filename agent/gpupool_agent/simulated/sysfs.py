"""The /sys tree of a simulated node: its PCI devices and its network adapters.

It holds the files that the agent's readers look at. What is the same for every node
of a machine, the PCI devices, is written once and linked to.
"""

import hashlib
import tempfile
from pathlib import Path

from gpupool_agent.simulated.machine import HcaDescription, Machine, hca_guid
from gpupool_agent.simulated.node import SimulatedNode

_LID_MAX = 0xBFFF
_SPEEDS = {100: "EDR", 200: "HDR", 400: "NDR", 800: "XDR"}
_UP = {"state": "4: ACTIVE", "phys_state": "5: LinkUp"}
_DOWN = {"state": "1: DOWN", "phys_state": "2: Polling"}


class UnknownHcaError(ValueError):
    """No network adapter of the node has that name."""


def sysfs_root(node: SimulatedNode) -> Path:
    """Where the node's /sys is."""
    return node.directory / "sys"


def write_sysfs(node: SimulatedNode, pci_trees: Path) -> None:
    """Write the tree, every port up. ``pci_trees`` is shared by the nodes of a fleet."""
    root = sysfs_root(node)
    (root / "bus").mkdir(parents=True, exist_ok=True)
    pci = root / "bus" / "pci"
    if not pci.is_symlink():
        pci.symlink_to(_pci_tree(node.machine, pci_trees))
    for hca in node.machine.hcas:
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


def _pci_tree(machine: Machine, pci_trees: Path) -> Path:
    """Give the directory of the machine's PCI devices, made at its first use."""
    numa_nodes = {slot.pci_address: slot.numa_node for slot in machine.slots}
    numa_nodes |= {hca.pci_address: hca.numa_node for hca in machine.hcas}
    tree = pci_trees / hashlib.sha256(repr(numa_nodes).encode()).hexdigest()[:16]
    if not tree.is_dir():
        pci_trees.mkdir(exist_ok=True)
        # Renamed when complete: a fleet that is killed meanwhile leaves no half tree.
        unfinished = Path(tempfile.mkdtemp(dir=pci_trees))
        unfinished.chmod(0o755)
        for address, numa_node in numa_nodes.items():
            folder = unfinished / "devices" / address
            folder.mkdir(parents=True)
            _write(folder, {"numa_node": str(numa_node)})
        unfinished.rename(tree)
    return tree


def _write_hca(root: Path, node_id: str, hca: HcaDescription) -> None:
    folder = root / "class" / "infiniband" / hca.name
    gids = folder / "ports" / "1" / "gids"
    gids.mkdir(parents=True, exist_ok=True)
    guid = hca_guid(node_id, hca)
    text = ":".join(guid[at : at + 4] for at in range(0, 16, 4))
    _write(folder, {"node_guid": text})
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
            "link_layer": hca.link_layer,
        },
    )
    _write(gids, {"0": f"fe80:0000:0000:0000:{text}"})


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
