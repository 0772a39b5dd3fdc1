"""Goes into the installed environment, imported by a .pth file: a driver without a GPU.

Agent, root helper, MPS daemons and CUDA clients meet the same simulated GPUs, in a
directory below /dev/shm, which the units leave to all of them.
"""

import pathlib
import sys
from typing import Any

HOME = pathlib.Path("/dev/shm/gpupool-node")
PROGRAMS = ("gpupool-agent", "gpupool-helper")


def node() -> Any:
    from gpupool_agent.simulated.machine import load_machine
    from gpupool_agent.simulated.shared_node import SharedNode

    return SharedNode(node_id="booted", machine=load_machine("dgx-h100"), directory=HOME)


def lay_out(programs: str) -> None:
    """Make the node, and the programs that stand for MPS's."""
    from gpupool_agent.simulated.mps_control.launcher import write_launcher, write_probe

    HOME.mkdir()
    HOME.chmod(0o755)
    node()
    write_launcher(pathlib.Path(programs), node=HOME)
    write_probe(pathlib.Path(programs), node=HOME)


def simulate() -> None:
    if not sys.argv or pathlib.Path(sys.argv[0]).name not in PROGRAMS:
        return
    from gpupool_agent.simulated.node import CURRENT_NODE
    from gpupool_agent.simulated.nvml_library import install

    CURRENT_NODE.set(node())
    install()
