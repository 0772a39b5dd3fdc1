"""The openb cluster and its pods, read from the published files, as requests to a pool.

The protocol is the one the published results were made with: the pods are shuffled,
the list is extended by drawing from it with replacement, and pods are offered one by
one. How much has arrived is counted in requested thousandths of a GPU.
"""

import csv
import gzip
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpupool.model.ids import DeviceUuid
from gpupool.model.inventory import Device, NodeInventory
from gpupool.model.request import GpuSlice, Group, LeaseSpec, WholeGpus


@dataclass(frozen=True, slots=True)
class TraceNode:
    """One host: CPU in thousandths of a core, host memory in MiB."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str

    def inventory(self) -> NodeInventory:
        """As a node of the pool. The trace does not say how much memory its GPUs have."""
        devices = tuple(
            Device(uuid=DeviceUuid(f"GPU-{self.name}-{index}"), model=self.model, index=index)
            for index in range(self.gpus)
        )
        return NodeInventory(
            devices=devices, cpu_milli=self.cpu_milli, host_memory_mib=self.memory_mib
        )


@dataclass(frozen=True, slots=True)
class TracePod:
    """One pod; ``gpu_milli`` is per GPU, in thousandths of one."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    gpu_milli: int
    models: tuple[str, ...]

    @property
    def demand_milli(self) -> int:
        """Thousandths of a GPU that the pod asks for in all."""
        return self.gpus * self.gpu_milli

    def spec(self, uid: int = 1000) -> LeaseSpec:
        """As a request: a fraction of one GPU is a slice, in whole percent."""
        accelerator: WholeGpus | GpuSlice | None = None
        if self.gpus == 1 and self.gpu_milli < 1000:
            accelerator = GpuSlice(share_pct=-(-self.gpu_milli // 10))
        elif self.gpus:
            accelerator = WholeGpus(count=self.gpus)
        group = Group(
            accelerator=accelerator,
            models=self.models,
            cpu_milli=self.cpu_milli,
            host_memory_mib=self.memory_mib,
        )
        return LeaseSpec(groups=(group,), uid=uid)


def read_nodes(path: Path) -> list[TraceNode]:
    """Hosts in the order of the file."""
    with path.open(newline="") as lines:
        return [
            TraceNode(
                name=row["sn"],
                cpu_milli=int(row["cpu_milli"]),
                memory_mib=int(row["memory_mib"]),
                gpus=int(row["gpu"]),
                model=row["model"],
            )
            for row in csv.DictReader(lines)
        ]


def read_pods(path: Path) -> list[TracePod]:
    """Pods in the order of the file, which may be compressed."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", newline="") as lines:
        return [
            TracePod(
                name=row["name"],
                cpu_milli=int(row["cpu_milli"]),
                memory_mib=int(row["memory_mib"]),
                gpus=int(row["num_gpu"]),
                gpu_milli=int(row["gpu_milli"] or 0),
                models=tuple(
                    model.lower() for model in (row.get("gpu_spec") or "").split("|") if model
                ),
            )
            for row in csv.DictReader(lines)
        ]


def arrivals(
    pods: list[TracePod], capacity_milli: int, arrived_pct: int, seed: int
) -> list[TracePod]:
    """Shuffled pods until ``arrived_pct`` of the capacity was asked for."""
    draw = random.Random(seed)
    arrived: list[TracePod] = []
    demand_milli = 0
    for pod in _endless(pods, draw):
        if demand_milli * 100 >= capacity_milli * arrived_pct:
            break
        arrived.append(pod)
        demand_milli += pod.demand_milli
    return arrived


def _endless(pods: list[TracePod], draw: random.Random) -> Iterator[TracePod]:
    shuffled = list(pods)
    draw.shuffle(shuffled)
    yield from shuffled
    while True:
        yield draw.choice(pods)
