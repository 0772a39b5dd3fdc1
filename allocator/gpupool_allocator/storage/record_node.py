"""Stored shape of a node: its last known inventory.

Network adapters are most of a record and nothing that a decision looks at, while a
restart waits for every record. So they stand last, and are read when they are asked for.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast, overload

from gpupool.model.ids import NodeId
from gpupool.model.inventory import Device, Hca, HcaPort, NodeInventory, NodeRecord
from gpupool_allocator.storage.record_request import Json

_HCAS_KEY = b',"hcas":['
_HCAS_END = b"]}}"
_HCAS_TEXT = "hcas text"
"""Where ``parse_node`` puts what it has left unread; no record has such a field."""

_read_first = json.JSONDecoder().raw_decode

# Fields that came after 0.1.0 by their name in the record, each with the default that
# an older record, and one that leaves it out, has.
_DEVICE_FIELDS: dict[str, tuple[str, Any]] = {
    "pci_path": ("path", ""),
    "cpus": ("cpus", ""),
    "fabric_state": ("fabric", ""),
    "fabric_status": ("fabric_status", 0),
    "cluster_uuid": ("cluster", ""),
    "clique_id": ("clique", 0),
    "nvlinks_active": ("links", 0),
    "nvlinks_expected": ("links_expected", 0),
    "nvlink_peers": ("peers", {}),
}
# Every field that a record may have; what it lacks has the model's default.
_DEVICE_NAMES = {
    "uuid": "uuid",
    "model": "model",
    "index": "index",
    "pci": "pci_address",
    "memory_mib": "memory_mib",
    "numa": "numa_node",
    "nvlink": "nvlink_domain",
    "sms": "sm_count",
    "sliceable": "sliceable",
    "parent": "parent_uuid",
    "compute": "compute_capability",
} | {key: name for name, (key, _) in _DEVICE_FIELDS.items()}
_HCA_FIELDS: dict[str, tuple[str, Any]] = {
    "pci_path": ("path", ""),
    "system_image_guid": ("image_guid", ""),
    "firmware": ("firmware", ""),
    "hca_type": ("type", ""),
    "board_id": ("board", ""),
    "bonded": ("bonded", False),
}
_PORT_FIELDS: dict[str, tuple[str, Any]] = {
    "phys_state": ("phys_state", ""),
    "width": ("width", 0),
    "speed": ("speed", ""),
    "expected_rate_mbps": ("expected_mbps", 0),
    "rail": ("rail", None),
}
_HCA_NAMES = {
    "name": "name",
    "guid": "node_guid",
    "pci": "pci_address",
    "numa": "numa_node",
} | {key: name for name, (key, _) in _HCA_FIELDS.items()}
_PORT_NAMES = {
    "number": "number",
    "guid": "port_guid",
    "link_layer": "link_layer",
    "lid": "lid",
    "sm_lid": "sm_lid",
    "state": "state",
    "rate_mbps": "rate_mbps",
} | {key: name for name, (key, _) in _PORT_FIELDS.items()}


def _set_fields(item: object, fields: dict[str, tuple[str, Any]]) -> Json:
    """What is not the default: a record is as small as what there is to say."""
    values = {key: getattr(item, name) for name, (key, _) in fields.items()}
    return {key: values[key] for key, default in fields.values() if values[key] != default}


def _given_fields(shape: Json, names: dict[str, str]) -> dict[str, Any]:
    return {names[key]: shape[key] for key in shape if key in names}


def _device_to_json(device: Device) -> Json:
    shape: Json = {"uuid": device.uuid, "model": device.model, "index": device.index}
    if device.pci_address:
        shape["pci"] = device.pci_address
    if device.memory_mib is not None:
        shape["memory_mib"] = device.memory_mib
    if device.numa_node != -1:
        shape["numa"] = device.numa_node
    if device.nvlink_domain:
        shape["nvlink"] = device.nvlink_domain
    if device.sm_count:
        shape["sms"] = device.sm_count
    if not device.sliceable:
        shape["sliceable"] = False
    if device.parent_uuid is not None:
        shape["parent"] = device.parent_uuid
    if device.compute_capability:
        shape["compute"] = device.compute_capability
    return shape | _set_fields(device, _DEVICE_FIELDS)


def _device_from_json(shape: Json) -> Device:
    return Device(**_given_fields(shape, _DEVICE_NAMES))


def _port_to_json(port: HcaPort) -> Json:
    shape: Json = {"number": port.number, "guid": port.port_guid, "link_layer": port.link_layer}
    if port.lid:
        shape["lid"] = port.lid
    if port.sm_lid:
        shape["sm_lid"] = port.sm_lid
    if port.state:
        shape["state"] = port.state
    if port.rate_mbps:
        shape["rate_mbps"] = port.rate_mbps
    return shape | _set_fields(port, _PORT_FIELDS)


def _port_from_json(shape: Json) -> HcaPort:
    return HcaPort(**_given_fields(shape, _PORT_NAMES))


def _hca_to_json(hca: Hca) -> Json:
    shape: Json = {"name": hca.name, "guid": hca.node_guid}
    if hca.pci_address:
        shape["pci"] = hca.pci_address
    if hca.numa_node != -1:
        shape["numa"] = hca.numa_node
    if hca.ports:
        shape["ports"] = [_port_to_json(each) for each in hca.ports]
    return shape | _set_fields(hca, _HCA_FIELDS)


def _hca_from_json(shape: Json) -> Hca:
    ports = tuple(_port_from_json(each) for each in shape.get("ports", ()))
    return Hca(**_given_fields(shape, _HCA_NAMES), ports=ports)


def _inventory_to_json(inventory: NodeInventory) -> Json:
    shape: Json = {
        "devices": [_device_to_json(each) for each in inventory.devices],
        "hostname": inventory.hostname,
        "cpu_milli": inventory.cpu_milli,
        "host_memory_mib": inventory.host_memory_mib,
        "driver": inventory.driver_version,
    }
    if inventory.labels:
        shape["labels"] = inventory.labels
    if inventory.simulated:
        shape["simulated"] = inventory.simulated
    if inventory.hcas:
        shape["hcas"] = [_hca_to_json(each) for each in inventory.hcas]  # last: see parse_node
    return shape


class _StoredHcas(Sequence[Hca]):
    """The tuple of a node's adapters, made from its JSON when it is asked for.

    One that cannot be read is empty: its node tells its adapters whenever it connects.
    """

    __slots__ = ("_hcas", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._hcas: tuple[Hca, ...] | None = None

    def _read(self) -> tuple[Hca, ...]:
        if self._hcas is None:
            try:
                # What a newer program may have put behind them is left alone.
                shapes, _ = _read_first(self._text)
                self._hcas = tuple(_hca_from_json(each) for each in shapes)
            except (ValueError, KeyError, TypeError, AttributeError):
                self._hcas = ()
            self._text = ""
        return self._hcas

    @overload
    def __getitem__(self, index: int) -> Hca: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Hca]: ...
    def __getitem__(self, index: int | slice) -> Hca | Sequence[Hca]:
        return self._read()[index]

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[Hca]:
        return iter(self._read())

    def __eq__(self, other: object) -> bool:
        return self._read() == (other._read() if isinstance(other, _StoredHcas) else other)

    def __hash__(self) -> int:
        return hash(self._read())

    def __repr__(self) -> str:
        return repr(self._read())


def _hcas_from_json(shape: Json) -> tuple[Hca, ...]:
    if _HCAS_TEXT in shape:
        return cast("tuple[Hca, ...]", _StoredHcas(shape[_HCAS_TEXT]))
    return tuple(_hca_from_json(each) for each in shape["inventory"].get("hcas", ()))


def _inventory_from_json(shape: Json, hcas: tuple[Hca, ...]) -> NodeInventory:
    return NodeInventory(
        devices=tuple(_device_from_json(each) for each in shape["devices"]),
        hcas=hcas,
        cpu_milli=shape["cpu_milli"],
        host_memory_mib=shape["host_memory_mib"],
        labels=shape.get("labels", {}),
        simulated=shape.get("simulated", ""),
        driver_version=shape["driver"],
        hostname=shape["hostname"],
    )


def node_to_json(node: NodeRecord) -> Json:
    """Shape of a node without its id, which is the record's key."""
    shape: Json = {"boot_id": node.boot_id, "agent_version": node.agent_version}
    if node.missing:
        shape["missing"] = node.missing
    if node.failed:
        shape["failed"] = node.failed
    if node.faults:
        shape["faults"] = node.faults
    shape["inventory"] = _inventory_to_json(node.inventory)  # last: see parse_node
    return shape


def parse_node(value: bytes) -> Json:
    """The JSON of a node's record, with the adapters as text where they stand last.

    No text of the record can look like their key: a quote inside of one is escaped.
    """
    head, key, hcas = value.partition(_HCAS_KEY)
    if not key or not hcas.endswith(_HCAS_END):
        return cast("Json", json.loads(value))
    shape: Json = json.loads(head + _HCAS_END[1:])
    shape[_HCAS_TEXT] = "[" + hcas.decode("ascii")
    return shape


def node_from_json(key: str, shape: Json) -> NodeRecord:
    """Inverse of ``node_to_json``."""
    return NodeRecord(
        node_id=NodeId(key),
        boot_id=shape["boot_id"],
        agent_version=shape["agent_version"],
        inventory=_inventory_from_json(shape["inventory"], _hcas_from_json(shape)),
        missing=tuple(shape.get("missing", ())),
        failed=tuple(shape.get("failed", ())),
        faults=tuple((code, uuid) for code, uuid in shape.get("faults", ())),
    )
