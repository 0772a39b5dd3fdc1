"""What a node has."""

from dataclasses import dataclass, field
from enum import StrEnum

from gpupool.model.ids import DeviceUuid, NodeId

NVSWITCH = "nvswitch"
"""What is at the other end of an NVLink that leads to a switch."""

FABRIC_COMPLETED = "completed"
FABRIC_STATES = ("not_supported", "not_started", "in_progress", FABRIC_COMPLETED)
"""States of a GPU's NVLink fabric, by NVML's number."""

UNKNOWN_GUID = "0" * 16
"""GUID of an adapter or port that does not tell it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU or MIG instance, identified by ``uuid`` and nothing else.

    ``memory_mib`` is the usable memory (total less reserved); None where the
    driver cannot say (unified memory). ``pci_address`` is its slot, ``pci_path``
    the bridges above it (see ``locality``), ``cpus`` the CPUs beside it as
    "0-55,112-167". ``fabric_state`` is one of FABRIC_STATES or empty (the driver
    cannot say); it can be used when it is completed and ``fabric_status`` (a return
    code of NVML) is 0, and only then ``nvlink_domain`` is set. ``nvlinks_expected``
    counts the links that the device has, ``nvlink_peers`` its active ones by what is
    at their other end: the PCI address of a GPU, or NVSWITCH. ``serial`` is the board's
    serial number, empty where the driver does not tell it.
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
    pci_path: str = ""
    cpus: str = ""
    fabric_state: str = ""
    fabric_status: int = 0
    cluster_uuid: str = ""
    clique_id: int = 0
    nvlinks_active: int = 0
    nvlinks_expected: int = 0
    nvlink_peers: dict[str, int] = field(default_factory=dict[str, int])
    serial: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HcaPort:
    """Port of a network adapter.

    ``state`` is the logical one ("ACTIVE"), ``phys_state`` that of the link
    ("LinkUp"). Rates are in Mb/s; ``expected_rate_mbps`` is what the port should run
    at, 0 where that is not known. ``width`` counts lanes, ``speed`` is the name of a
    lane's speed ("NDR"). ``rail`` is the plane of the fabric by position, from 0; None
    for a port that is not of the compute fabric.
    """

    number: int
    port_guid: str
    lid: int = 0
    sm_lid: int = 0
    state: str = ""
    rate_mbps: int = 0
    link_layer: str = "InfiniBand"
    phys_state: str = ""
    width: int = 0
    speed: str = ""
    expected_rate_mbps: int = 0
    rail: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hca:
    """Network adapter; identity is ``node_guid`` (16 hex digits).

    ``system_image_guid`` is the same for all adapters of one card; ``hca_type`` is the
    model ("MT4129"), ``board_id`` the exact product. ``bonded``: its port stands for
    several that the kernel has joined (RoCE LAG).
    """

    name: str
    node_guid: str
    pci_address: str = ""
    numa_node: int = -1
    ports: tuple[HcaPort, ...] = ()
    pci_path: str = ""
    system_image_guid: str = ""
    firmware: str = ""
    hca_type: str = ""
    board_id: str = ""
    bonded: bool = False


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


class StrayCause(StrEnum):
    """Why a process should not be on a device.

    It is of no lease; its lease has ended; its lease has other devices; it is of a slice
    and does not go through the slice's MPS server; it is of a slice that holds more
    memory than it was given.
    """

    NO_LEASE = "no_lease"
    OUTLIVED = "outlived"
    ELSEWHERE = "elsewhere"
    BESIDE_MPS = "beside_mps"
    OVER_MEMORY = "over_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrayProcess:
    """A process on a device that belongs to no assignment, or is outside its limits.

    Memory 0: unknown. ``cause`` is a word of StrayCause, of a later release, or empty:
    not told. ``lease_id`` is what it belongs, belonged or says to belong to.
    """

    pid: int
    uid: int = 0
    user: str = ""
    command: str = ""
    memory_mib: int = 0
    cause: str = ""
    lease_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node as it is stored: a node that never comes back is missed, not forgotten.

    ``missing`` and ``failed`` name devices of the inventory, ``faults`` codes with the device
    that each is about (None: the node): what history has said of them and not taken back.
    """

    node_id: NodeId
    boot_id: str
    agent_version: str
    inventory: NodeInventory
    missing: tuple[DeviceUuid, ...] = ()
    failed: tuple[DeviceUuid, ...] = ()
    faults: tuple[tuple[str, DeviceUuid | None], ...] = ()
