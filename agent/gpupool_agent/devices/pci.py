"""Where PCI devices sit in their host, read from /sys."""

import re
from pathlib import Path

from gpupool_agent.devices.sysfs import read_int, read_text

ROOT_COMPLEX = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def pci_device(sysfs: Path, address: str) -> Path:
    """Folder of a PCI device."""
    return sysfs / "bus" / "pci" / "devices" / address


def pci_path(device: Path) -> str:
    """Bridges above a device, root first; empty where it is not in a PCI tree.

    Looked for from the root complex on, so it does not matter where the tree hangs.
    """
    parts = device.resolve().parts
    roots = [at for at, part in enumerate(parts) if ROOT_COMPLEX.fullmatch(part)]
    if not roots:
        return ""
    bridges = [parts[roots[-1]]]
    for part in parts[roots[-1] + 1 : -1]:
        if not PCI_ADDRESS.fullmatch(part):
            break
        bridges.append(part)
    return "/".join(bridges)


def numa_node(device: Path) -> int:
    """NUMA node of a device; -1: the firmware does not say."""
    return max(-1, read_int(device / "numa_node", unknown=-1))


def local_cpus(device: Path) -> str:
    """CPUs beside a device, as "0-55,112-167"; empty: unknown."""
    return read_text(device / "local_cpulist")
