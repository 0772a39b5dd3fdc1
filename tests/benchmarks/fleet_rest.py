"""CPU of a fleet of simulated hosts, and of its allocator, while nothing happens.

usage: python -m tests.benchmarks.fleet_rest [--count KIND=COUNT | --nodes-csv FILE]
    [--part K/N] [--rest SECONDS] [--json FILE]

The hosts have real agents with default periods, each with a connection of its own, and
the allocator is the real one. Prints what both use in percent of a core, and for a node.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.demo_programs import DemoError, Programs
from tests.benchmarks.openb_replay.figures import Usage

START_S = 600.0
"""Longest time until all hosts are connected."""

SETTLING_S = 10.0
"""After that: two heartbeats of each, so that what belongs to connecting is over."""


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Start everything, let it rest, and end it. DemoError."""
    programs = Programs(work, {})
    try:
        allocator_ready, fleet_ready = work / "allocator.json", work / "fleet.json"
        allocator = programs.start(
            "gpupool-allocator",
            [
                *("gpupool-allocator", "--log-level", "warning"),
                *("--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"),
                *("--state-dir", work / "allocator", "--ready-file", allocator_ready),
            ],
        )
        served = programs.ready(allocator, allocator_ready)
        which = ["--count", arguments.count]
        if arguments.nodes_csv:
            which = ["--nodes-csv", arguments.nodes_csv.resolve(), "--part", arguments.part]
        fleet = programs.start(
            "fleet",
            [
                *("python", "-m", "gpupool_agent.simulated", *which),
                *("--allocator", f"127.0.0.1:{served['grpc']}", "--control", work / "fleet"),
                *("--state-dir", work / "agents", "--ready-file", fleet_ready),
            ],
        )
        nodes = len(programs.ready(fleet, fleet_ready, limit_s=START_S)["nodes"])
        time.sleep(SETTLING_S)
        pids = (fleet.process.pid, served["pid"])
        before = [Usage.of([pid]) for pid in pids]
        begun_s = time.monotonic()
        time.sleep(arguments.rest)
        after = [Usage.of([pid]) for pid in pids]
        elapsed_s = time.monotonic() - begun_s
        programs.check_alive()
    finally:
        programs.stop()
    figures: dict[str, Any] = {"nodes": nodes, "load": round(os.getloadavg()[0], 1)}
    for name, first, last in zip(("fleet", "allocator"), before, after, strict=True):
        cpu_pct = 100 * (last.cpu_s - first.cpu_s) / elapsed_s
        figures[f"{name}_cpu_pct"] = round(cpu_pct, 2)
        figures[f"{name}_cpu_pct_per_node"] = round(cpu_pct / nodes, 4)
        figures[f"{name}_rss_mib"] = round(last.rss_mib, 1)
    return figures


def main() -> int:
    """Exit code 0, or 1 when a program ended by itself."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", default="dgx-h100=200", metavar="KIND=COUNT")
    parser.add_argument("--nodes-csv", type=Path, metavar="FILE", help="a trace's, instead")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="of the trace's nodes")
    parser.add_argument("--rest", type=float, default=30.0, help="seconds at rest")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gp-") as folder:
        try:
            figures = measure(arguments, Path(folder))
        except DemoError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
