"""A simulated host: its hardware, its agent, and the way between it and the allocators."""

import asyncio
import contextlib
import contextvars
import os
import shutil
import signal
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio

from gpupool_agent.agent import Agent
from gpupool_agent.devices.blocking import BlockingCalls, CallThreads
from gpupool_agent.devices.cdi import CdiDirectory
from gpupool_agent.devices.hca import SysfsHcaReader
from gpupool_agent.devices.interfaces import Adapters, HostFacts
from gpupool_agent.devices.nvml import NvmlDriver
from gpupool_agent.devices.processes import ProcProcessTable
from gpupool_agent.link import dial
from gpupool_agent.settings import AgentSettings
from gpupool_agent.simulated.directory import ControlDirectory
from gpupool_agent.simulated.driver_calls import SimulatedDriverCalls
from gpupool_agent.simulated.gate import Gate
from gpupool_agent.simulated.gpu_processes import start_ticks_of
from gpupool_agent.simulated.mps import SimulatedMps
from gpupool_agent.simulated.mps_programs import end_daemons, mps_daemons, mps_directory
from gpupool_agent.simulated.node import COMPUTE_MODE_DEFAULT, CURRENT_NODE, SimulatedNode
from gpupool_agent.simulated.privileged import SimulatedPrivileged
from gpupool_agent.simulated.specs import NodeSpec
from gpupool_agent.simulated.strays import Strays
from gpupool_agent.simulated.sysfs import sysfs_root, write_sysfs

CDI_FOLDER = "cdi"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedHostReader:
    """``HostReader`` of a described machine."""

    facts: HostFacts

    def read(self) -> HostFacts:
        """Give what is described."""
        return self.facts


