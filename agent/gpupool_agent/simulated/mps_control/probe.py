"""The probe of a slice on a simulated node: one client, in and out again.

It prints how many multiprocessors it was given and its memory limit in MiB (0: none),
as one line of JSON. Exit codes: 0 it got through, 1 it did not.
"""

import json
import os

from gpupool_agent.simulated.mps_control import host
from gpupool_agent.simulated.mps_control.client import MpsRefusedError, join


def main() -> int:
    """Run the probe; gives its exit code."""
    host.become_user(int(os.environ.get(host.BECOME_UID) or 0))
    environment = dict(os.environ)
    uuid = environment.get("CUDA_VISIBLE_DEVICES", "")
    try:
        with open(f"{environment[host.NODE_DIRECTORY]}/gpus.json") as file:
            rows = {row["uuid"]: row for row in json.load(file)}
        client = join(host.pipe_directory(), (uuid,), environment)
    except (OSError, MpsRefusedError) as error:
        print(error)
        return 1
    if client is None or uuid not in rows:
        print("no MPS daemon answers" if client is None else f"no such device: {uuid}")
        return 1
    found = {
        "sm_count": int(rows[uuid]["sm_count"] * client.share_pct / 100),
        "memory_mib": client.limits_mib.get(uuid, 0),
    }
    client.say("idle")
    client.close()
    print(json.dumps(found))
    return 0
