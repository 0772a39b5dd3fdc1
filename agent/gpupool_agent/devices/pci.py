"""Where PCI devices sit in their host, read from /sys."""

import re
from pathlib import Path

from gpupool_agent.devices.sysfs import read_int, read_text, real_path

ROOT_COMPLEX = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def pci_device(sysfs: Path, address: str) -> str:
    """Folder of a PCI device."""
    return f"{sysfs}/bus/pci/devices/{address}"


def pci_path(device: str) -> str:
    """Bridges above a device, root first; empty where it is not in a PCI tree.

    Looked for from the root complex on, so it does not matter where the tree hangs.
    """
    parts = real_path(device).split("/")
    roots = [at for at, part in enumerate(parts) if ROOT_COMPLEX.fullmatch(part)]
    if not roots:
        return ""
    bridges = [parts[roots[-1]]]
    for part in parts[roots[-1] + 1 : -1]:
        if not PCI_ADDRESS.fullmatch(part):
            break
        bridges.append(part)
    return "/".join(bridges)


def numa_node(device: str) -> int:
    """NUMA node of a device; -1: the firmware does not say."""
    return max(-1, read_int(f"{device}/numa_node", unknown=-1))


def local_cpus(device: str) -> str:
    """CPUs beside a device, as "0-55,112-167"; empty: unknown."""
    return read_text(f"{device}/local_cpulist")
