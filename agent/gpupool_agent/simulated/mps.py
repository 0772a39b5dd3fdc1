"""MPS of a simulated node: the agent's stand-in, with pipe directories that exist.

CUDA clients look for the directory: without one they run unconfined.
"""

import contextlib
from pathlib import Path

from gpupool.model.ids import DeviceUuid
from gpupool_agent.devices.interfaces import SliceLimits
from gpupool_agent.devices.mps import InProcessMps

_PIPE = "CUDA_MPS_PIPE_DIRECTORY"


class SimulatedMps(InProcessMps):
    """``InProcessMps`` whose daemons have their directories while they run."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._pipes: dict[DeviceUuid, Path] = {}

    async def set_limits(self, gpu: DeviceUuid, limits: SliceLimits) -> dict[str, str]:
        """Admit a slice; the pipe directory is there afterwards."""
        environment = await super().set_limits(gpu, limits)
        pipe = Path(environment[_PIPE])
        pipe.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 one call, on a local disk
        self._pipes[gpu] = pipe
        return environment

    async def stop(self, gpu: DeviceUuid) -> None:
        """End the daemon; its directory goes with it."""
        await super().stop(gpu)
        pipe = self._pipes.pop(gpu, None)
        if pipe is not None:
            with contextlib.suppress(FileNotFoundError):
                pipe.rmdir()

    async def verify(self, gpu: DeviceUuid) -> str:
        """Empty when neither the daemon nor its directory is left."""
        pipe = self._pipes.get(gpu)
        left = f"its pipe directory {pipe} is there" if pipe and pipe.exists() else ""
        return await super().verify(gpu) or left
