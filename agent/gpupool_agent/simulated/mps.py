"""MPS of a simulated node: the agent's stand-in, with pipe directories that exist.

CUDA clients look for the directory: without one they run unconfined.
"""

import contextlib

from gpupool.model.ids import DeviceUuid
from gpupool_agent.devices.interfaces import MpsError, SliceLimits
from gpupool_agent.devices.mps import InProcessMps


class SimulatedMps(InProcessMps):
    """``InProcessMps`` whose daemons have their directories while they run.

    A directory that an agent left behind when it was killed is the next one's to remove.
    """

    async def set_limits(self, gpu: DeviceUuid, limits: SliceLimits) -> dict[str, str]:
        """Admit a slice; the pipe directory is there afterwards."""
        environment = await super().set_limits(gpu, limits)
        try:
            self.pipe_directory(gpu).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MpsError(f"{gpu}: no pipe directory can be made: {error}") from error
        return environment

    async def stop(self, gpu: DeviceUuid) -> None:
        """End the daemon; its directory goes with it."""
        await super().stop(gpu)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.pipe_directory(gpu).rmdir()

    async def verify(self, gpu: DeviceUuid) -> str:
        """Empty when neither the daemon nor its directory is left."""
        pipe = self.pipe_directory(gpu)
        left = f"its pipe directory {pipe} is there" if pipe.exists() else ""
        return await super().verify(gpu) or left
