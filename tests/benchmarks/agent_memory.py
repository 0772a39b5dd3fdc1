"""Memory and CPU of an agent at rest on an 8-GPU host.

usage: python -m tests.benchmarks.agent_memory [--machine KIND] [--rest SECONDS] [--json FILE]

The agent is the real program with default settings, telemetry on, its metrics scraped every
15 s, beside its root helper and an allocator; one slice and one whole GPU are leased, each
with a CUDA client on it. The driver is simulated in the agent's process: its memory is in
the figure, so the real one is smaller; the processor time of its calls is counted by
themselves, since on a real host that is the driver's and not the agent's. Exits 1 over the
limits: 60 MiB, and 0.5 % of a core without the driver.
"""

import argparse
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.host_pool.machines import SimulatedMachine
from tests.host_pool.pool import HostPool, host_folder, host_pool
from tests.host_pool.simulated_program import DRIVER_TIME, NANOSECONDS

LIMIT_MIB = 60.0
LIMIT_CPU_PCT = 0.5
SETTLING_S = 20.0
"""Before anything is counted: what belongs to starting and preparing is over."""

SCRAPE_S = 15.0


def measure(machine: str, rest_s: float) -> dict[str, Any]:
    """Start everything, let it rest, read what the kernel says about the agent."""
    with host_folder() as folder:
        clock = folder / "agent-driver" / "time"
        clock.parent.mkdir()
        clock.parent.chmod(0o777)
        with host_pool(
            SimulatedMachine(folder, machine),
            folder,
            environment={DRIVER_TIME: str(clock), "MALLOC_ARENA_MAX": "2"},
            check_invariants=False,
        ) as pool:
            holder = pool.holder()
            for shape in ({"gpus": 0.1, "memory": 4096}, {"gpus": 1}):
                pool.cuda_client(holder.acquire(**shape).environment, "--memory-mib", "512")
            rest(pool, SETTLING_S)
            return figures(pool, clock, machine, rest_s)


def figures(pool: HostPool, clock: Path, machine: str, rest_s: float) -> dict[str, Any]:
    pid = pool.running["agent"].process.pid
    before_s, driver_before_s = cpu_s(pid), driver_s(clock)
    begun_s = time.monotonic()
    scraped = rest(pool, rest_s)
    elapsed_s = time.monotonic() - begun_s
    all_pct = 100 * (cpu_s(pid) - before_s) / elapsed_s
    driver_pct = 100 * (driver_s(clock) - driver_before_s) / elapsed_s
    return {
        "machine": machine,
        "devices": len(pool.devices()),
        "leases": sum(len(each.lease_ids) for each in pool.devices()),
        "rest_s": round(elapsed_s, 1),
        "scrapes": scraped,
        "rss_mib": round(status_mib(pid, "VmRSS"), 1),
        "peak_rss_mib": round(status_mib(pid, "VmHWM"), 1),
        "private_mib": round(private_mib(pid), 1),
        "cpu_pct": round(all_pct - driver_pct, 3),
        "driver_cpu_pct": round(driver_pct, 3),
        "load": round(os.getloadavg()[0], 1),
    }


def rest(pool: HostPool, seconds: float) -> int:
    """Let time pass; the metrics are read as Prometheus does. How often they were."""
    url = f"http://127.0.0.1:{pool.ready('agent')['metrics_port']}/metrics"
    end_s, count = time.monotonic() + seconds, 0
    while (left_s := end_s - time.monotonic()) > 0:
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert b"gpupool_agent_gpu_power_watts{" in answer.read()
        count += 1
        time.sleep(min(SCRAPE_S, left_s))
    pool.check_alive()
    return count


def status_mib(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def private_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("Private_"))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def driver_s(clock: Path) -> float:
    [nanoseconds] = NANOSECONDS.unpack(clock.read_bytes())
    return float(nanoseconds) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--machine", default="dgx-h100")
    parser.add_argument("--rest", type=float, default=120.0, help="seconds at rest")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    found = measure(arguments.machine, arguments.rest)
    print(json.dumps(found, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(found))
    good = found["rss_mib"] < LIMIT_MIB and found["cpu_pct"] < LIMIT_CPU_PCT
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
