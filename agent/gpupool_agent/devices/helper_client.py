"""The agent's side of the root helper's socket.

Requests of one agent share one connection, each with a number, so a slow one holds up no
other. Every action is repeatable: when the helper is started anew in the middle of one, it
is asked once more.
"""

import asyncio
import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any, NoReturn

from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool_agent.devices.privileged import (
    CommandOutcome,
    ComputeMode,
    DaemonFacts,
    MpsSlot,
    NotPermittedError,
    PrivilegedError,
    ProbeRequest,
)
from gpupool_agent.helper.messages import MESSAGE_BYTES_MAX, BadMessageError, decode, encode

DEADLINE_S = 60.0
"""Longest answer of an action that has no longer one; the helper has shorter ones of its own."""

LONGER_S = {
    "start_mps": 90.0,
    "stop_mps": 90.0,
    "probe": 120.0,
    "reset_gpu": 120.0,
    "rescan_pci": 120.0,
}
RETRY_S = 10.0
"""How long a helper that is being restarted is waited for: systemd's pause, and its start on
a busy host."""

RETRY_STEP_S = 0.1
LOST_S = 0.3
"""How long to wait, where a connection is lost, before the next one is opened."""

HOW = "start gpupool-helper.service and set helper_socket, see docs/install.md"

WITHOUT = {
    "set_compute_mode": "set compute modes",
    "start_mps": "start MPS daemons, so it prepares no slices",
    "mps_daemon": "look for MPS daemons",
    "stop_mps": "stop MPS daemons",
    "mps_commands": "command MPS daemons",
    "probe": "try a slice as its user",
    "end_process": "end other users' processes",
    "lease_of": "tell which lease other users' processes belong to",
    "write_cdi": "write CDI specs for containers",
    "remove_cdi": "remove CDI specs",
    "cdi_leases": "list CDI specs",
    "reset_gpu": "reset GPUs",
    "rescan_pci": "have the PCI bus scanned",
}
"""What an agent cannot do by itself, by the action's name."""


class _GoneError(Exception):
    """The connection is lost, or there is none to be had."""


