"""What a node has."""

from gpupool.model import limits
from gpupool.model.ids import DeviceUuid
from gpupool.model.inventory import Device, Hca, HcaPort, NodeInventory, StrayProcess
from gpupool.v1 import node_pb2 as pb
from gpupool.wire import door
from gpupool.wire.resources import PID_MAX

_HCAS_MAX = 256
_PORTS_MAX = 64
_NUMA_NODE_MAX = 1023
_INDEX_MAX = 4095
_LID_MAX = 65_535
_RATE_MBPS_MAX = 1_000_000_000
_LOCALITY_CHARS_MAX = 1024
_FABRIC_STATUS_MAX = 999
_NVLINKS_MAX = 64
_WIDTH_MAX = 12
_RAIL_MAX = 255
_COMMAND_CHARS_MAX = limits.NAME_CHARS_MAX


def device_to_proto(device: Device) -> pb.Device:
    """A GPU or MIG instance; unknown memory is 0."""
    return pb.Device(
        uuid=device.uuid,
        model=device.model,
        pci_address=device.pci_address,
        memory_mib=device.memory_mib or 0,
        index=device.index,
        numa_node=device.numa_node,
        nvlink_domain=device.nvlink_domain,
        sm_count=device.sm_count,
        sliceable=device.sliceable,
        parent_uuid=device.parent_uuid or "",
        compute_capability=device.compute_capability,
        pci_path=device.pci_path,
        cpus=device.cpus,
        fabric_state=device.fabric_state,
        fabric_status=device.fabric_status,
        cluster_uuid=device.cluster_uuid,
        clique_id=device.clique_id,
        nvlinks_active=device.nvlinks_active,
        nvlinks_expected=device.nvlinks_expected,
        nvlink_peers=device.nvlink_peers,
        serial=device.serial,
    )


def device_from_proto(at: str, message: pb.Device) -> Device:
    """Raises BadField; memory 0 reads as unknown."""
    memory_mib = door.integer(at, "memory_mib", message.memory_mib, 0, limits.GPU_MEMORY_MIB_MAX)
    parent: DeviceUuid | None = None
    if message.parent_uuid:
        parent = DeviceUuid(door.device_uuid(at, "parent_uuid", message.parent_uuid))
    return Device(
        uuid=DeviceUuid(door.device_uuid(at, "uuid", message.uuid)),
        model=door.text(at, "model", message.model, least=1),
        pci_address=door.text(at, "pci_address", message.pci_address),
        memory_mib=memory_mib or None,
        index=door.integer(at, "index", message.index, 0, _INDEX_MAX),
        numa_node=door.integer(at, "numa_node", message.numa_node, -1, _NUMA_NODE_MAX),
        nvlink_domain=door.text(at, "nvlink_domain", message.nvlink_domain),
        sm_count=door.integer(at, "sm_count", message.sm_count, 0, limits.SM_COUNT_MAX),
        sliceable=message.sliceable,
        parent_uuid=parent,
        compute_capability=door.text(at, "compute_capability", message.compute_capability),
        pci_path=door.text(at, "pci_path", message.pci_path, most=_LOCALITY_CHARS_MAX),
        cpus=door.text(at, "cpus", message.cpus, most=_LOCALITY_CHARS_MAX),
        fabric_state=door.text(at, "fabric_state", message.fabric_state),
        fabric_status=door.integer(
            at, "fabric_status", message.fabric_status, 0, _FABRIC_STATUS_MAX
        ),
        cluster_uuid=door.text(at, "cluster_uuid", message.cluster_uuid),
        clique_id=message.clique_id,
        nvlinks_active=door.integer(at, "nvlinks_active", message.nvlinks_active, 0, _NVLINKS_MAX),
        nvlinks_expected=door.integer(
            at, "nvlinks_expected", message.nvlinks_expected, 0, _NVLINKS_MAX
        ),
        nvlink_peers=_nvlink_peers(at, message),
        serial=door.text(at, "serial", message.serial),
    )


def _nvlink_peers(at: str, message: pb.Device) -> dict[str, int]:
    door.count(at, "nvlink_peers", message.nvlink_peers, 0, _NVLINKS_MAX)
    for peer, links in message.nvlink_peers.items():
        door.text(at, "nvlink_peers key", peer, least=1)
        door.integer(at, f"nvlink_peers[{peer!r}]", links, 1, _NVLINKS_MAX)
    return dict(message.nvlink_peers)


def hca_port_to_proto(port: HcaPort) -> pb.HcaPort:
    """Port of an adapter."""
    return pb.HcaPort(
        number=port.number,
        port_guid=port.port_guid,
        lid=port.lid,
        sm_lid=port.sm_lid,
        state=port.state,
        rate_mbps=port.rate_mbps,
        link_layer=port.link_layer,
        phys_state=port.phys_state,
        width=port.width,
        speed=port.speed,
        expected_rate_mbps=port.expected_rate_mbps,
        rail=port.rail,
    )


def hca_port_from_proto(at: str, message: pb.HcaPort) -> HcaPort:
    """Raises BadField."""
    return HcaPort(
        number=door.integer(at, "number", message.number, 1, 255),
        port_guid=door.guid(at, "port_guid", message.port_guid),
        lid=door.integer(at, "lid", message.lid, 0, _LID_MAX),
        sm_lid=door.integer(at, "sm_lid", message.sm_lid, 0, _LID_MAX),
        state=door.text(at, "state", message.state),
        rate_mbps=door.integer(at, "rate_mbps", message.rate_mbps, 0, _RATE_MBPS_MAX),
        link_layer=door.text(at, "link_layer", message.link_layer),
        phys_state=door.text(at, "phys_state", message.phys_state),
        width=door.integer(at, "width", message.width, 0, _WIDTH_MAX),
        speed=door.text(at, "speed", message.speed),
        expected_rate_mbps=door.integer(
            at, "expected_rate_mbps", message.expected_rate_mbps, 0, _RATE_MBPS_MAX
        ),
        rail=(
            door.integer(at, "rail", message.rail, 0, _RAIL_MAX)
            if message.HasField("rail")
            else None
        ),
    )


