"""Compute modes: what NVML knows of them, asked on a thread of its own, and setting them."""

from typing import Any, Protocol

import pynvml  # pyright: ignore[reportMissingTypeStubs] - it has none

from gpupool.model.ids import DeviceUuid
from gpupool_agent.devices.blocking import BlockingCalls, CallHangsError
from gpupool_agent.devices.interfaces import MpsError
from gpupool_agent.devices.mps_daemons.control import within
from gpupool_agent.devices.privileged import ComputeMode, Privileged

# nvidia-ml-py has no types; this is the edge.
nvml: Any = pynvml

DEADLINE_S = 5.0
SET_DEADLINE_S = 20.0
MODES = {
    0: ComputeMode.DEFAULT,
    2: ComputeMode.PROHIBITED,
    3: ComputeMode.EXCLUSIVE_PROCESS,
}


class ModeLeftError(MpsError):
    """All of a daemon has ended, but its GPU's mode is not as it was found."""


class ComputeModes(Protocol):
    """Reads compute modes."""

    async def read(self, gpu: DeviceUuid) -> ComputeMode:
        """Give a GPU's mode; raises MpsError."""
        ...


class FoundModes:
    """Puts GPUs into exclusive-process mode and back. Not ``exclusive``: leaves them alone."""

    def __init__(self, privileged: Privileged, modes: ComputeModes, *, exclusive: bool) -> None:
        self._privileged = privileged
        self._modes = modes
        self._exclusive = exclusive

    @property
    def usual(self) -> ComputeMode | None:
        """What a GPU is taken to have had before, where nobody has written it down."""
        return ComputeMode.DEFAULT if self._exclusive else None

    async def found(self, gpu: DeviceUuid) -> ComputeMode | None:
        """The mode to come back to; None: none. Raises MpsError."""
        return await self._modes.read(gpu) if self._exclusive else None

    async def take(self, gpu: DeviceUuid) -> None:
        """Exclusive-process mode; raises MpsError."""
        if self._exclusive:
            await self._set(gpu, ComputeMode.EXCLUSIVE_PROCESS)

    async def restore(self, gpu: DeviceUuid, found: ComputeMode | None) -> None:
        """The mode that was found, looked up; raises ModeLeftError."""
        if found is None:
            return
        try:
            await self._set(gpu, found)
            mode = await self._modes.read(gpu)
        except MpsError as error:
            raise ModeLeftError(f"{gpu}: its compute mode is not restored: {error}") from error
        if mode is not found:
            raise ModeLeftError(f"{gpu}: its compute mode is {mode}, not as it was found")

    async def _set(self, gpu: DeviceUuid, mode: ComputeMode) -> None:
        await within(
            self._privileged.set_compute_mode(gpu, mode),
            SET_DEADLINE_S,
            "set_compute_mode: no answer",
        )


class NvmlComputeModes:
    """``ComputeModes`` over NVML, inside the context that it was made in."""

    def __init__(self) -> None:
        self._calls = BlockingCalls("driver")

    async def read(self, gpu: DeviceUuid) -> ComputeMode:
        """Give a GPU's mode; raises MpsError."""
        try:
            number = await self._calls.call(lambda: _read(gpu), DEADLINE_S)
        except CallHangsError as error:
            raise MpsError(f"{gpu}: its compute mode cannot be read: {error}") from error
        except nvml.NVMLError as error:
            raise MpsError(f"{gpu}: its compute mode cannot be read: {error}") from error
        if number not in MODES:
            raise MpsError(f"{gpu}: its compute mode {number} is unknown")
        return MODES[number]


def _read(gpu: DeviceUuid) -> int:
    nvml.nvmlInit()
    try:
        mode: int = nvml.nvmlDeviceGetComputeMode(nvml.nvmlDeviceGetHandleByUUID(gpu))
        return mode
    finally:
        nvml.nvmlShutdown()