class HelperClient:
    """``Privileged`` through the helper's socket."""

    def __init__(self, path: Path, *, deadline_s: float = DEADLINE_S) -> None:
        self._path = path
        self._deadline_s = deadline_s
        self._numbers = itertools.count(1)
        self._channel: _Channel | None = None
        self._connecting = asyncio.Lock()

    async def close(self) -> None:
        """Give the connection back; what is under way fails."""
        if self._channel is not None:
            await self._channel.close()

    async def set_compute_mode(self, gpu: DeviceUuid, mode: ComputeMode) -> None:
        """Sets a GPU's compute mode."""
        await self._ask("set_compute_mode", gpu=gpu, mode=mode.value)

    async def start_mps(self, slot: MpsSlot) -> DaemonFacts:
        """Makes the slot's directories and starts its daemon."""
        found = await self._ask("start_mps", slot=slot.name, gpu=slot.gpu, uid=slot.uid)
        return DaemonFacts(**found)

    async def mps_daemon(self, slot: str) -> DaemonFacts | None:
        """The slot's daemon, None when it does not run."""
        found = await self._ask("mps_daemon", slot=slot)
        return None if found is None else DaemonFacts(**found)

    async def stop_mps(self, slot: str) -> None:
        """Ends the daemon; removes directories."""
        await self._ask("stop_mps", slot=slot)

    async def mps_commands(self, slot: str, lines: tuple[str, ...]) -> CommandOutcome:
        """Gives commands of a closed list to the slot's control program."""
        return CommandOutcome(**await self._ask("mps_commands", slot=slot, lines=list(lines)))

    async def probe(self, request: ProbeRequest) -> CommandOutcome:
        """Runs the probe program as a user."""
        found = await self._ask(
            "probe",
            slot=request.slot,
            uid=request.uid,
            environment=request.environment,
            deadline_s=request.deadline_s,
        )
        return CommandOutcome(**found)

    async def end_process(self, gpu: DeviceUuid, pid: int, start_ticks: int, number: int) -> None:
        """Signals exactly this process, if the driver lists it on the GPU."""
        await self._ask(
            "end_process", gpu=gpu, pid=pid, start_ticks=start_ticks, number=int(number)
        )

    async def lease_of(self, gpu: DeviceUuid, pid: int, start_ticks: int) -> str:
        """GPUPOOL_LEASE_ID of the environment of a process on the GPU; empty: none."""
        return str(await self._ask("lease_of", gpu=gpu, pid=pid, start_ticks=start_ticks))

    async def write_cdi(self, lease_id: LeaseId, spec: bytes) -> None:
        """Writes the lease's CDI spec."""
        try:
            text = spec.decode("utf-8")
        except UnicodeDecodeError as error:
            raise NotPermittedError(f"spec: it is not UTF-8: {error}") from error
        await self._ask("write_cdi", lease_id=lease_id, spec=text)

    async def remove_cdi(self, lease_id: LeaseId) -> None:
        """Removes it."""
        await self._ask("remove_cdi", lease_id=lease_id)

    async def cdi_leases(self) -> tuple[LeaseId, ...]:
        """Leases that have a spec."""
        return tuple(LeaseId(each) for each in await self._ask("cdi_leases"))

    async def reset_gpu(self, gpu: DeviceUuid) -> None:
        """Resets a GPU that nothing runs on."""
        await self._ask("reset_gpu", gpu=gpu)

    async def rescan_pci(self) -> None:
        """Has the kernel look for devices that were put in."""
        await self._ask("rescan_pci")

    async def _ask(self, action: str, **arguments: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "action": action, **arguments}
        limit_s = max(self._deadline_s, LONGER_S.get(action, 0.0))
        try:
            data = encode(message)
        except BadMessageError as error:
            raise NotPermittedError(f"{action}: {error}") from error
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._exchange(action, number, data)
        except TimeoutError as error:
            raise PrivilegedError(
                f"{action}: the helper has not answered for {limit_s:g} s"
            ) from error
        if "refused" in answer:
            raise NotPermittedError(f"{action}: {answer['refused']}")
        if "failed" in answer:
            raise PrivilegedError(f"{action}: {answer['failed']}")
        return answer.get("done")

    async def _exchange(self, action: str, number: int, data: bytes) -> dict[str, Any]:
        """Ask, and once more where the helper went away in the middle."""
        for last in (False, True):
            try:
                channel = await self._connected(action)
                return await channel.ask(number, data)
            except _GoneError as error:
                if last:
                    raise PrivilegedError(f"{action}: {error}") from error
                # One that is being killed may still take a connection.
                await asyncio.sleep(LOST_S)
        raise AssertionError("the second time returns or raises")

    async def _connected(self, action: str) -> "_Channel":
        """The connection, a new one where there is none; a restart is waited for."""
        async with self._connecting:
            if self._channel is not None and not self._channel.closed:
                return self._channel
            was_there = self._channel is not None
            end_s = time.monotonic() + (RETRY_S if was_there else 0.0)
            while True:
                try:
                    self._channel = await _Channel.open(self._path)
                except OSError as error:
                    if time.monotonic() >= end_s:
                        # Whoever asks next need not wait: it is not coming back soon.
                        self._channel = None
                        raise NotPermittedError(_no_helper(action, self._path, error)) from error
                    await asyncio.sleep(RETRY_STEP_S)
                else:
                    return self._channel


