"""Described machines: what a kind of host has, as data.

The descriptions are TOML files beside this module. Identities (UUIDs, GUIDs)
are not in them: they follow from a node's id, so that a node that is started
again is the same hardware.
"""

import hashlib
import re
import tomllib
import uuid
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from typing import Any, TypeVar, cast, get_type_hints

from gpupool.model.limits import (
    CPU_MILLI_MAX,
    DEVICES_PER_NODE_MAX,
    GPU_MEMORY_MIB_MAX,
    HOST_MEMORY_MIB_MAX,
)

_NAMESPACE = uuid.UUID("6b1d7c1e-6f6c-5d1c-9a55-0f6a3f1d2c4b")
_UNKNOWN = "unknown"
_BRIDGES = re.compile(
    r"pci[0-9a-f]{4}:[0-9a-f]{2}(?:/[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])*"
).fullmatch
_FOLDER = resources.files("gpupool_agent.simulated") / "machines"
FABRIC_STATES = {"not_supported": 0, "not_started": 1, "in_progress": 2, "completed": 3}
"""Names of NVML's fabric states and their numbers."""

_Table = TypeVar("_Table")


class MachineError(ValueError):
    """A machine or node description that is not valid; names the key and the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """What all GPUs of a machine have in common.

    ``memory_total_mib`` None: the driver gives no size (unified memory).
    ``memory_reserved_mib`` is kept by the driver; ``memory_idle_mib`` counts as used
    with no process there. ``sm_count`` None: not told.
    """

    name: str
    memory_total_mib: int | None
    memory_reserved_mib: int = 0
    memory_idle_mib: int = 0
    compute_capability: str = "8.0"
    sm_count: int | None = None
    cores_per_sm: int = 128
    nvlinks: int = 0
    ecc: bool = False
    mig_capable: bool = False
    power_idle_mw: int = 30_000
    power_limit_mw: int = 300_000
    temperature_idle_c: int = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricDescription:
    """NVLink fabric: one of FABRIC_STATES; multi_node: the domain spans hosts."""

    state: str = "not_supported"
    multi_node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDescription:
    """Place of a GPU. ``memory_numa_node``: its own memory is a NUMA node (Grace).

    ``bridges`` are those above it, as in ``gpupool.model.locality``; empty: a slot at a
    root complex of its own.
    """

    pci_address: str
    bridges: str = ""
    numa_node: int = -1
    memory_numa_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HcaDescription:
    """A network adapter with one port; ``rate_gbps`` in Gb/s, ``bridges`` as of a slot."""

    name: str
    pci_address: str
    rate_gbps: int
    bridges: str = ""
    numa_node: int = -1
    link_layer: str = "InfiniBand"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A kind of host. ``missing_symbols``: NVML calls that its driver lacks.

    The last ``free_slots`` of its slots have no GPU yet.
    """

    name: str
    driver_version: str
    cuda_driver_version: int
    cpu_milli: int
    host_memory_mib: int
    gpu: GpuModel
    fabric: FabricDescription
    slots: tuple[SlotDescription, ...]
    hcas: tuple[HcaDescription, ...] = ()
    missing_symbols: frozenset[str] = frozenset()
    free_slots: int = 0


def machine_names() -> list[str]:
    """Names of the described machines, sorted."""
    return sorted(file.name[:-5] for file in _FOLDER.iterdir() if file.name.endswith(".toml"))


def load_machine(name: str) -> Machine:
    """Read one described machine. Raises MachineError when there is none of that name."""
    names = machine_names()
    if name not in names:
        raise MachineError(f"machine {name!r} is not described; there are {', '.join(names)}")
    return parse_machine((_FOLDER / f"{name}.toml").read_text())


