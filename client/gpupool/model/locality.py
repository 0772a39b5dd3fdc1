"""How far apart two PCI devices of one host are, in the words of nvidia-smi.

A path names the bridges between the host and the device, root first and without the
device itself, as sysfs has them: "pci0000:15/0000:15:01.0/0000:16:00.0". It is the same
for every boot of the same hardware.
"""

from enum import IntEnum
from typing import Protocol


class Distance(IntEnum):
    """How far apart two devices are, near to far; the names are nvidia-smi's."""

    SAME = 0
    PIX = 1
    """At most a single PCIe switch between them."""
    PXB = 2
    """Several PCIe switches, and not the host bridge."""
    PHB = 3
    """The PCIe host bridge, which is mostly the CPU."""
    NODE = 4
    """Several host bridges of one NUMA node."""
    SYS = 5
    """The link between NUMA nodes, or not known."""


class Located(Protocol):
    """Whatever sits in a slot. ``pci_path`` may be empty and ``numa_node`` -1: unknown."""

    @property
    def pci_address(self) -> str: ...  # noqa: D102 - see the class
    @property
    def pci_path(self) -> str: ...  # noqa: D102 - see the class
    @property
    def numa_node(self) -> int: ...  # noqa: D102 - see the class


def distance(one: Located, other: Located) -> Distance:
    """How far apart they are; what is not known counts as far."""
    if one.pci_address and one.pci_address == other.pci_address:
        return Distance.SAME
    path, other_path = _bridges(one.pci_path), _bridges(other.pci_path)
    common = _common(path, other_path)
    if common == 0:
        known = one.numa_node != -1
        return Distance.NODE if known and one.numa_node == other.numa_node else Distance.SYS
    if common == 1:
        return Distance.PHB
    # Below the last common bridge a switch has one port each on the way down; more
    # of them are another switch.
    below = max(len(path), len(other_path)) - common
    return Distance.PIX if below <= 1 else Distance.PXB


def _bridges(path: str) -> list[str]:
    return path.split("/") if path else []


def _common(path: list[str], other: list[str]) -> int:
    count = 0
    for bridge, other_bridge in zip(path, other, strict=False):
        if bridge != other_bridge:
            break
        count += 1
    return count
