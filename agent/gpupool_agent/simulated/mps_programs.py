"""MPS of a simulated node through programs: real daemons of the stand-in, a real life."""

from pathlib import Path

from gpupool_agent.devices.mps_daemons.daemons import MpsDaemons
from gpupool_agent.devices.mps_daemons.modes import NvmlComputeModes
from gpupool_agent.devices.processes import ProcProcessTable
from gpupool_agent.simulated.node import SimulatedNode
from gpupool_agent.simulated.privileged import SimulatedPrivileged


def mps_daemons(node: SimulatedNode, boot_id: str) -> MpsDaemons:
    """Make the node's; inside the node's context, where NVML is its own."""
    return MpsDaemons(
        privileged=SimulatedPrivileged(node, mps_directory(node)),
        modes=NvmlComputeModes(),
        processes=ProcProcessTable(),
        records_dir=node.directory / "mps-records",
        boot_id=boot_id,
    )


def mps_directory(node: SimulatedNode) -> Path:
    """Where the slots of a node have their directories."""
    return node.directory / "mps"


async def end_daemons(node: SimulatedNode) -> None:
    """End every daemon, as a power cut would."""
    await SimulatedPrivileged(node, mps_directory(node)).end_all()
