"""Stored shape of a node: its last known inventory."""

from typing import Any

from gpupool.model.ids import DeviceUuid, NodeId
from gpupool.model.inventory import Device, Hca, HcaPort, NodeInventory, NodeRecord
from gpupool_allocator.storage.record_request import Json

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


def _set_fields(item: object, fields: dict[str, tuple[str, Any]]) -> Json:
    """What is not the default: a record is as small as what there is to say."""
    values = {key: getattr(item, name) for name, (key, _) in fields.items()}
    return {key: values[key] for key, default in fields.values() if values[key] != default}


def _given_fields(shape: Json, fields: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    return {name: shape[key] for name, (key, _) in fields.items() if key in shape}


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
    parent = shape.get("parent")
    return Device(
        uuid=DeviceUuid(shape["uuid"]),
        model=shape["model"],
        pci_address=shape.get("pci", ""),
        memory_mib=shape.get("memory_mib"),
        index=shape["index"],
        numa_node=shape.get("numa", -1),
        nvlink_domain=shape.get("nvlink", ""),
        sm_count=shape.get("sms", 0),
        sliceable=shape.get("sliceable", True),
        parent_uuid=None if parent is None else DeviceUuid(parent),
        compute_capability=shape.get("compute", ""),
        **_given_fields(shape, _DEVICE_FIELDS),
    )


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
    return HcaPort(
        number=shape["number"],
        port_guid=shape["guid"],
        lid=shape.get("lid", 0),
        sm_lid=shape.get("sm_lid", 0),
        state=shape.get("state", ""),
        rate_mbps=shape.get("rate_mbps", 0),
        link_layer=shape["link_layer"],
        **_given_fields(shape, _PORT_FIELDS),
    )


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
    return Hca(
        name=shape["name"],
        node_guid=shape["guid"],
        pci_address=shape.get("pci", ""),
        numa_node=shape.get("numa", -1),
        ports=tuple(_port_from_json(each) for each in shape.get("ports", ())),
        **_given_fields(shape, _HCA_FIELDS),
    )


def _inventory_to_json(inventory: NodeInventory) -> Json:
    shape: Json = {
        "devices": [_device_to_json(each) for each in inventory.devices],
        "hostname": inventory.hostname,
        "cpu_milli": inventory.cpu_milli,
        "host_memory_mib": inventory.host_memory_mib,
        "driver": inventory.driver_version,
    }
    if inventory.hcas:
        shape["hcas"] = [_hca_to_json(each) for each in inventory.hcas]
    if inventory.labels:
        shape["labels"] = inventory.labels
    if inventory.simulated:
        shape["simulated"] = inventory.simulated
    return shape


def _inventory_from_json(shape: Json) -> NodeInventory:
    return NodeInventory(
        devices=tuple(_device_from_json(each) for each in shape["devices"]),
        hcas=tuple(_hca_from_json(each) for each in shape.get("hcas", ())),
        cpu_milli=shape["cpu_milli"],
        host_memory_mib=shape["host_memory_mib"],
        labels=shape.get("labels", {}),
        simulated=shape.get("simulated", ""),
        driver_version=shape["driver"],
        hostname=shape["hostname"],
    )


def node_to_json(node: NodeRecord) -> Json:
    """Shape of a node without its id, which is the record's key."""
    return {
        "boot_id": node.boot_id,
        "agent_version": node.agent_version,
        "inventory": _inventory_to_json(node.inventory),
    }


def node_from_json(key: str, shape: Json) -> NodeRecord:
    """Inverse of ``node_to_json``."""
    return NodeRecord(
        node_id=NodeId(key),
        boot_id=shape["boot_id"],
        agent_version=shape["agent_version"],
        inventory=_inventory_from_json(shape["inventory"]),
    )
