"""Which nodes a fleet has: read from its command line or from a trace's host list."""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpupool_agent.simulated.machine import (
    Machine,
    MachineError,
    custom_machine,
    load_machine,
)

NODES_MAX = 20_000
TRAYS_PER_DOMAIN = 18
"""Compute trays of one NVL72 rack, the NVLink domain that ``--count`` makes of trays."""

# Usable memory of the models that the openb trace names, in MiB; it does not say
# what stands behind G1, G2 and G3.
_TRACE_MEMORY_MIB = {
    "A10": 24576,
    "P100": 16384,
    "T4": 16384,
    "V100M16": 16384,
    "V100M32": 32768,
}
_NODE_ID = re.compile(r"[A-Za-z0-9._-]{1,253}")
_CUSTOM = "custom"
_CUSTOM_KEYS = ("model", "gpus", "memory_mib", "cpu_milli", "host_memory_mib")


class SpecError(ValueError):
    """A node description that is not valid; says what is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A node to simulate. ``domain`` names the NVLink domain that its tray is in."""

    node_id: str
    machine: Machine
    domain: str = ""
    clique: int = 1
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


def parse_node(text: str) -> NodeSpec:
    """Read ``KIND:NODE_ID[,domain=D][,clique=N][,label.KEY=VALUE]``.

    KIND "custom" also takes model, gpus, memory_mib (or "unknown"), cpu_milli,
    host_memory_mib and free_slots. Raises SpecError.
    """
    head, *options = text.split(",")
    kind, colon, node_id = head.partition(":")
    if not colon:
        raise SpecError(f"node {text!r} is not KIND:NODE_ID")
    if not _NODE_ID.fullmatch(node_id):
        raise SpecError(
            f"node id {node_id!r} in {text!r}: accepted are 1 to 253 of a-z A-Z 0-9 - _ ."
        )
    values = _options(text, options)
    labels = {
        key.removeprefix("label."): values.pop(key)
        for key in sorted(values)
        if key.startswith("label.")
    }
    domain = values.pop("domain", "")
    clique = _whole("clique", values.pop("clique", "1"), 0, 0xFFFFFFFF)
    machine = _machine(kind, values)
    if values:
        raise SpecError(f"{min(values)!r} in {text!r} is no option of a {kind}")
    return NodeSpec(node_id=node_id, machine=machine, domain=domain, clique=clique, labels=labels)


def parse_count(text: str) -> list[NodeSpec]:
    """Read ``KIND=COUNT``: nodes KIND-0000, KIND-0001, ...; trays fill domains in turn."""
    kind, equals, count = text.partition("=")
    if not equals:
        raise SpecError(f"count {text!r} is not KIND=COUNT")
    machine = _machine(kind, {})
    return [
        NodeSpec(
            node_id=f"{kind}-{number:04d}",
            machine=machine,
            domain=f"{kind}-nvl-{number // TRAYS_PER_DOMAIN}" if machine.fabric.multi_node else "",
        )
        for number in range(_whole("count", count, 1, NODES_MAX))
    ]


def read_nodes_csv(path: Path) -> list[NodeSpec]:
    """Read a trace's hosts: columns sn, cpu_milli, memory_mib, gpu, model (openb).

    ``memory_mib`` is the host's. Raises SpecError naming the line.
    """
    specs: list[NodeSpec] = []
    machines: dict[tuple[str, ...], Machine] = {}
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                key = (row["model"], row["gpu"], row["cpu_milli"], row["memory_mib"])
                if key not in machines:
                    machines[key] = _trace_machine(*key)
                specs.append(NodeSpec(node_id=row["sn"], machine=machines[key]))
            except (KeyError, TypeError, ValueError) as error:
                raise SpecError(f"{path}, line {number}: {error}") from error
            if len(specs) > NODES_MAX:
                raise SpecError(f"{path} has more than {NODES_MAX} nodes")
    return specs


def checked(specs: list[NodeSpec]) -> list[NodeSpec]:
    """Return the nodes. Raises SpecError when there are none, too many, or twins."""
    if not 1 <= len(specs) <= NODES_MAX:
        raise SpecError(f"{len(specs)} nodes; accepted are 1 to {NODES_MAX}")
    seen: set[str] = set()
    for spec in specs:
        if spec.node_id in seen:
            raise SpecError(f"node id {spec.node_id!r} is there twice")
        seen.add(spec.node_id)
    return specs


def _trace_machine(model: str, gpus: str, cpu_milli: str, host_memory_mib: str) -> Machine:
    return custom_machine(
        model=model or "none",
        gpus=int(gpus),
        memory_mib=_TRACE_MEMORY_MIB.get(model),
        cpu_milli=int(cpu_milli),
        host_memory_mib=int(host_memory_mib),
    )


def _machine(kind: str, values: dict[str, str]) -> Machine:
    try:
        if kind != _CUSTOM:
            return load_machine(kind)
        missing = [key for key in _CUSTOM_KEYS if key not in values]
        if missing:
            raise SpecError(f"a custom node needs {missing[0]}")
        memory = values.pop("memory_mib")
        return custom_machine(
            model=values.pop("model"),
            gpus=_whole("gpus", values.pop("gpus"), 0, 256),
            memory_mib=None if memory == "unknown" else _whole("memory_mib", memory, 1, 1 << 24),
            cpu_milli=_whole("cpu_milli", values.pop("cpu_milli"), 0, 1 << 30),
            host_memory_mib=_whole("host_memory_mib", values.pop("host_memory_mib"), 0, 1 << 30),
            free_slots=_whole("free_slots", values.pop("free_slots", "0"), 0, 255),
        )
    except MachineError as error:
        raise SpecError(str(error)) from error


def _options(text: str, options: list[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key in values:
            raise SpecError(f"{option!r} in {text!r} is not KEY=VALUE, once a key")
        values[key] = value
    return values


def _whole(key: str, text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise SpecError(f"{key} is {text!r}; accepted are {low} to {high}")
    return int(text)
