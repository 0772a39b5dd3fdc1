"""The helper's real program over a simulated driver, whose node lies in a directory.

python helper_program.py NODE_DIRECTORY [flags of gpupool-helper]. A file "hangs" in the
directory with a GPU's UUID has the driver hang on that GPU for as long as it is there.
"""

import sys
import time
from pathlib import Path

from gpupool_agent.helper import driver
from gpupool_agent.helper.__main__ import main
from gpupool_agent.simulated.machine import load_machine
from gpupool_agent.simulated.node import CURRENT_NODE, SimulatedNode
from gpupool_agent.simulated.nvml_library import install

NODE_ID = "n1"


def simulated_node(directory: Path) -> SimulatedNode:
    return SimulatedNode(node_id=NODE_ID, machine=load_machine("dgx-h100"), directory=directory)


def hang_where_told(directory: Path) -> None:
    by_uuid = driver.nvml.nvmlDeviceGetHandleByUUID

    def handle(uuid: bytes) -> object:
        file = directory / "hangs"
        while file.exists() and file.read_text() == uuid.decode():
            time.sleep(0.01)
        return by_uuid(uuid)

    driver.nvml.nvmlDeviceGetHandleByUUID = handle


if __name__ == "__main__":
    where = Path(sys.argv[1])
    CURRENT_NODE.set(simulated_node(where))
    install()
    hang_where_told(where)
    sys.exit(main(sys.argv[2:]))
