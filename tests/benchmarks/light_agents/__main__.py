"""Runs light agents until SIGTERM or SIGINT.

usage: python -m tests.benchmarks.light_agents --allocator HOST:PORT --count N
                                               [--part K/N] [--ready-file FILE]
"""

import argparse
import asyncio
import gc
import json
import resource
import signal
import sys
from pathlib import Path

from tests.benchmarks.light_agents.agent import LightAgent, names

from gpupool_agent.signals import stop_on_signals


async def run(agents: list[LightAgent], ready_file: Path | None) -> None:
    """Until a signal; writes the file once all have been connected."""
    stopping = stop_on_signals(signal.SIGTERM, signal.SIGINT)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(agent.run()) for agent in agents]
        tasks.append(group.create_task(say_ready(agents, ready_file)))
        await stopping.wait()
        for task in tasks:
            task.cancel()


async def say_ready(agents: list[LightAgent], ready_file: Path | None) -> None:
    """Writes the file once each has been connected."""
    for agent in agents:
        await agent.connected_once.wait()
    # All of it stays until the end: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    if ready_file is not None:
        await asyncio.to_thread(ready_file.write_text, json.dumps({"agents": len(agents)}))


def main() -> int:
    """Exit code 0 when asked to stop."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--allocator", required=True, metavar="HOST:PORT")
    parser.add_argument("--count", type=int, required=True, help="nodes, of all parts together")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every Nth node from the Kth")
    parser.add_argument("--ready-file", type=Path)
    options = parser.parse_args()
    part, parts = (int(word) for word in options.part.split("/"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = [LightAgent(name, options.allocator) for name in names(options.count, part, parts)]
    asyncio.run(run(found, options.ready_file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
