"""Carrying out what passed the checks.

What only the machine knows is checked here, right before it counts. Actions on one GPU or
slot go one after the other; those on another do not wait for them.
"""

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, assert_never

from gpupool_agent.helper.checks import (
    Action,
    CdiLeases,
    EndProcess,
    LeaseOf,
    MpsCommands,
    MpsDaemon,
    Probe,
    RemoveCdi,
    RescanPci,
    ResetGpu,
    SetComputeMode,
    StartMps,
    StopMps,
    WriteCdi,
)
from gpupool_agent.helper.driver import Driver, GpuCalls
from gpupool_agent.helper.files import CdiFiles
from gpupool_agent.helper.mps import Daemon, MpsDaemons, Record
from gpupool_agent.helper.processes import held, lease_of, send, start_ticks
from gpupool_agent.helper.programs import Ended, run, run_as
from gpupool_agent.helper.refusal import FailedError, RefusedError
from gpupool_agent.helper.settings import HelperSettings

WAITING_MAX = 16
"""Actions that may wait for one GPU or slot."""


OWN_PROBE = (sys.executable, "-m", "gpupool_agent.devices.mps_daemons.probe")
"""Makes a CUDA context and tells what the slice gives it."""


class Actions:
    """The closed list, over a driver."""

    def __init__(self, settings: HelperSettings, driver: Driver) -> None:
        self._settings = settings
        self._gpus = GpuCalls(driver, settings.driver_deadline_s)
        self._mps = MpsDaemons(settings)
        self._cdi = CdiFiles(settings.cdi_dir)
        self._turns = _Turns()

    async def sweep(self) -> None:
        """Take back what a helper that was killed had half done. FailedError."""
        self._cdi.sweep()
        await self._mps.sweep()

    async def perform(self, action: Action) -> Any:
        """Carry an action out and give what it gives, as JSON has it.

        RefusedError, FailedError.
        """
        async with self._turns.of(_subject(action)):
            try:
                async with asyncio.timeout(self._deadline_s(action)):
                    return await self._perform(action)
            except TimeoutError as error:
                limit_s = self._deadline_s(action)
                raise FailedError(f"it took longer than {limit_s:g} s") from error

    async def _perform(self, action: Action) -> Any:
        match action:
            case SetComputeMode():
                return await self._gpus.set_mode(action.gpu, action.mode)
            case StartMps():
                return await self._start_mps(action)
            case MpsDaemon():
                daemon = await self._mps.find(action.slot)
                return None if daemon is None else self._facts(action.slot, daemon)
            case StopMps():
                return await self._mps.stop(action.slot)
            case MpsCommands():
                return await self._mps_commands(action)
            case Probe():
                return await self._probe(action)
            case EndProcess():
                return await self._end_process(action)
            case LeaseOf():
                return await self._lease_of(action)
            case WriteCdi():
                return self._cdi.write(action.lease_id, action.spec)
            case RemoveCdi():
                return self._cdi.remove(action.lease_id)
            case CdiLeases():
                return self._cdi.leases()
            case ResetGpu():
                return await self._reset(action.gpu)
            case RescanPci():
                return await self._rescan()
            case _:
                assert_never(action)

    async def _start_mps(self, action: StartMps) -> dict[str, Any]:
        # Its slot's turn is taken already; two slots on one GPU must see each other.
        async with self._turns.of(action.gpu):
            await self._gpus.pids(action.gpu)
            await self._need_free(action)
            wanted = Record(gpu=action.gpu, uid=action.uid)
            return self._facts(action.slot, await self._mps.start(action.slot, wanted))

    async def _need_free(self, action: StartMps) -> None:
        wanted = Record(gpu=action.gpu, uid=action.uid)
        for slot, record in self._mps.slots().items():
            other = slot != action.slot and record.gpu == action.gpu
            changed = slot == action.slot and record != wanted
            if (other or changed) and await self._mps.find(slot) is not None:
                raise FailedError(f"slot {slot} serves uid {record.uid} on {record.gpu}")

    def _facts(self, slot: str, daemon: Daemon) -> dict[str, Any]:
        record = self._mps.record(slot)
        return {
            "pid": daemon.pid,
            "start_ticks": daemon.start_ticks,
            "pipe_directory": str(self._mps.pipe(slot)),
            "uid": -1 if record is None else record.uid,
        }

    async def _mps_commands(self, action: MpsCommands) -> dict[str, Any]:
        record = self._mps.record(action.slot)
        if record is None or await self._mps.find(action.slot) is None:
            raise FailedError(f"slot {action.slot} has no MPS daemon")
        for line in action.lines:
            words = line.split()
            if words[0] == "start_server" and int(words[2]) != record.uid:
                raise RefusedError(f"lines: slot {action.slot} serves uid {record.uid}")
            if any(word.startswith("GPU-") and word != record.gpu for word in words):
                raise RefusedError(f"lines: slot {action.slot} is on {record.gpu}")
        ended = await run(
            (self._settings.mps_control,),
            deadline_s=self._settings.command_deadline_s,
            environment={"CUDA_MPS_PIPE_DIRECTORY": str(self._mps.pipe(action.slot))},
            text="".join(f"{line}\n" for line in action.lines),
        )
        return _outcome(ended)

    async def _probe(self, action: Probe) -> dict[str, Any]:
        program = self._settings.probe_program or OWN_PROBE
        record, pipe = self._mps.record(action.slot), str(self._mps.pipe(action.slot))
        if record is None or record.uid != action.uid:
            raise RefusedError(f"uid: slot {action.slot} does not serve {action.uid}")
        if action.environment.get("CUDA_MPS_PIPE_DIRECTORY", pipe) != pipe:
            raise RefusedError(f"environment.CUDA_MPS_PIPE_DIRECTORY: it is {pipe}")
        ended = await run(
            program,
            deadline_s=action.deadline_s,
            environment={**action.environment, "CUDA_MPS_PIPE_DIRECTORY": pipe},
            user=run_as(action.uid),
        )
        return _outcome(ended)

    async def _end_process(self, action: EndProcess) -> None:
        with held(action.pid, action.start_ticks) as pidfd:
            if pidfd is None:
                return
            await self._need_on_gpu(action.gpu, action.pid)
            send(pidfd, signal.Signals(action.number))

    async def _lease_of(self, action: LeaseOf) -> str:
        with held(action.pid, action.start_ticks) as pidfd:
            if pidfd is None:
                raise FailedError(f"process {action.pid} is gone")
            await self._need_on_gpu(action.gpu, action.pid)
            found = lease_of(action.pid)
            if start_ticks(action.pid) != action.start_ticks:
                raise FailedError(f"process {action.pid} is gone")
            return found

    async def _need_on_gpu(self, gpu: str, pid: int) -> None:
        if pid not in await self._gpus.pids(gpu):
            raise RefusedError(f"pid: the driver lists no process {pid} on {gpu}")

    async def _reset(self, gpu: str) -> None:
        pids = await self._gpus.pids(gpu)
        if pids:
            raise RefusedError(f"gpu: {len(pids)} processes are on {gpu}")
        for slot, record in self._mps.slots().items():
            if record.gpu == gpu and await self._mps.find(slot) is not None:
                raise RefusedError(f"gpu: the MPS daemon of slot {slot} is on {gpu}")
        ended = await run(
            (self._settings.smi_program, "--gpu-reset", "-i", gpu),
            deadline_s=self._settings.reset_deadline_s,
        )
        if ended.exit_code:
            said = " ".join((ended.errors or ended.output).split())[:300]
            raise FailedError(f"{self._settings.smi_program} gave {ended.exit_code}: {said}")

    async def _rescan(self) -> None:
        """In a process of its own: the kernel may take its time, or not come back."""
        ended = await run(
            ("sh", "-c", 'echo 1 > "$1"', "sh", str(self._settings.pci_rescan_file)),
            deadline_s=self._settings.reset_deadline_s,
        )
        if ended.exit_code:
            raise FailedError(f"the bus was not scanned: {ended.errors.strip()[:300]}")

    def _deadline_s(self, action: Action) -> float:
        """More than all that it waits for, so that each part can say itself what took long."""
        settings = self._settings
        parts_s = settings.driver_deadline_s + 3 * settings.command_deadline_s
        match action:
            case StartMps():
                return parts_s + settings.start_deadline_s + 2 * settings.stop_deadline_s
            case StopMps():
                return parts_s + 2 * settings.stop_deadline_s
            case Probe():
                return parts_s + action.deadline_s
            case ResetGpu() | RescanPci():
                return parts_s + settings.reset_deadline_s
            case _:
                return parts_s


class _Turns:
    """A turn for each subject; what nobody waits for is forgotten."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def of(self, subject: str) -> AsyncGenerator[None]:
        lock, users = self._locks.get(subject, (asyncio.Lock(), 0))
        if users > WAITING_MAX:
            raise RefusedError(f"{WAITING_MAX} actions wait for {subject}")
        self._locks[subject] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(subject)
            if users > 1:
                self._locks[subject] = (lock, users - 1)


def _subject(action: Action) -> str:
    """What an action is about: a slot, a GPU, a lease's spec, or the bus."""
    for name in ("slot", "gpu", "lease_id"):
        found = getattr(action, name, None)
        if found is not None:
            return str(found)
    return type(action).__name__


def _outcome(ended: Ended) -> dict[str, Any]:
    return {"exit_code": ended.exit_code, "output": ended.output, "errors": ended.errors}
