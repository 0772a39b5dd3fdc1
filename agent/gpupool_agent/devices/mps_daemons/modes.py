"""What NVML knows of a GPU's compute mode, asked on a thread of its own."""

from typing import Any, Protocol

import pynvml  # pyright: ignore[reportMissingTypeStubs] - it has none

from gpupool.model.ids import DeviceUuid
from gpupool_agent.devices.blocking import BlockingCalls, CallHangsError
from gpupool_agent.devices.interfaces import MpsError
from gpupool_agent.devices.privileged import ComputeMode

# nvidia-ml-py has no types; this is the edge.
nvml: Any = pynvml

DEADLINE_S = 5.0
MODES = {
    0: ComputeMode.DEFAULT,
    2: ComputeMode.PROHIBITED,
    3: ComputeMode.EXCLUSIVE_PROCESS,
}


class ComputeModes(Protocol):
    """Reads compute modes."""

    async def read(self, gpu: DeviceUuid) -> ComputeMode:
        """Give a GPU's mode; raises MpsError."""
        ...


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
