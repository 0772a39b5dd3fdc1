"""What only root may do on a host, done directly to a simulated one.

Daemons are the control program's stand-in, each in a session of its own, so they live
on when this process ends; they end when the node's directory is removed.
"""

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path

from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool_agent.devices.privileged import (
    CommandOutcome,
    ComputeMode,
    DaemonFacts,
    MpsSlot,
    PrivilegedError,
    ProbeRequest,
)
from gpupool_agent.devices.processes import ProcProcessTable
from gpupool_agent.simulated.gpu_processes import start_ticks_of
from gpupool_agent.simulated.mps_control.daemon import PID_FILE
from gpupool_agent.simulated.mps_control.host import BECOME_UID
from gpupool_agent.simulated.mps_control.launcher import write_launcher, write_probe
from gpupool_agent.simulated.node import SimulatedNode

MODE_NUMBERS = {
    ComputeMode.DEFAULT: 0,
    ComputeMode.PROHIBITED: 2,
    ComputeMode.EXCLUSIVE_PROCESS: 3,
}
UID_FILE = "uid"
_LOOKS_MAX = 500
_LOOK_S = 0.01


class SimulatedPrivileged:
    """``Privileged`` over a simulated node; slots have their directories in ``mps_dir``."""

    def __init__(self, node: SimulatedNode, mps_dir: Path) -> None:
        self._node = node
        self._mps_dir = mps_dir
        programs = node.directory / "bin"
        self.control = write_launcher(programs, node=node.directory)
        self._probe = write_probe(programs, node=node.directory)
        self._cdi = node.directory / "cdi"
        self._processes = ProcProcessTable()

    async def set_compute_mode(self, gpu: DeviceUuid, mode: ComputeMode) -> None:
        """Sets a GPU's compute mode."""
        self._node.set_compute_mode(self._node.find_gpu(gpu), MODE_NUMBERS[mode])

    async def start_mps(self, slot: MpsSlot) -> DaemonFacts:
        """Makes the slot's directories and starts its daemon."""
        running = await self.mps_daemon(slot.name)
        if running is not None:
            return running
        self._mps_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        for directory in (self._pipe(slot.name), self._log(slot.name)):
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        (self._mps_dir / slot.name / UID_FILE).write_text(str(slot.uid))
        outcome = await self._run(
            self.control, ("-d",), self._environment(slot.name) | {"CUDA_VISIBLE_DEVICES": slot.gpu}
        )
        daemon = await self.mps_daemon(slot.name)
        if outcome.exit_code or daemon is None:
            raise PrivilegedError(f"{slot.name}: no MPS daemon: {outcome.output.strip()}")
        return daemon

    async def mps_daemon(self, slot: str) -> DaemonFacts | None:
        """The slot's daemon by its pid file, None when it does not run."""
        try:
            pid = int((self._pipe(slot) / PID_FILE).read_text())
        except (OSError, ValueError):
            return None
        ticks = start_ticks_of(pid)
        if ticks is None:
            return None
        return DaemonFacts(
            pid=pid,
            start_ticks=ticks,
            pipe_directory=str(self._pipe(slot)),
            uid=int((self._mps_dir / slot / UID_FILE).read_text()),
        )

    async def stop_mps(self, slot: str) -> None:
        """Kills the daemon and its servers where they still run; removes directories."""
        daemon = await self.mps_daemon(slot)
        if daemon is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            if not await _gone(daemon):
                raise PrivilegedError(f"the MPS daemon {daemon.pid} cannot be killed")
        shutil.rmtree(self._mps_dir / slot, ignore_errors=True)

    async def mps_commands(self, slot: str, lines: tuple[str, ...]) -> CommandOutcome:
        """Gives commands to the slot's control program."""
        text = "".join(f"{line}\n" for line in lines)
        return await self._run(self.control, (), self._environment(slot), text)

    async def probe(self, request: ProbeRequest) -> CommandOutcome:
        """Runs the probe program as a user."""
        environment = {**request.environment, BECOME_UID: str(request.uid)}
        return await self._run(self._probe, (), environment)

    async def end_process(self, gpu: DeviceUuid, pid: int, start_ticks: int, number: int) -> None:
        """Signals exactly this process, if the driver lists it on the GPU."""
        on_gpu = self._node.processes_on(self._node.find_gpu(gpu))
        if not any((each.pid, each.start_ticks) == (pid, start_ticks) for each in on_gpu):
            raise PrivilegedError(f"the driver lists no process {pid} on {gpu}")
        failed = self._processes.signal(pid, start_ticks, number)
        if failed:
            raise PrivilegedError(failed)

    async def lease_of(self, gpu: DeviceUuid, pid: int, start_ticks: int) -> str:
        """GPUPOOL_LEASE_ID of the environment of a process on the GPU."""
        del gpu
        facts = self._processes.describe(pid)
        same = facts is not None and facts.start_ticks == start_ticks
        return (facts.lease_id or "") if facts is not None and same else ""

    async def write_cdi(self, lease_id: LeaseId, spec: bytes) -> None:
        """Writes the lease's CDI spec."""
        self._cdi.mkdir(exist_ok=True)
        (self._cdi / f"{lease_id}.json").write_bytes(spec)

    async def remove_cdi(self, lease_id: LeaseId) -> None:
        """Removes it."""
        (self._cdi / f"{lease_id}.json").unlink(missing_ok=True)

    async def cdi_leases(self) -> tuple[LeaseId, ...]:
        """Leases that have a spec."""
        return tuple(LeaseId(path.stem) for path in sorted(self._cdi.glob("*.json")))

    async def reset_gpu(self, gpu: DeviceUuid) -> None:
        """Resets a GPU that nothing runs on: its mode is the default again."""
        found = self._node.find_gpu(gpu)
        if self._node.processes_on(found):
            raise PrivilegedError(f"processes are on {gpu}")
        self._node.set_compute_mode(found, MODE_NUMBERS[ComputeMode.DEFAULT])

    async def rescan_pci(self) -> None:
        """A described machine has no bus: what was put in is there at the next session."""

    async def end_all(self) -> None:
        """End every daemon of the node, as a power cut would."""
        for directory in self._mps_dir.glob("*"):
            await self.stop_mps(directory.name)

    def _pipe(self, slot: str) -> Path:
        return self._mps_dir / slot / "pipe"

    def _log(self, slot: str) -> Path:
        return self._mps_dir / slot / "log"

    def _environment(self, slot: str) -> dict[str, str]:
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._pipe(slot)),
            "CUDA_MPS_LOG_DIRECTORY": str(self._log(slot)),
        }

    async def _run(
        self, program: Path, flags: tuple[str, ...], environment: dict[str, str], text: str = ""
    ) -> CommandOutcome:
        process = await asyncio.create_subprocess_exec(
            program,
            *flags,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
        )
        try:
            output, _ = await process.communicate(text.encode())
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        return CommandOutcome(exit_code=process.returncode or 0, output=output.decode())


async def _gone(daemon: DaemonFacts) -> bool:
    for _ in range(_LOOKS_MAX):
        if start_ticks_of(daemon.pid) != daemon.start_ticks:
            return True
        await asyncio.sleep(_LOOK_S)
    return False