class SimulatedHost:
    """One host of a fleet. ``settings`` are its agent's; the node id is the spec's.

    ``directory`` is the hardware: boot id, GPU processes, /sys, MPS. It outlives the
    agent, and a fleet that is started on it again is the same boot. ``pci_trees`` holds
    what hosts of one machine have in common. The hosts of a fleet share ``threads``.
    ``mps_programs``: slices have real daemons of the control program's stand-in.
    ``helper``: its agent has a root helper, and so ends what leases leave behind.
    """

    def __init__(
        self,
        spec: NodeSpec,
        directory: Path,
        pci_trees: Path,
        settings: AgentSettings,
        threads: CallThreads | None = None,
        *,
        mps_programs: bool = False,
        helper: bool = False,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # Holders of any user look for their node here.
        directory.chmod(0o755)
        self.settings = settings
        self.node = SimulatedNode(
            node_id=spec.node_id,
            machine=spec.machine,
            directory=directory,
            domain=spec.domain,
            clique=spec.clique,
        )
        self.strays = Strays(directory)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pci_trees = pci_trees
        self._threads = threads or CallThreads()
        self._boot_id_file = directory / "boot-id"
        self._mps_programs = mps_programs
        self._helper = helper
        self._mps = SimulatedMps(directory / "mps")
        self._gates: dict[str, Gate] = {}
        self._agent: Agent | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether an allocator has welcomed the agent and still speaks with it."""
        return self._agent is not None and self._agent.link.welcome is not None

    async def start(self) -> None:
        """Switch it on: hardware as described, network whole, agent running."""
        write_sysfs(self.node, self._pci_trees)
        if not self._boot_id_file.exists():
            self._new_boot_id()
        for address in self.settings.allocators:
            self._gates[address] = await Gate.open(address)
        self._start_agent()

    async def stop(self) -> None:
        """Stop its agent and its strays; what runs under leases goes on."""
        # A hung driver would keep its thread, and with it this process, for ever.
        self.node.answering.set()
        await self._stop_agent()
        await self.strays.clear()
        for gate in self._gates.values():
            await gate.close()
        self._gates.clear()

    async def restart_agent(self) -> None:
        """Stop the agent and start it again: an upgrade."""
        await self._stop_agent()
        self._start_agent()

    async def reboot(self) -> str:
        """End every process on its GPUs, begin a new boot; returns the new boot id."""
        await self._stop_agent()
        await self.strays.clear()
        for process in self.node.processes.list():
            if start_ticks_of(process.pid) == process.start_ticks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        if self._mps_programs:
            await end_daemons(self.node)
            for gpu in self.node.gpus:
                self.node.set_compute_mode(gpu, COMPUTE_MODE_DEFAULT)
        # What is below /run is gone with the boot.
        for folder in ("mps", CDI_FOLDER):
            shutil.rmtree(self.node.directory / folder, ignore_errors=True)
        self._mps = SimulatedMps(self.node.directory / "mps")
        boot_id = self._new_boot_id()
        self._start_agent()
        return boot_id

    def cut_off(self) -> None:
        """Let nothing through between it and the allocators."""
        for gate in self._gates.values():
            gate.cut()

    def reconnect(self) -> None:
        """Let everything through again."""
        for gate in self._gates.values():
            gate.mend()

    def show(self) -> dict[str, Any]:
        """What it has and how it is, for people and tests."""
        node = self.node
        return {
            "machine": node.machine.name,
            "directory": str(node.directory),
            "socket": str(self.settings.socket) if self.settings.socket else None,
            "boot_id": self._boot_id_file.read_text(),
            "connected": self.connected,
            "cut_off": any(gate.is_cut for gate in self._gates.values()),
            "nvml_hangs": not node.answering.is_set(),
            "driver_loaded": node.driver_loaded,
            "gpus": [
                {
                    "uuid": gpu.uuid,
                    "pci_address": gpu.slot.pci_address,
                    "lost": gpu.lost,
                    "compute_mode": gpu.compute_mode,
                    "used_mib": node.used_mib(gpu),
                    "pids": [process.pid for process in node.processes_on(gpu)],
                }
                for gpu in node.gpus
            ],
        }

    def assignments(self) -> list[dict[str, Any]]:
        """What its agent runs, as the agent's own books have it; nothing without an agent."""
        if self._agent is None:
            return []
        return [
            {
                "lease_id": report.key.lease_id,
                "rank": report.key.rank,
                "token": report.token,
                "state": report.state.value,
                "uid": report.uid,
                "place": asdict(report.place) if report.place is not None else None,
            }
            for report in self._agent.node.assignments()
        ]

    def _start_agent(self) -> None:
        # Driver calls find their node in the context that the agent is made in.
        context = contextvars.copy_context()
        context.run(CURRENT_NODE.set, self.node)
        self._agent = context.run(lambda: Agent(self.settings, self._adapters()))
        self._running = asyncio.get_running_loop().create_task(self._agent.run(), context=context)
        self._running.add_done_callback(self._agent_ended)

    async def _stop_agent(self) -> None:
        running, self._running, self._agent = self._running, None, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _agent_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self.failed.done():
            return
        error = task.exception() or RuntimeError("the agent ended by itself")
        self.failed.set_exception(error)

    def _adapters(self) -> Adapters:
        machine = self.node.machine
        boot_id = self._boot_id_file.read_text()
        return Adapters(
            driver=NvmlDriver(sysfs_root(self.node)),
            mps=mps_daemons(self.node, boot_id) if self._mps_programs else self._mps,
            hcas=SysfsHcaReader(sysfs_root(self.node)),
            host=SimulatedHostReader(
                facts=HostFacts(
                    hostname=self.node.node_id,
                    boot_id=boot_id,
                    cpu_milli=machine.cpu_milli,
                    host_memory_mib=machine.host_memory_mib,
                    simulated=machine.name,
                )
            ),
            processes=ProcProcessTable(),
            dial=self._dial,
            driver_calls=SimulatedDriverCalls(self.node, self._threads),
            disk_calls=BlockingCalls("disk", self._threads),
            cdi=CdiDirectory(self.settings.cdi_dir) if self.settings.cdi_dir else None,
            # The one that sites make where the NVLink domain spans hosts.
            imex_channels=lambda: (0,) if machine.fabric.multi_node else (),
            privileged=(
                SimulatedPrivileged(self.node, mps_directory(self.node)) if self._helper else None
            ),
        )

    def _dial(self, address: str) -> grpc.aio.Channel:
        return dial(self._gates[address].address)

    def _new_boot_id(self) -> str:
        boot_id = str(uuid.uuid4())
        temporary = self._boot_id_file.with_suffix(".new")
        temporary.write_text(boot_id)
        temporary.replace(self._boot_id_file)
        return boot_id


def make_hosts(
    specs: Sequence[NodeSpec],
    common: AgentSettings,
    *,
    hardware: ControlDirectory,
    state_directory: Path | None,
    socket_directory: Path | None,
    cdi: bool = False,
    mps_programs: bool = False,
    helper: bool = False,
) -> list[SimulatedHost]:
    """Make the hosts of a fleet, not yet started; ``common`` is what agents share.

    Without a ``state_directory`` agents forget everything when they restart; without
    a ``socket_directory`` they have no socket for local clients. ``cdi``: they write CDI
    specs beside their hardware. ``helper`` is as in SimulatedHost. Raises SettingsError.
    """
    hosts: list[SimulatedHost] = []
    threads = CallThreads()
    for spec in specs:
        directory = hardware.nodes / spec.node_id
        settings = replace(
            common,
            node_id=spec.node_id,
            state_dir=state_directory / spec.node_id if state_directory else None,
            socket=socket_directory / f"{spec.node_id}.sock" if socket_directory else None,
            run_dir=directory,
            cdi_dir=directory / CDI_FOLDER if cdi else None,
            labels=spec.labels,
            metrics_port=-1,
        )
        hosts.append(
            SimulatedHost(
                spec,
                directory,
                hardware.pci_trees,
                settings,
                threads,
                mps_programs=mps_programs,
                helper=helper,
            )
        )
    return hosts
