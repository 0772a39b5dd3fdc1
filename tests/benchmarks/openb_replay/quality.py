"""How much of the openb cluster gets allocated: the placement alone, no network.

    python -m tests.benchmarks.openb_replay.quality --nodes FILE --pods FILE [--json FILE]

Published on the same lists at 100 % arrived, mean of ten seeds: best fit 92.86 %.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.benchmarks.openb_replay.trace import TraceNode, TracePod, arrivals, read_nodes, read_pods

from gpupool.model.assignment import AssignmentKey
from gpupool.model.ids import LeaseId, NodeId
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.placement import Plan, plan, validate


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Outcome of one shuffle."""

    seed: int
    pods: int
    placed: int
    allocated_pct: float
    seconds: float


def pool_of(nodes: list[TraceNode]) -> Books:
    """Books with every node of the trace free and offered."""
    books = Books(grain_pct=1)
    for node in nodes:
        node_id = NodeId(node.name)
        books.put_node(node_id, node.inventory())
        books.offer_node(node_id, True)
        for uuid in books.devices_of(node_id):
            books.offer_device(uuid, True)
    return books


def replay(nodes: list[TraceNode], pods: list[TracePod], seed: int, arrived_pct: int) -> Quality:
    """Offers the pods of one shuffle; one that does not fit is dropped, none leaves."""
    capacity_milli = 1000 * sum(node.gpus for node in nodes)
    stream = arrivals(pods, capacity_milli, arrived_pct, seed)
    books = pool_of(nodes)
    placed = allocated_milli = 0
    start = time.perf_counter()
    for number, pod in enumerate(stream):
        spec = pod.spec()
        answer = plan(books, spec)
        if not isinstance(answer, Plan):
            continue
        wrong = validate(books, spec, answer)
        if wrong:
            raise AssertionError(f"pod {pod.name}: {wrong}")
        key = AssignmentKey(lease_id=LeaseId(str(number)), rank=0)
        books.book(key, answer.members[0].place, uid=spec.uid)
        placed += 1
        allocated_milli += pod.demand_milli
    seconds = time.perf_counter() - start
    books.check()
    return Quality(
        seed=seed,
        pods=len(stream),
        placed=placed,
        allocated_pct=100 * allocated_milli / capacity_milli,
        seconds=seconds,
    )


def main() -> int:
    """Prints one line a seed and their mean; exit 1 where the mean is below --least."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--pods", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--arrived-pct", type=int, default=100)
    parser.add_argument("--least", type=float, default=92.6, help="least mean allocated %%")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    nodes, pods = read_nodes(args.nodes), read_pods(args.pods)
    results: list[Quality] = []
    for seed in args.seeds:
        one = replay(nodes, pods, seed, args.arrived_pct)
        results.append(one)
        sys.stdout.write(
            f"seed {one.seed}: {one.placed} of {one.pods} pods placed, "
            f"{one.allocated_pct:.2f} % of the GPUs allocated, {one.seconds:.1f} s\n"
        )
    mean = statistics.mean(one.allocated_pct for one in results)
    sys.stdout.write(f"mean: {mean:.2f} % allocated at {args.arrived_pct} % arrived\n")
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in results], indent=2) + "\n")
    return 0 if mean >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())