class _Channel:
    """One connection: messages out in turn, answers to whom they belong."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._writing = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, path: Path) -> "_Channel":
        """Connect; OSError."""
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            channel.setblocking(False)
            # A full queue of connections is answered with EAGAIN, which asyncio would
            # wait for in vain: there is nothing to wait for on such a socket.
            failure = channel.connect_ex(str(path))
        except BaseException:
            channel.close()
            raise
        if failure:
            channel.close()
            raise OSError(failure, os.strerror(failure))
        return cls(channel)

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more."""
        return self._reader.done()

    async def close(self) -> None:
        """End it."""
        self._reader.cancel()
        await asyncio.wait({self._reader})

    async def ask(self, number: int, data: bytes) -> dict[str, Any]:
        """Send a message and wait for its answer; _GoneError."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self.closed:
            raise _GoneError("the connection is lost")
        self._waiting[number] = future
        try:
            async with self._writing:
                await asyncio.get_running_loop().sock_sendall(self._channel, data)
            return await future
        except OSError as error:
            raise _GoneError(f"the helper does not listen: {error.strerror}") from error
        finally:
            self._waiting.pop(number, None)
            if future.done() and not future.cancelled():
                future.exception()

    async def _read(self) -> None:
        reason = "the helper has ended the connection"
        try:
            while True:
                data = await asyncio.get_running_loop().sock_recv(
                    self._channel, MESSAGE_BYTES_MAX + 1
                )
                if not data:
                    break
                answer = decode(data)
                waiting = self._waiting.get(answer.get("id", 0))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (OSError, BadMessageError) as error:
            reason = f"the connection to the helper is lost: {error}"
        finally:
            self._channel.close()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(_GoneError(reason))


class NoHelper:
    """``Privileged`` of an agent without a helper: it reads only, and says so."""

    async def close(self) -> None:
        """Nothing to give back."""

    async def set_compute_mode(self, gpu: DeviceUuid, mode: ComputeMode) -> None:
        """Not without a helper."""
        _cannot("set_compute_mode", gpu, mode)

    async def start_mps(self, slot: MpsSlot) -> DaemonFacts:
        """Not without a helper."""
        _cannot("start_mps", slot)

    async def mps_daemon(self, slot: str) -> DaemonFacts | None:
        """Not without a helper."""
        _cannot("mps_daemon", slot)

    async def stop_mps(self, slot: str) -> None:
        """Not without a helper."""
        _cannot("stop_mps", slot)

    async def mps_commands(self, slot: str, lines: tuple[str, ...]) -> CommandOutcome:
        """Not without a helper."""
        _cannot("mps_commands", slot, lines)

    async def probe(self, request: ProbeRequest) -> CommandOutcome:
        """Not without a helper."""
        _cannot("probe", request)

    async def end_process(self, gpu: DeviceUuid, pid: int, start_ticks: int, number: int) -> None:
        """Not without a helper."""
        _cannot("end_process", gpu, pid, start_ticks, number)

    async def lease_of(self, gpu: DeviceUuid, pid: int, start_ticks: int) -> str:
        """Not without a helper."""
        _cannot("lease_of", gpu, pid, start_ticks)

    async def write_cdi(self, lease_id: LeaseId, spec: bytes) -> None:
        """Not without a helper."""
        _cannot("write_cdi", lease_id, spec)

    async def remove_cdi(self, lease_id: LeaseId) -> None:
        """Not without a helper."""
        _cannot("remove_cdi", lease_id)

    async def cdi_leases(self) -> tuple[LeaseId, ...]:
        """Not without a helper."""
        _cannot("cdi_leases")

    async def reset_gpu(self, gpu: DeviceUuid) -> None:
        """Not without a helper."""
        _cannot("reset_gpu", gpu)

    async def rescan_pci(self) -> None:
        """Not without a helper."""
        _cannot("rescan_pci")


def _cannot(action: str, *_arguments: object) -> NoReturn:
    raise NotPermittedError(f"this agent has no root helper and cannot {WITHOUT[action]}: {HOW}")


def _no_helper(action: str, path: Path, error: OSError) -> str:
    return (
        f"no root helper answers at {path} ({error.strerror}), so the agent cannot"
        f" {WITHOUT[action]}: {HOW}"
    )
