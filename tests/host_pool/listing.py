"""What the agent's own driver code reads of this host's GPUs, as one line of JSON.

python -m tests.host_pool.listing

In a process of its own: pynvml has one library per process, the real or a simulated one.
"""

import asyncio
import json
import sys
from dataclasses import asdict

from gpupool_agent.devices.mps_daemons.modes import NvmlComputeModes
from gpupool_agent.devices.nvml import NvmlDriver


async def listing() -> dict[str, object]:
    driver, modes = NvmlDriver(), NvmlComputeModes()
    inventory = driver.inventory()
    try:
        usage = {each.uuid: each for each in driver.usage()}
        whole = [each for each in inventory.devices if each.parent_uuid is None]
        return {
            "driver_version": inventory.driver_version,
            "devices": [asdict(each) for each in inventory.devices],
            "pids": {
                uuid: None if each.processes is None else [found.pid for found in each.processes]
                for uuid, each in usage.items()
            },
            "compute_modes": {each.uuid: str(await modes.read(each.uuid)) for each in whole},
        }
    finally:
        driver.close()


def main(_arguments: list[str]) -> int:
    print(json.dumps(asyncio.run(listing())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
