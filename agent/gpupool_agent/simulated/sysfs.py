"""The /sys tree of a simulated node: its PCI devices and its network adapters.

It holds the files that the agent's readers look at. What is the same for every node
of a machine, the PCI devices, is written once and linked to.
"""

import hashlib
import tempfile
from dataclasses import replace
from pathlib import Path

from gpupool_agent.simulated.machine import HcaDescription, Machine, SlotDescription, hca_guid
from gpupool_agent.simulated.node import SimulatedNode

_LID_MAX = 0xBFFF
_SPEEDS = {100: "EDR", 200: "HDR", 400: "NDR", 800: "XDR"}
_MODELS = {100: "MT4119", 200: "MT4123", 400: "MT4129", 800: "MT4131"}
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
        pci.symlink_to(_pci_tree(node.machine, pci_trees) / "bus")
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
    if not up:
        downed = port / "counters" / "link_downed"
        # It stops at its end, as the real one does.
        _write(downed.parent, {downed.name: str(min(int(downed.read_text()) + 1, 0xFF))})


def _pci_tree(machine: Machine, pci_trees: Path) -> Path:
    """Give the directory of the machine's PCI devices, made at its first use."""
    places: list[SlotDescription | HcaDescription] = [*machine.slots, *machine.hcas]
    tree = pci_trees / hashlib.sha256(repr((machine.cpu_milli, places)).encode()).hexdigest()[:16]
    if not tree.is_dir():
        pci_trees.mkdir(exist_ok=True)
        # Renamed when complete: a fleet that is killed meanwhile leaves no half tree.
        unfinished = Path(tempfile.mkdtemp(dir=pci_trees))
        unfinished.chmod(0o755)
        by_address = unfinished / "bus" / "devices"
        by_address.mkdir(parents=True)
        cpus = _cpus_by_numa_node(machine)
        for place in places:
            where = Path("devices") / (place.bridges or _own_root(place.pci_address))
            folder = unfinished / where / place.pci_address
            folder.mkdir(parents=True)
            files = {"numa_node": str(place.numa_node)}
            if place.numa_node in cpus:
                files["local_cpulist"] = cpus[place.numa_node]
            _write(folder, files)
            (by_address / place.pci_address).symlink_to(
                Path("..", "..") / where / place.pci_address
            )
        unfinished.rename(tree)
    return tree


def _own_root(address: str) -> str:
    """Bridges above a slot that nothing else shares."""
    domain, bus, _ = address.split(":")
    return f"pci{domain}:{bus}"


def _cpus_by_numa_node(machine: Machine) -> dict[int, str]:
    """CPUs of the NUMA nodes that the machine's slots name, in equal parts."""
    numa_nodes = sorted({slot.numa_node for slot in machine.slots} - {-1})
    each = machine.cpu_milli // 1000 // max(1, len(numa_nodes))
    return {
        numa_node: f"{at * each}-{(at + 1) * each - 1}"
        for at, numa_node in enumerate(numa_nodes)
        if each
    }


def _write_hca(root: Path, node_id: str, hca: HcaDescription) -> None:
    folder = root / "class" / "infiniband" / hca.name
    gids = folder / "ports" / "1" / "gids"
    gids.mkdir(parents=True, exist_ok=True)
    guid = hca_guid(node_id, hca)
    text = _grouped(guid)
    _write(
        folder,
        {
            "node_guid": text,
            "sys_image_guid": _grouped(hca_guid(node_id, _first_function(hca))),
            "hca_type": _MODELS.get(hca.rate_gbps, "MT4129"),
            "fw_ver": "28.41.1000",
            "board_id": f"MT_{hca.rate_gbps:010d}",
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
            "link_layer": hca.link_layer,
        },
    )
    _write(gids, {"0": f"fe80:0000:0000:0000:{text}"})
    counters = folder / "ports" / "1" / "counters"
    counters.mkdir(exist_ok=True)
    _write(counters, dict.fromkeys(("port_xmit_data", "port_rcv_data", "link_downed"), "0"))


def _first_function(hca: HcaDescription) -> HcaDescription:
    """The function of the same card that its identity is made from."""
    return replace(hca, pci_address=f"{hca.pci_address[:-1]}0")


def _grouped(guid: str) -> str:
    return ":".join(guid[at : at + 4] for at in range(0, 16, 4))


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
