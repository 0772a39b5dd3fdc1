"""Goes into the installed environment as a .pth file's import: a driver without a GPU.

Every program of ours that is started there meets the same simulated GPUs, in a directory
that it may write to.
"""

import pathlib
import sys

HOMES = {
    "gpupool-agent": "/run/gpupool/simulated",
    "gpupool-helper": "/run/gpupool-helper/simulated",
}


def simulate() -> None:
    home = HOMES.get(pathlib.Path(sys.argv[0]).name if sys.argv else "")
    if home is None:
        return
    from gpupool_agent.simulated.machine import load_machine
    from gpupool_agent.simulated.node import CURRENT_NODE, SimulatedNode
    from gpupool_agent.simulated.nvml_library import install

    pathlib.Path(home).mkdir(exist_ok=True)
    node = SimulatedNode(
        node_id="n1", machine=load_machine("dgx-h100"), directory=pathlib.Path(home)
    )
    CURRENT_NODE.set(node)
    install()
