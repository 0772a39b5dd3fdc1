"""Holds leases for a test as the user that it runs as: requests and answers in lines of JSON.

python -m tests.host_pool.holder ADDRESS

{"acquire": {"gpus": 0.1}} gives lease_id, ready_ms, environment, devices and sm_count;
{"release": LEASE_ID} gives ended_ms, until all of the lease has been taken back; {"end":
LEASE_ID} asks for the end of any lease, also of somebody else. The leases are bound to this
process: they end with it, however it ends. What fails gives {"error"}.
"""

import json
import os
import sys
import time
from typing import Any

from gpupool import Client
from gpupool.client import Lease
from gpupool.errors import GpupoolError
from gpupool.model.lease import ENDED

Leases = dict[str, Lease]


def acquire(client: Client, leases: Leases, shape: dict[str, Any]) -> dict[str, Any]:
    begun_s = time.monotonic()
    lease = client.acquire(process=True, on_caller_node=True, **shape)
    ready_ms = 1000 * (time.monotonic() - begun_s)
    leases[lease.id] = lease
    member = lease.members[0]
    return {
        "lease_id": lease.id,
        "ready_ms": ready_ms,
        "environment": lease.env,
        "devices": [each.device_uuid for each in member.place.devices],
        "sm_count": member.given[0].sm_count if member.given else 0,
    }


def release(client: Client, leases: Leases, lease_id: str) -> dict[str, Any]:
    begun_s = time.monotonic()
    leases.pop(lease_id).release()
    state = next(each.state for each in client.watch_lease(lease_id) if each.state in ENDED)
    return {"ended_ms": 1000 * (time.monotonic() - begun_s), "state": str(state)}


def answer(client: Client, leases: Leases, request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "acquire" in request:
            return acquire(client, leases, request["acquire"])
        if "end" in request:
            return {"state": str(client.release(request["end"]).state)}
        return release(client, leases, request["release"])
    except GpupoolError as error:
        return {"error": str(error)}


def main(address: str) -> int:
    leases: Leases = {}
    with Client(address) as client:
        client.pool()  # the connection is there before anything is measured
        print(json.dumps({"pid": os.getpid(), "uid": os.getuid()}), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(client, leases, json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