def parse_machine(text: str) -> Machine:
    """Read a description in TOML. Raises MachineError naming the key that is wrong."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MachineError(f"machine description is not TOML: {error}") from error
    plain = {k: v for k, v in table.items() if k not in {"gpu", "fabric", "slot", "hca"}}
    plain["gpu"] = _read(GpuModel, _as_table(table.get("gpu", {}), "gpu"), "gpu")
    plain["fabric"] = _read(
        FabricDescription, _as_table(table.get("fabric", {}), "fabric"), "fabric"
    )
    plain["slots"] = _read_all(SlotDescription, table.get("slot", []), "slot")
    plain["hcas"] = _read_all(HcaDescription, table.get("hca", []), "hca")
    plain["missing_symbols"] = frozenset(plain.get("missing_symbols", []))
    return validated(_read(Machine, plain, "machine"))


def custom_machine(
    *,
    model: str,
    gpus: int,
    memory_mib: int | None,
    cpu_milli: int,
    host_memory_mib: int,
    free_slots: int = 0,
) -> Machine:
    """A host of a trace: ``gpus`` GPUs called ``model``, no fabric, no adapters.

    ``memory_mib`` is the usable memory of each GPU, None where the trace does not say.
    ``free_slots`` are beside the GPUs.
    """
    return validated(
        Machine(
            name="custom",
            driver_version="550.163.01",
            cuda_driver_version=12040,
            cpu_milli=cpu_milli,
            host_memory_mib=host_memory_mib,
            gpu=GpuModel(name=model, memory_total_mib=memory_mib),
            fabric=FabricDescription(),
            slots=tuple(
                SlotDescription(pci_address=f"0000:{bus:02x}:00.0")
                for bus in range(1, gpus + free_slots + 1)
            ),
            free_slots=free_slots,
        )
    )


def validated(machine: Machine) -> Machine:
    """Return the machine. Raises MachineError for values out of range."""
    gpu = machine.gpu
    _in_range("cpu_milli", machine.cpu_milli, 0, CPU_MILLI_MAX)
    _in_range("host_memory_mib", machine.host_memory_mib, 0, HOST_MEMORY_MIB_MAX)
    _in_range("number of slots", len(machine.slots), 0, DEVICES_PER_NODE_MAX)
    _in_range("gpu.nvlinks", gpu.nvlinks, 0, 36)
    if gpu.memory_total_mib is not None:
        _in_range("gpu.memory_total_mib", gpu.memory_total_mib, 1, GPU_MEMORY_MIB_MAX)
        taken = gpu.memory_reserved_mib + gpu.memory_idle_mib
        _in_range("gpu.memory_reserved_mib + memory_idle_mib", taken, 0, gpu.memory_total_mib)
    _in_range("free_slots", machine.free_slots, 0, len(machine.slots))
    if not gpu.name:
        raise MachineError("gpu.name is empty; 1 to 95 characters are accepted")
    if machine.fabric.state not in FABRIC_STATES:
        raise MachineError(
            f"fabric.state {machine.fabric.state!r} is not one of {', '.join(FABRIC_STATES)}"
        )
    addresses = [slot.pci_address for slot in machine.slots]
    if len(set(addresses)) != len(addresses):
        raise MachineError("slot.pci_address: two slots have the same address")
    places: list[SlotDescription | HcaDescription] = [*machine.slots, *machine.hcas]
    for place in places:
        if place.bridges and not _BRIDGES(place.bridges):
            raise MachineError(
                f"bridges {place.bridges!r} of {place.pci_address} are not accepted; they must be"
                f' like "pci0000:15/0000:15:01.0", root first'
            )
    return machine


def gpu_uuid(node_id: str, slot: SlotDescription, silicon: int = 0) -> str:
    """UUID of the GPU in a slot; ``silicon`` counts the GPUs that it has held."""
    return f"GPU-{uuid.uuid5(_NAMESPACE, f'{node_id}/gpu/{slot.pci_address}/{silicon}')}"


def hca_guid(node_id: str, hca: HcaDescription) -> str:
    """Node GUID of an adapter, 16 hex digits."""
    digest = hashlib.sha256(f"{node_id}/hca/{hca.pci_address}".encode()).hexdigest()
    return f"b83fd2{digest[:10]}"


def cluster_uuid(domain: str) -> uuid.UUID:
    """Cluster UUID of an NVLink domain that spans hosts."""
    return uuid.uuid5(_NAMESPACE, f"nvlink-domain/{domain}")


def _in_range(key: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise MachineError(f"{key} is {value}; accepted are {low} to {high}")


def _as_table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise MachineError(f"{where} is {value!r}; accepted is a table")
    return cast("dict[str, Any]", value)


def _read_all(kind: type[_Table], value: Any, where: str) -> tuple[_Table, ...]:
    if not isinstance(value, list):
        raise MachineError(f"{where} is {value!r}; accepted is a list of tables")
    rows = cast("list[object]", value)
    tables: list[_Table] = []
    for index, row in enumerate(rows):
        tables.append(_read(kind, _as_table(row, f"{where}[{index}]"), f"{where}[{index}]"))
    return tuple(tables)


def _read(kind: type[_Table], table: Mapping[str, Any], where: str) -> _Table:
    hints = get_type_hints(kind)
    unknown = sorted(set(table) - set(hints))
    if unknown:
        raise MachineError(f"{where}.{unknown[0]} is no key; keys are {', '.join(sorted(hints))}")
    missing = [
        f.name
        for f in fields(cast("Any", kind))
        if f.default is MISSING and f.default_factory is MISSING and f.name not in table
    ]
    if missing:
        raise MachineError(f"{where}.{missing[0]} is missing")
    return kind(
        **{key: _checked(value, hints[key], f"{where}.{key}") for key, value in table.items()}
    )


def _checked(value: Any, hint: Any, where: str) -> Any:
    if hint == (int | None) and value == _UNKNOWN:
        return None
    for kind, word in ((bool, "true or false"), (int, "a whole number"), (str, "text")):
        if hint == kind or hint == (kind | None):
            if type(value) is not kind:
                raise MachineError(f"{where} is {value!r}; accepted is {word}")
            return value
    return value
