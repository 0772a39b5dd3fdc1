"""What a node has."""

from dataclasses import dataclass, field

from gpupool.model.ids import DeviceUuid, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU or MIG instance, identified by ``uuid`` and nothing else.

    ``memory_mib`` is the usable memory (total less reserved); None where the
    driver cannot say (unified memory). ``pci_address`` is its slot.
    """

    uuid: DeviceUuid
    model: str
    pci_address: str = ""
    memory_mib: int | None = None
    index: int = 0
    numa_node: int = -1
    nvlink_domain: str = ""
    sm_count: int = 0
    sliceable: bool = True
    parent_uuid: DeviceUuid | None = None
    compute_capability: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HcaPort:
    """Port of a network adapter; ``rate_mbps`` is in Mb/s."""

    number: int
    port_guid: str
    lid: int = 0
    sm_lid: int = 0
    state: str = ""
    rate_mbps: int = 0
    link_layer: str = "InfiniBand"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hca:
    """Network adapter; identity is ``node_guid`` (16 hex digits)."""

    name: str
    node_guid: str
    pci_address: str = ""
    numa_node: int = -1
    ports: tuple[HcaPort, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInventory:
    """Everything on a node that can be leased or matters for it.

    ``simulated`` is empty on real hardware, else the described machine.
    """

    devices: tuple[Device, ...] = ()
    hcas: tuple[Hca, ...] = ()
    cpu_milli: int = 0
    host_memory_mib: int = 0
    labels: dict[str, str] = field(default_factory=dict[str, str])
    simulated: str = ""
    driver_version: str = ""
    hostname: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrayProcess:
    """A process on a device that belongs to no assignment; memory 0: unknown."""

    pid: int
    uid: int = 0
    user: str = ""
    command: str = ""
    memory_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node as it is stored: a node that never comes back is missed, not forgotten."""

    node_id: NodeId
    boot_id: str
    agent_version: str
    inventory: NodeInventory
