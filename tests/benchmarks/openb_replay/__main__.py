"""The published openb trace as real leases: real agents, real gRPC, a durable store.

    tests/benchmarks/openb --nodes FILE --pods FILE [--seeds 42,43,44] [--json FILE]

Starts an allocator (SQLite, grain 1 %) and the hosts of the node list as simulated
nodes, offers the pods through the SDK from several client processes, keeps what is
granted, checks every promise from outside, and gives everything back. A pod that does
not fit is refused at once, as in the published protocol.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from scripts.demo_programs import DemoError
from tests.benchmarks.openb_replay.figures import Figures
from tests.benchmarks.openb_replay.live import LivePool
from tests.benchmarks.openb_replay.offering import HolderLostError, holders
from tests.benchmarks.openb_replay.replay import ChecksFailedError, Replay
from tests.benchmarks.openb_replay.trace import TracePod, arrivals, read_nodes, read_pods

from gpupool import AsyncClient
from gpupool.errors import GpupoolError
from gpupool_agent.signals import stop_on_signals

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def orders(options: argparse.Namespace, capacity_milli: int) -> list[tuple[str, list[TracePod]]]:
    """Names and pods of the orders to offer."""
    pods = read_pods(options.pods)
    if not options.seeds:
        return [("file order", pods)]
    return [
        (f"seed {seed}", arrivals(pods, capacity_milli, options.arrived_pct, seed))
        for seed in options.seeds
    ]


async def measure(options: argparse.Namespace, work: Path) -> list[Figures]:
    """All orders, one after the other, on one pool. ChecksFailedError, DemoError, ..."""
    hosts = read_nodes(options.nodes)
    capacity_milli = 1000 * sum(host.gpus for host in hosts)
    pool = LivePool(work, options.nodes.resolve(), hosts)
    try:
        print(f"starting {len(hosts)} hosts in {options.fleets} processes", flush=True)
        await pool.start(options.fleets)
        print(
            f"{len(hosts)} nodes connected after {pool.connected_s:.1f} s, "
            f"{capacity_milli // 1000} GPUs offered after {pool.offered_s:.1f} s",
            flush=True,
        )
        figures: list[Figures] = []
        async with (
            AsyncClient(pool.address) as client,
            holders(pool.address, options.clients, work / "logs") as processes,
        ):
            replay = Replay(pool, client, processes, hosts, options.in_flight)
            for name, pods in orders(options, capacity_milli):
                figures.append(await replay.run(name, pods))
                print("  " + "\n  ".join(figures[-1].lines()), flush=True)
        write(options, pool, figures)
        return figures
    finally:
        killed = await asyncio.to_thread(pool.stop)
        if killed:
            print(f"had to be killed: {', '.join(killed)}", file=sys.stderr, flush=True)


def write(options: argparse.Namespace, pool: LivePool, figures: list[Figures]) -> None:
    """Writes the figures where they were asked for."""
    if options.json is None:
        return
    content = {
        "connected_s": round(pool.connected_s, 2),
        "offered_s": round(pool.offered_s, 2),
        "fleets": options.fleets,
        "clients": options.clients,
        "in_flight": options.in_flight,
        "runs": [asdict(each) for each in figures],
    }
    options.json.write_text(json.dumps(content, indent=2) + "\n")


async def run(options: argparse.Namespace, work: Path) -> int:
    """Measures until done or told to stop; the exit code."""
    told = asyncio.create_task(stop_on_signals(signal.SIGINT, signal.SIGTERM).wait())
    measuring = asyncio.create_task(measure(options, work))
    told.add_done_callback(lambda _: measuring.cancel())
    try:
        figures = await measuring
    except asyncio.CancelledError:
        print("stopped", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except (ChecksFailedError, DemoError, HolderLostError, GpupoolError, TimeoutError) as error:
        print(f"FAILED: {error}\nlogs are in {work / 'logs'}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    mean = statistics.mean(each.allocated_pct for each in figures)
    print(f"mean of {len(figures)}: {mean:.2f} % of the GPU share allocated; every check passed")
    if mean < options.min_allocated_pct:
        print(f"FAILED: {options.min_allocated_pct} % were to be allocated", file=sys.stderr)
        return EXIT_FAILED
    return 0


def main() -> int:
    """Parses the command line and runs."""
    options = parser().parse_args()
    # What the caller's shell says about another pool must not count here.
    for name in [name for name in os.environ if name.startswith("GPUPOOL_")]:
        del os.environ[name]
    work = Path(tempfile.mkdtemp(prefix="gpupool-openb-"))
    status = asyncio.run(run(options, work))
    if status != EXIT_FAILED:
        shutil.rmtree(work)
    return status


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="tests/benchmarks/openb",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--nodes", type=Path, required=True, metavar="FILE", help="hosts: sn, cpu_milli, ...")
    add("--pods", type=Path, required=True, metavar="FILE", help="pods, also as .csv.gz")
    which = made.add_mutually_exclusive_group()
    which.add_argument("--seeds", type=seeds, default=[], metavar="N,N", help="shuffle with each")
    which.add_argument("--in-order", action="store_true", help="as in the file (the default)")
    add("--arrived-pct", type=whole(1, 1000), default=100, help="shuffled: offer so much (100)")
    add("--fleets", type=whole(1, 64), default=2, help="processes of hosts (2)")
    add("--clients", type=whole(1, 64), default=3, help="client processes (3)")
    add("--in-flight", type=whole(1, 4096), default=32, help="pods on their way at a time (32)")
    add("--min-allocated-pct", type=float, default=0.0, metavar="PCT", help="fail below this mean")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    return made


def seeds(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def whole(low: int, high: int) -> Callable[[str], int]:
    """Reads a whole number in ``low``..``high``."""

    def read(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not in {low}..{high}")
        return int(text)

    return read


if __name__ == "__main__":
    sys.exit(main())
