"""How long a host takes: a slice until its holder can use it, and a dead holder's GPU.

usage: python -m tests.benchmarks.node_life [--rounds N] [--machine KIND] [--json FILE]

Allocator, root helper and agent are the real programs with default settings, in processes
of their own; the driver is simulated, MPS is the control program's stand-in, whose daemon,
server and probe are processes as the real ones are. Holders call through the agent's socket.

* first slice: asked for to ready, on a GPU without a daemon: mode, daemon, limits, probe
* next slice: the same on a GPU whose daemon runs
* slice ended: released to all of it gone, with the daemon
* killed: kill -9 of a holder to its GPU being offered by the allocator again, for whole GPUs
  and for slices; nothing else runs on them

Exits 1 when a promise is broken: slices ready in 300 ms, GPUs offered again in 2 s, each in
every round.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

from tests.host_pool.machines import SimulatedMachine
from tests.host_pool.pool import HostPool, host_folder, host_pool, until

from gpupool.model.views import DeviceState

READY_MS_MAX = 300.0
OFFERED_MS_MAX = 2000.0
PROMISES = {
    "first slice ready": READY_MS_MAX,
    "next slice ready": READY_MS_MAX,
    "killed, whole GPU offered": OFFERED_MS_MAX,
    "killed, slice's GPU offered": OFFERED_MS_MAX,
}
Times = dict[str, list[float]]


def slices(pool: HostPool, times: Times, rounds: int) -> None:
    """Slices come and go; the GPU has none between two rounds."""
    holder = pool.holder()
    for _ in range(rounds):
        first = holder.acquire(gpus=0.1)
        following = holder.acquire(gpus=0.1)
        assert first.devices == following.devices
        times["first slice ready"].append(first.ready_ms)
        times["next slice ready"].append(following.ready_ms)
        holder.release(following)
        times["slice ended, with its daemon"].append(holder.release(first))
    assert pool.left() == []
    holder.leave()


def kills(pool: HostPool, times: Times, rounds: int, gpus: float, name: str) -> None:
    """A holder takes GPUs and is killed, again and again."""
    for _ in range(rounds):
        holder = pool.holder()
        [uuid] = holder.acquire(gpus=gpus).devices
        assert pool.device(uuid).state is not DeviceState.FREE
        begun_s = time.monotonic()
        holder.process.kill()
        until(lambda uuid=uuid: pool.device(uuid).state is DeviceState.FREE, "the GPU again")
        times[name].append(1000 * (time.monotonic() - begun_s))
        holder.kill()
    assert pool.left() == []


def row(values: list[float]) -> dict[str, float]:
    """Milliseconds: median, 99th percentile, greatest."""
    ordered = sorted(values)
    at = min(len(ordered) - 1, -(-99 * len(ordered) // 100) - 1)
    found = {"median": statistics.median(ordered), "p99": ordered[at], "max": ordered[-1]}
    return {name: round(value, 1) for name, value in found.items()}


def measure(machine: str, rounds: int) -> dict[str, dict[str, float]]:
    times: Times = defaultdict(list)
    with (
        host_folder() as folder,
        host_pool(SimulatedMachine(folder, machine), folder, check_invariants=False) as pool,
    ):
        slices(pool, times, rounds)
        kills(pool, times, rounds, 1, "killed, whole GPU offered")
        kills(pool, times, rounds, 0.1, "killed, slice's GPU offered")
    return {name: row(values) for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--machine", default="dgx-h100")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    rows = measure(arguments.machine, arguments.rounds)
    print(f"{arguments.rounds} rounds, ms, load {os.getloadavg()[0]:.1f}")
    for name, figures in rows.items():
        print(f"{name:32}", *(f"{key} {value:7.1f}" for key, value in figures.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))
    broken = [name for name, limit in PROMISES.items() if rows[name]["max"] >= limit]
    for name in broken:
        print(f"promise broken: {name}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
