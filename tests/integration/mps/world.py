"""A simulated node whose MPS is programs: daemons, servers and clients are processes."""

import asyncio
import contextvars
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gpupool.model.assignment import AssignmentKey
from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool_agent.devices.interfaces import SliceLimits
from gpupool_agent.devices.mps_daemons.daemons import MpsDaemons
from gpupool_agent.devices.mps_daemons.foreign import MpsProcess, mps_processes
from gpupool_agent.devices.mps_daemons.modes import NvmlComputeModes
from gpupool_agent.devices.mps_daemons.records import slot_name
from gpupool_agent.devices.processes import ProcProcessTable
from gpupool_agent.simulated.machine import load_machine
from gpupool_agent.simulated.mps_control.host import FAULTS_FILE
from gpupool_agent.simulated.node import CURRENT_NODE, SimulatedNode
from gpupool_agent.simulated.nvml_library import install
from gpupool_agent.simulated.privileged import SimulatedPrivileged

DEADLINE_S = 20.0
EXCLUSIVE_PROCESS = 3
SM_COUNT = 132
USER_UID = os.getuid()


def limits(
    lease: str, share_pct: int, memory_mib: int = 1000, *, uid: int = USER_UID, token: int = 1
) -> SliceLimits:
    """A slice of a lease of its own."""
    return SliceLimits(
        key=AssignmentKey(lease_id=LeaseId(lease), rank=0),
        token=token,
        uid=uid,
        share_pct=share_pct,
        memory_mib=memory_mib,
        sm_count=SM_COUNT,
    )


class World:
    """The node, the daemons' keeper and what it told, and clients under leases."""

    def __init__(self, directory: Path) -> None:
        install()
        # Other tests have daemons on this machine, and must have other GPUs.
        self.node = SimulatedNode(
            node_id=directory.name, machine=load_machine("dgx-h100"), directory=directory
        )
        self.mps_dir = directory / "mps"
        self.privileged = SimulatedPrivileged(self.node, self.mps_dir)
        self.told: list[tuple[DeviceUuid, str]] = []
        self.gpus = [DeviceUuid(gpu.uuid) for gpu in self.node.gpus]
        self._clients: list[subprocess.Popen[str]] = []
        self._watch: asyncio.Task[None] | None = None
        self.daemons = self.make()

    def make(self, *, boot_id: str = "boot-1", exclusive: bool = True) -> MpsDaemons:
        """A keeper, as an agent that has just started makes it."""
        context = contextvars.copy_context()
        context.run(CURRENT_NODE.set, self.node)
        return context.run(
            lambda: MpsDaemons(
                privileged=self.privileged,
                modes=NvmlComputeModes(),
                processes=ProcProcessTable(),
                records_dir=self.node.directory / "records",
                boot_id=boot_id,
                exclusive=exclusive,
            )
        )

    def watch(self) -> None:
        """Have the keeper look after its daemons."""
        self._watch = asyncio.create_task(
            self.daemons.watch(lambda: self.gpus, lambda gpu, why: self.told.append((gpu, why)))
        )

    async def admit(self, gpu: DeviceUuid, slice_limits: SliceLimits) -> dict[str, str]:
        """All that preparing a slice does; its environment."""
        await self.daemons.start(gpu, slice_limits.uid)
        environment = await self.daemons.set_limits(gpu, slice_limits)
        await self.daemons.probe(gpu, slice_limits)
        return environment

    async def dismiss(self, gpu: DeviceUuid, slice_limits: SliceLimits) -> None:
        """All that cleaning a slice up does."""
        await self.daemons.remove_limits(gpu, slice_limits.key, slice_limits.token)
        if not (await self.daemons.status(gpu)).slices:
            await self.daemons.stop(gpu)
            assert await self.daemons.verify(gpu) == ""

    def client(
        self, gpu: DeviceUuid, lease: str, environment: dict[str, str], *flags: str
    ) -> subprocess.Popen[str]:
        """Start a CUDA client under a lease."""
        client = subprocess.Popen(
            [sys.executable, "-m", "gpupool_agent.simulated.cuda_client", *flags],
            env={
                "PATH": os.environ["PATH"],
                "GPUPOOL_SIMULATED_NODE": str(self.node.directory),
                "GPUPOOL_LEASE_ID": lease,
                "CUDA_VISIBLE_DEVICES": gpu,
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._clients.append(client)
        return client

    async def hold(
        self, gpu: DeviceUuid, lease: str, environment: dict[str, str], *flags: str
    ) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """Start one and wait until it holds its memory."""
        client = self.client(gpu, lease, environment, *flags)
        assert client.stdout is not None
        line = await asyncio.to_thread(client.stdout.readline)
        assert line, client.communicate()[1]
        return client, json.loads(line)

    async def ended(self, client: subprocess.Popen[str]) -> int:
        """Wait for a client's end; its exit code."""
        return await asyncio.to_thread(client.wait, DEADLINE_S)

    async def ask(self, gpu: DeviceUuid, *lines: str) -> list[str]:
        """Give commands to a GPU's daemon."""
        outcome = await self.privileged.mps_commands(slot_name(gpu), lines)
        assert outcome.exit_code == 0, outcome
        return outcome.output.splitlines()

    async def daemon_pid(self, gpu: DeviceUuid) -> int:
        """Process of a GPU's daemon."""
        daemon = await self.privileged.mps_daemon(slot_name(gpu))
        assert daemon is not None
        return daemon.pid

    async def server_pid(self, gpu: DeviceUuid) -> int:
        """Process of a GPU's server."""
        (server,) = await self.ask(gpu, "get_server_list")
        return int(server)

    def inject(self, text: str) -> None:
        """Faults of the node's daemons; empty: none."""
        (self.node.directory / FAULTS_FILE).write_text(text)

    def forget(self) -> None:
        """Lose what the keeper has written down."""
        shutil.rmtree(self.node.directory / "records")

    def left(self) -> list[str]:
        """What of MPS is on the node: processes, directories, records, modes."""
        own = [
            f"process {each.pid}"
            for each in mps_processes(Path("/proc"))
            if str(self.node.directory)
            in (each.environment or {}).get("CUDA_MPS_PIPE_DIRECTORY", "")
        ]
        files = [str(path) for path in self.mps_dir.glob("*")]
        records = [str(path) for path in (self.node.directory / "records").glob("*")]
        modes = [gpu.uuid for gpu in self.node.gpus if gpu.compute_mode]
        return own + files + records + modes

    def _owns(self, process: MpsProcess) -> bool:
        pipe = (process.environment or {}).get("CUDA_MPS_PIPE_DIRECTORY", "")
        return pipe.startswith(str(self.mps_dir))

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for client in self._clients:
            if client.poll() is None:
                client.kill()
            client.communicate()
        self.inject("")
        await self.privileged.end_all()


def open_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="gpupool-"))
    directory.chmod(0o755)
    return directory


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    """Make one in a short directory that any user may look into."""
    directory = open_directory()
    made = World(directory)
    try:
        yield made
    finally:
        await made.close()
        shutil.rmtree(directory)


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline, f"did not come true: {what}"
        await asyncio.sleep(0.02)
