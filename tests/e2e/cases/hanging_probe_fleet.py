"""A fleet whose MPS never answers the probe: every slice stays half prepared."""

import asyncio
import sys

from gpupool.model.ids import DeviceUuid
from gpupool_agent.devices.interfaces import SliceLimits
from gpupool_agent.simulated.__main__ import main
from gpupool_agent.simulated.mps import SimulatedMps


async def _never(_mps: SimulatedMps, _gpu: DeviceUuid, _limits: SliceLimits) -> None:
    await asyncio.Event().wait()


if __name__ == "__main__":
    setattr(SimulatedMps, SimulatedMps.probe.__name__, _never)
    sys.exit(main())