def hca_to_proto(hca: Hca) -> pb.Hca:
    """A network adapter."""
    return pb.Hca(
        name=hca.name,
        node_guid=hca.node_guid,
        pci_address=hca.pci_address,
        numa_node=hca.numa_node,
        ports=[hca_port_to_proto(port) for port in hca.ports],
        pci_path=hca.pci_path,
        system_image_guid=hca.system_image_guid,
        firmware=hca.firmware,
        hca_type=hca.hca_type,
        board_id=hca.board_id,
        bonded=hca.bonded,
    )


def hca_from_proto(at: str, message: pb.Hca) -> Hca:
    """Raises BadField; no port number may appear twice."""
    door.count(at, "ports", message.ports, 0, _PORTS_MAX)
    ports = tuple(
        hca_port_from_proto(f"{at}.ports[{index}]", port)
        for index, port in enumerate(message.ports)
    )
    door.unique(at, "ports", [port.number for port in ports])
    return Hca(
        name=door.text(at, "name", message.name, least=1),
        node_guid=door.guid(at, "node_guid", message.node_guid),
        pci_address=door.text(at, "pci_address", message.pci_address),
        numa_node=door.integer(at, "numa_node", message.numa_node, -1, _NUMA_NODE_MAX),
        ports=ports,
        pci_path=door.text(at, "pci_path", message.pci_path, most=_LOCALITY_CHARS_MAX),
        system_image_guid=(
            door.guid(at, "system_image_guid", message.system_image_guid)
            if message.system_image_guid
            else ""
        ),
        firmware=door.text(at, "firmware", message.firmware),
        hca_type=door.text(at, "hca_type", message.hca_type),
        board_id=door.text(at, "board_id", message.board_id),
        bonded=message.bonded,
    )


def node_inventory_to_proto(inventory: NodeInventory) -> pb.NodeInventory:
    """Everything on a node."""
    return pb.NodeInventory(
        devices=[device_to_proto(device) for device in inventory.devices],
        hcas=[hca_to_proto(hca) for hca in inventory.hcas],
        cpu_milli=inventory.cpu_milli,
        host_memory_mib=inventory.host_memory_mib,
        labels=inventory.labels,
        simulated=inventory.simulated,
        driver_version=inventory.driver_version,
        hostname=inventory.hostname,
    )


def node_inventory_from_proto(at: str, message: pb.NodeInventory) -> NodeInventory:
    """Raises BadField; no device may appear twice."""
    door.count(at, "devices", message.devices, 0, limits.DEVICES_PER_NODE_MAX)
    door.count(at, "hcas", message.hcas, 0, _HCAS_MAX)
    devices = tuple(
        device_from_proto(f"{at}.devices[{index}]", device)
        for index, device in enumerate(message.devices)
    )
    door.unique(at, "devices", [device.uuid for device in devices])
    return NodeInventory(
        devices=devices,
        hcas=tuple(
            hca_from_proto(f"{at}.hcas[{index}]", hca) for index, hca in enumerate(message.hcas)
        ),
        cpu_milli=door.integer(at, "cpu_milli", message.cpu_milli, 0, limits.CPU_MILLI_MAX),
        host_memory_mib=door.integer(
            at, "host_memory_mib", message.host_memory_mib, 0, limits.HOST_MEMORY_MIB_MAX
        ),
        labels=door.labels(at, "labels", message.labels, limits.LABELS_MAX),
        simulated=door.text(at, "simulated", message.simulated),
        driver_version=door.text(at, "driver_version", message.driver_version),
        hostname=door.text(at, "hostname", message.hostname),
    )


def stray_process_to_proto(stray: StrayProcess) -> pb.StrayProcess:
    """A process that should not be where it is; its texts are cut at 253 characters.

    Command line and lease id are a process's own bytes: what is not UTF-8 in them would
    make the whole report unsendable, so it is shown as "?".
    """
    return pb.StrayProcess(
        pid=stray.pid,
        uid=stray.uid,
        user=stray.user,
        command=_sendable(stray.command, _COMMAND_CHARS_MAX),
        memory_mib=stray.memory_mib,
        cause=stray.cause,
        lease_id=_sendable(stray.lease_id, limits.NAME_CHARS_MAX),
    )


def _sendable(text: str, chars_max: int) -> str:
    return text[:chars_max].replace("\0", " ").encode("utf-8", "replace").decode("utf-8")


def stray_process_from_proto(at: str, message: pb.StrayProcess) -> StrayProcess:
    """Raises BadField."""
    return StrayProcess(
        pid=door.integer(at, "pid", message.pid, 0, PID_MAX),
        uid=door.integer(at, "uid", message.uid, 0, limits.UID_MAX),
        user=door.long_text(at, "user", message.user, most=limits.NAME_CHARS_MAX),
        command=door.long_text(at, "command", message.command, most=_COMMAND_CHARS_MAX),
        memory_mib=door.integer(at, "memory_mib", message.memory_mib, 0, limits.GPU_MEMORY_MIB_MAX),
        cause=door.word(at, "cause", message.cause) if message.cause else "",
        lease_id=door.long_text(at, "lease_id", message.lease_id, most=limits.NAME_CHARS_MAX),
    )
