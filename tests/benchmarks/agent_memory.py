"""Memory and CPU of one agent at rest on an 8-GPU host.

usage: python -m tests.benchmarks.agent_memory [--machine KIND] [--rest SECONDS] [--json FILE]

The agent runs in a process of its own over the simulated driver of a described
machine, with its socket and its metrics, connected to an allocator that only
listens. The simulation's own memory is in the figure, so the real one is smaller.
Exits 1 when it is over the limit of 60 MiB.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMIT_MIB = 60.0


async def measure(machine: str, rest_s: float) -> dict[str, Any]:
    """Start the agent, let it rest, read what the kernel says about it."""
    from tests.agent_allocator import TinyAllocator, until

    allocator = TinyAllocator(report_interval_s=5.0)
    address = await allocator.start()
    with tempfile.TemporaryDirectory() as folder:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.benchmarks.agent_memory",
            "--machine",
            machine,
            "--agent",
            address,
            folder,
            env={**os.environ, "MALLOC_ARENA_MAX": "2"},
        )
        try:
            await until(lambda: allocator.devices, "the agent's devices")
            assert all(each.clean for each in allocator.devices.values())
            await asyncio.sleep(rest_s / 2)
            before_s = cpu_s(child.pid)
            await asyncio.sleep(rest_s / 2)
            cpu_pct = 100 * (cpu_s(child.pid) - before_s) / (rest_s / 2)
            figures = {
                "machine": machine,
                "devices": len(allocator.devices),
                "rss_mib": round(status_mib(child.pid, "VmRSS"), 1),
                "peak_rss_mib": round(status_mib(child.pid, "VmHWM"), 1),
                "private_mib": round(private_mib(child.pid), 1),
                "cpu_pct": round(cpu_pct, 2),
            }
        finally:
            child.terminate()
            await child.wait()
    await allocator.stop()
    return figures


def status_mib(pid: int, field: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def private_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("Private_"))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run_agent(machine: str, address: str, folder: Path) -> None:
    """The measured process: one agent with everything that a real one has on."""
    from gpupool_agent.agent import Agent
    from gpupool_agent.metrics import serve_metrics
    from gpupool_agent.settings import AgentSettings
    from gpupool_agent.simulated.host import SimulatedHost
    from gpupool_agent.simulated.nvml_library import install
    from gpupool_agent.simulated.specs import parse_node

    install()
    settings = AgentSettings(
        node_id="host",
        allocators=(address,),
        state_dir=folder / "state",
        socket=folder / "agent.sock",
        run_dir=folder,
    )
    host = SimulatedHost(parse_node(f"{machine}:host"), folder / "host", folder / "pci", settings)
    await host.start()
    agent = host._agent
    assert isinstance(agent, Agent)
    serve_metrics(agent, 0)
    await host.failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="dgx-h100")
    parser.add_argument("--rest", type=float, default=20.0, help="seconds at rest")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--agent", nargs=2, metavar=("ADDRESS", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.agent:
        address, folder = arguments.agent
        asyncio.run(run_agent(arguments.machine, address, Path(folder)))
        return 0
    figures = asyncio.run(measure(arguments.machine, arguments.rest))
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures))
    return 0 if figures["rss_mib"] < LIMIT_MIB else 1


if __name__ == "__main__":
    sys.exit(main())
