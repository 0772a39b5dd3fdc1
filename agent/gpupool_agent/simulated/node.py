"""One simulated node's hardware as it is now: what its driver would find.

A node owns a directory: files of its GPU processes, and a /sys tree. Faults are
plain state here, set by the control socket and seen by the next driver call.
Every change replaces a tuple or one value, so that driver threads may read it
at any moment.
"""

import json
import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from gpupool_agent.simulated.gpu_processes import GpuProcess, GpuProcesses
from gpupool_agent.simulated.machine import (
    Machine,
    SlotDescription,
    cluster_uuid,
    gpu_uuid,
)

COMPUTE_MODE_DEFAULT = 0
_NO_CLUSTER = UUID(int=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FalseReadings:
    """What the driver says of a GPU instead of the truth; None: the truth.

    In bytes, 0 to 2^64-1: memory in use, all memory, memory of each process. ``utilization``
    is in percent.
    """

    used_bytes: int | None = None
    total_bytes: int | None = None
    process_bytes: int | None = None
    utilization: int | None = None


TRUTH = FalseReadings()


@dataclass(slots=True, kw_only=True)
class SimulatedGpu:
    """A GPU in a slot. ``lost``: fallen off the bus; ``active_links`` of its NVLinks.

    ``hidden``: in its slot, and not listed by the driver. ``false``: how the driver lies.
    """

    uuid: str
    slot: SlotDescription
    minor: int
    active_links: int
    lost: bool = False
    hidden: bool = False
    compute_mode: int = COMPUTE_MODE_DEFAULT
    false: FalseReadings = TRUTH


@dataclass(slots=True, kw_only=True)
class NvmlSession:
    """What one node's library has between init and shutdown.

    GPUs are enumerated at init: one that comes later is seen only by the next
    session, and the handles of an older session are void.
    """

    serial: int
    references: int
    gpus: tuple[SimulatedGpu, ...]


class UnknownGpuError(ValueError):
    """No GPU of the node has that UUID, slot or index."""


@dataclass(slots=True, kw_only=True)
class SimulatedNode:
    """A node: its machine, and what has happened to it since.

    ``fabric_state`` replaces the machine's where it is set; ``fabric_status`` is the
    return code of the fabric's start.
    """

    node_id: str
    machine: Machine
    directory: Path
    domain: str = ""
    clique: int = 1
    gpus: tuple[SimulatedGpu, ...] = ()
    processes: GpuProcesses = field(init=False)
    driver_loaded: bool = True
    answering: threading.Event = field(default_factory=threading.Event)
    session: NvmlSession | None = None
    sessions: int = 0
    silicon: int = 0
    fabric_state: str = ""
    fabric_status: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._lay_out()
        self.processes.create()
        self.write_gpus()

    def _lay_out(self) -> None:
        """Put every GPU into its slot; nothing is written."""
        self.answering.set()
        self.processes = GpuProcesses(self.directory / "gpu-processes")
        self.gpus = tuple(
            self._gpu_in(slot, minor)
            for minor, slot in enumerate(self.machine.slots)
            if minor < len(self.machine.slots) - self.machine.free_slots
        )

    def answer(self) -> None:
        """Return once the driver answers a call; it hangs while ``answering`` is not set."""
        if not self.answering.is_set():
            self.answering.wait()

    @property
    def cluster(self) -> UUID:
        """Cluster UUID of the NVLink domain; zero when the host is its own."""
        if not self.machine.fabric.multi_node:
            return _NO_CLUSTER
        # A tray that was given no domain is alone in its own.
        return cluster_uuid(self.domain or self.node_id)

    def find_gpu(self, name: str) -> SimulatedGpu:
        """Return the GPU with this UUID, PCI address or index. Raises UnknownGpuError."""
        for index, gpu in enumerate(self.gpus):
            if name in {gpu.uuid, gpu.slot.pci_address, str(index)}:
                return gpu
        raise UnknownGpuError(
            f"gpu {name!r} is not on node {self.node_id}; accepted are 0 to {len(self.gpus) - 1},"
            f" a UUID or a PCI address"
        )

    def processes_on(self, gpu: SimulatedGpu) -> list[GpuProcess]:
        """Living processes on one GPU."""
        return [process for process in self.processes.list() if gpu.uuid in process.uuids]

    def used_mib(self, gpu: SimulatedGpu) -> int:
        """Memory in use on a GPU: what processes hold and what the driver needs idle."""
        held = sum(process.memory_mib for process in self.processes_on(gpu))
        return self.machine.gpu.memory_idle_mib + held

    def usable_mib(self) -> int | None:
        """Memory of one GPU that processes can get; None where it is the host's."""
        total = self.machine.gpu.memory_total_mib
        return None if total is None else total - self.machine.gpu.memory_reserved_mib

    def open_session(self) -> None:
        """Open an NVML session, or count one more user of it."""
        with self.lock:
            if self.session is None:
                self.sessions += 1
                gpus = tuple(gpu for gpu in self.gpus if not gpu.hidden)
                gpus = gpus if self.driver_loaded else ()
                self.session = NvmlSession(serial=self.sessions, references=1, gpus=gpus)
            else:
                self.session.references += 1

    def close_session(self) -> bool:
        """Count one user less; False when there was none."""
        with self.lock:
            if self.session is None:
                return False
            self.session.references -= 1
            if self.session.references == 0:
                self.session = None
            return True

    def unload_driver(self) -> None:
        """Have no devices until ``load_driver``; sessions that are open stay empty."""
        with self.lock:
            self.driver_loaded = False
            if self.session is not None:
                self.session.gpus = ()
        self.write_gpus()

    def load_driver(self) -> None:
        """Have the devices back, for new sessions."""
        self.driver_loaded = True
        self.write_gpus()

    def set_lost(self, gpu: SimulatedGpu, *, lost: bool) -> None:
        """Have a GPU fall off the bus, or be back."""
        gpu.lost = lost
        self.write_gpus()

    def set_hidden(self, gpu: SimulatedGpu, *, hidden: bool) -> None:
        """Have the driver list a GPU no more, from the next session on, or list it again."""
        gpu.hidden = hidden
        self.write_gpus()

    def set_false(self, gpu: SimulatedGpu, readings: FalseReadings) -> None:
        """Have the driver lie about a GPU, or tell the truth again."""
        gpu.false = readings

    def set_compute_mode(self, gpu: SimulatedGpu, mode: int) -> None:
        """Say who may make contexts on a GPU; the number is NVML's."""
        gpu.compute_mode = mode
        self.write_gpus()

    def remove_gpu(self, gpu: SimulatedGpu) -> None:
        """Pull a GPU: it answers no more, and is missing from the next session on."""
        gpu.lost = True
        self.gpus = tuple(other for other in self.gpus if other is not gpu)
        self.write_gpus()

    def add_gpu(self, pci_address: str) -> SimulatedGpu:
        """Put new silicon into a free slot. Raises UnknownGpuError when it is not free."""
        slots = {slot.pci_address: slot for slot in self.machine.slots}
        taken = {gpu.slot.pci_address for gpu in self.gpus}
        free = [address for address in slots if address not in taken]
        if pci_address not in free:
            raise UnknownGpuError(
                f"slot {pci_address!r} of node {self.node_id} is not free; accepted are"
                f" {', '.join(free) or 'none, every slot is taken'}"
            )
        self.silicon += 1
        order = list(slots)
        gpu = self._gpu_in(slots[pci_address], order.index(pci_address), self.silicon)
        self.gpus = tuple(
            sorted((*self.gpus, gpu), key=lambda each: order.index(each.slot.pci_address))
        )
        self.write_gpus()
        return gpu

    def write_gpus(self) -> None:
        """Tell CUDA clients, which are other processes, what they can use.

        One row a working GPU, in the driver's order: its UUID and the memory that
        clients can get of it in MiB, null where it is the host's, its multiprocessors
        and its compute mode.
        """
        usable_mib = self.usable_mib()
        rows = [
            {
                "uuid": gpu.uuid,
                "usable_mib": usable_mib,
                "sm_count": self.machine.gpu.sm_count or 0,
                "compute_mode": gpu.compute_mode,
            }
            for gpu in self.gpus
            if self.driver_loaded and not gpu.lost and not gpu.hidden
        ]
        temporary = self.directory / "gpus.json.new"
        temporary.write_text(json.dumps(rows))
        temporary.chmod(0o644)
        temporary.replace(self.directory / "gpus.json")

    def _gpu_in(self, slot: SlotDescription, minor: int, silicon: int = 0) -> SimulatedGpu:
        return SimulatedGpu(
            uuid=gpu_uuid(self.node_id, slot, silicon),
            slot=slot,
            minor=minor,
            active_links=self.machine.gpu.nvlinks,
        )


CURRENT_NODE: ContextVar[SimulatedNode | None] = ContextVar("current_node", default=None)
"""The node whose driver the calling code meets; None: a host without a driver."""
