"""How the GPUs and network adapters of a node are joined, as nvidia-smi topo -m shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpupool.cli.output import Column, table
from gpupool.model.inventory import NVSWITCH, Device, Hca
from gpupool.model.locality import Distance, distance
from gpupool.model.views import NodeView

SELF = "X"

LEGEND = """\
X     the same
NV#   # NVLinks
PIX   at most one PCIe switch
PXB   several PCIe switches
PHB   the PCIe host bridge
NODE  several host bridges of one NUMA node
SYS   the link between NUMA nodes, or not known"""


@dataclass(frozen=True, slots=True)
class Row:
    """A GPU or adapter of a node and how it is joined to each other one, by their names."""

    name: str
    item: Device | Hca
    joined: Mapping[str, str]


def rows_of(node: NodeView) -> list[Row]:
    """GPUs by their index, then adapters by their name, which get the names NIC0, NIC1, ..."""
    items: dict[str, Device | Hca] = {}
    slots: set[str] = set()
    for device in sorted(node.inventory.devices, key=lambda device: device.index):
        # The MIG instances of a GPU are at one place.
        if device.pci_address and device.pci_address in slots:
            continue
        slots.add(device.pci_address)
        items[f"GPU{device.index}"] = device
    items |= {f"NIC{number}": hca for number, hca in enumerate(node.inventory.hcas)}
    return [
        Row(name, item, {other: joint(item, items[other]) for other in items})
        for name, item in items.items()
    ]


def joint(one: Device | Hca, other: Device | Hca) -> str:
    """How two things are joined, in nvidia-smi's words."""
    if one is other:
        return SELF
    links = _nvlinks(one, other) if isinstance(one, Device) and isinstance(other, Device) else 0
    if links:
        return f"NV{links}"
    far = distance(one, other)
    return SELF if far is Distance.SAME else far.name


def _nvlinks(one: Device, other: Device) -> int:
    """Links between two GPUs: direct ones, or through switches what the lesser of them has."""
    direct = one.nvlink_peers.get(other.pci_address, 0)
    switched = min(one.nvlink_peers.get(NVSWITCH, 0), other.nvlink_peers.get(NVSWITCH, 0))
    return direct or switched


def matrix_table(node: NodeView) -> str:
    """The matrix for people, with a legend of the adapters."""
    rows = rows_of(node)
    names = [row.name for row in rows]

    def joined(name: str) -> Column[Row]:
        return Column(name, lambda row: row.joined[name])

    columns: list[Column[Row]] = [
        Column("-", lambda row: row.name),
        *(joined(name) for name in names),
        Column("CPU AFFINITY", lambda row: row.item.cpus if isinstance(row.item, Device) else ""),
        Column("NUMA", lambda row: "" if row.item.numa_node == -1 else row.item.numa_node),
    ]
    adapters = [f"{row.name}: {_adapter(row.item)}" for row in rows if isinstance(row.item, Hca)]
    return "\n".join([f"node {node.node_id}", table(columns, rows), *adapters])


def _adapter(hca: Hca) -> str:
    ports = ", ".join(
        " ".join(
            word
            for word in (
                "" if len(hca.ports) == 1 else f"port {port.number}",
                port.link_layer,
                port.state or "state unknown",
                f"{port.rate_mbps / 1000:g} Gb/s",
                "" if port.rail is None else f"rail {port.rail}",
            )
            if word
        )
        for port in hca.ports
    )
    return f"{hca.name} ({ports})" if ports else hca.name


def matrix_data(nodes: Sequence[NodeView]) -> list[dict[str, Any]]:
    """The matrices for programs; fields of GPUs and adapters are named as in the protos."""
    return [
        {
            "node_id": node.node_id,
            "rows": [_row_data(row) for row in rows_of(node)],
        }
        for node in nodes
    ]


def _row_data(row: Row) -> dict[str, Any]:
    item = row.item
    identity = {"uuid": item.uuid} if isinstance(item, Device) else {"hca": item.name}
    return {
        "name": row.name,
        **identity,
        "pci_address": item.pci_address,
        "numa_node": item.numa_node,
        "cpus": item.cpus if isinstance(item, Device) else "",
        "joined": dict(row.joined),
    }
