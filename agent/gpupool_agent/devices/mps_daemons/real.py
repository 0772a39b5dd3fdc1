"""The MPS of a real host."""

from gpupool_agent.devices.mps_daemons.daemons import MpsDaemons
from gpupool_agent.devices.mps_daemons.modes import NvmlComputeModes
from gpupool_agent.devices.privileged import Privileged
from gpupool_agent.devices.processes import ProcProcessTable
from gpupool_agent.settings import AgentSettings


def real_mps(settings: AgentSettings, privileged: Privileged, boot_id: str) -> MpsDaemons:
    """Make it; without a helper it refuses every slice, with the helper's reason."""
    return MpsDaemons(
        privileged=privileged,
        modes=NvmlComputeModes(),
        processes=ProcProcessTable(),
        records_dir=settings.run_dir / "mps",
        boot_id=boot_id,
        exclusive=settings.mps_exclusive,
    )
