"""How long one placement decision takes: plan and validation, without I/O.

    python -m tests.benchmarks.decision [--gpus N ...] [--load PCT ...] [--json FILE]

Nodes have 8 GPUs. A loaded pool holds slices of several users, whole GPUs and gangs,
of which a part has left again in random order, so that there are holes everywhere.
Every measured decision is booked and as much is ended elsewhere, outside the timing.

All is done in several passes from the same seed, each on a pool built anew, so that each
decision is timed once a pass in the same state and with caches as cold. The least of a
decision's times is what it costs; what the neighbours of a shared core add differs from
pass to pass. A loop of fixed work, timed beside each decision, shows how much they add.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpupool.model.assignment import AssignmentKey
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId
from gpupool.model.inventory import Device, NodeInventory
from gpupool.model.request import GpuSlice, Group, LeaseSpec, WholeGpus
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.placement import Plan, plan, validate

GPUS_PER_NODE = 8
USERS = 40
TARGET_US = 250.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; times in microseconds, nodes touched per decision.

    ``least``: of each decision the least CPU time of all passes. ``cpu`` and ``wall``:
    of all times as they came. ``loop``: CPU time of the loop of fixed work.
    """

    gpus: int
    load_pct: int
    request: str
    decisions: int
    placed: int
    least_p50_us: float
    least_p99_us: float
    cpu_p50_us: float
    cpu_p99_us: float
    wall_p50_us: float
    wall_p99_us: float
    loop_min_us: float
    loop_p50_us: float
    loop_p99_us: float
    touched_mean: float
    touched_max: int


class Load:
    """A pool and the leases on it."""

    def __init__(self, gpus: int, seed: int) -> None:
        self.books = Books(grain_pct=10)
        self.gpus = gpus
        self.draw = random.Random(seed)
        self.keys: list[tuple[AssignmentKey, int]] = []
        self.used_pct = 0
        self._made = 0
        for number in range(gpus // GPUS_PER_NODE):
            self._add_node(NodeId(f"node-{number:05}"))

    def _add_node(self, node_id: NodeId) -> None:
        devices = tuple(
            Device(
                uuid=DeviceUuid(f"GPU-{node_id}-{index}"),
                model="NVIDIA H100 80GB HBM3",
                memory_mib=81_079,
                index=index,
            )
            for index in range(GPUS_PER_NODE)
        )
        inventory = NodeInventory(devices=devices, cpu_milli=192_000, host_memory_mib=2_000_000)
        self.books.put_node(node_id, inventory)
        self.books.offer_node(node_id, True)
        for device in devices:
            self.books.offer_device(device.uuid, True)

    def slice_spec(self) -> LeaseSpec:
        """A slice of 10 to 70 % for one of the users."""
        group = Group(
            accelerator=GpuSlice(share_pct=10 * self.draw.randint(1, 7)),
            cpu_milli=1000 * self.draw.randint(0, 4),
            host_memory_mib=1024 * self.draw.randint(0, 16),
        )
        return LeaseSpec(groups=(group,), uid=self.draw.randrange(USERS))

    def whole_spec(self) -> LeaseSpec:
        """1, 2, 4 or 8 whole GPUs on one node."""
        count = self.draw.choice((1, 1, 1, 2, 2, 4, 8))
        group = Group(
            accelerator=WholeGpus(count=count),
            cpu_milli=20_000 * count,
            host_memory_mib=200_000 * count,
        )
        return LeaseSpec(groups=(group,), uid=self.draw.randrange(USERS))

    def any_spec(self) -> LeaseSpec:
        """One or the other."""
        return self.slice_spec() if self.draw.random() < 0.6 else self.whole_spec()

    def fill_to(self, load_pct: int) -> None:
        """Grants until above the load, then ends random leases until there are holes."""
        target = self.gpus * load_pct
        refused = 0
        while self.used_pct < min(target * 1.1, self.gpus * 98) and refused < 200:
            refused += not self.grant(self.any_spec())
        while self.used_pct > target:
            self.end_one()

    def grant(self, spec: LeaseSpec) -> bool:
        """Places and books one lease."""
        answer = plan(self.books, spec)
        if isinstance(answer, Plan):
            self.book(spec, answer)
            return True
        return False

    def book(self, spec: LeaseSpec, answer: Plan) -> None:
        """Books a plan of one member."""
        self._made += 1
        key = AssignmentKey(lease_id=LeaseId(f"lease-{self._made}"), rank=0)
        place = answer.members[0].place
        self.books.book(key, place, uid=spec.uid)
        pct = sum(share.share_pct for share in place.devices)
        self.used_pct += pct
        self.keys.append((key, pct))

    def end_one(self) -> None:
        """Ends a random lease."""
        position = self.draw.randrange(len(self.keys))
        self.keys[position], self.keys[-1] = self.keys[-1], self.keys[position]
        key, pct = self.keys.pop()
        self.books.unbook(key)
        self.used_pct -= pct


@dataclass(slots=True)
class Times:
    """What was measured of one row, decision by decision, pass after pass."""

    cpu_us: list[list[float]] = field(default_factory=list[list[float]])
    wall_us: list[float] = field(default_factory=list[float])
    loop_us: list[float] = field(default_factory=list[float])
    touched: list[int] = field(default_factory=list[int])
    placed: int = 0


def fixed_work_us() -> float:
    """CPU time of a loop that always does the same."""
    start = time.thread_time_ns()
    total = 0
    for number in range(500):
        total += number * number
    return (time.thread_time_ns() - start) / 1000


def measure(load: Load, load_pct: int, name: str, decisions: int, times: Times) -> None:
    """Times decisions one by one: one pass of a row."""
    draws: dict[str, Callable[[], LeaseSpec]] = {
        "slice": load.slice_spec,
        "whole": load.whole_spec,
    }
    times.placed, times.touched = 0, []
    cpu_us: list[float] = []
    for _ in range(decisions):
        spec = draws[name]()
        times.loop_us.append(fixed_work_us())
        start, cpu_start = time.perf_counter_ns(), time.thread_time_ns()
        answer = plan(load.books, spec)
        wrong = validate(load.books, spec, answer) if isinstance(answer, Plan) else None
        cpu_us.append((time.thread_time_ns() - cpu_start) / 1000)
        times.wall_us.append((time.perf_counter_ns() - start) / 1000)
        times.touched.append(answer.nodes_touched)
        if wrong:
            raise AssertionError(wrong)
        if isinstance(answer, Plan):
            times.placed += 1
            load.book(spec, answer)
            while load.used_pct > load.gpus * load_pct and load.keys:
                load.end_one()
    times.cpu_us.append(cpu_us)


def row_of(gpus: int, load_pct: int, name: str, times: Times) -> Row:
    """The figures of one row."""
    least = [min(of_one) for of_one in zip(*times.cpu_us, strict=True)]
    every = [us for of_pass in times.cpu_us for us in of_pass]
    return Row(
        gpus=gpus,
        load_pct=load_pct,
        request=name,
        decisions=len(least),
        placed=times.placed,
        least_p50_us=percentile(least, 50),
        least_p99_us=percentile(least, 99),
        cpu_p50_us=percentile(every, 50),
        cpu_p99_us=percentile(every, 99),
        wall_p50_us=percentile(times.wall_us, 50),
        wall_p99_us=percentile(times.wall_us, 99),
        loop_min_us=min(times.loop_us),
        loop_p50_us=percentile(times.loop_us, 50),
        loop_p99_us=percentile(times.loop_us, 99),
        touched_mean=sum(times.touched) / len(least),
        touched_max=max(times.touched),
    )


def percentile(values: list[float], percent: int) -> float:
    """The value that ``percent`` of all are below."""
    return sorted(values)[len(values) * percent // 100]


HEAD = (
    "                           least of passes    all, CPU us      all, wall us     "
    "fixed loop, CPU us\n"
    "   GPUs  load  request  placed   p50   p99      p50    p99       p50    p99    "
    "least   p50    p99  touched\n"
)


def line_of(row: Row) -> str:
    """A row as it is printed."""
    return (
        f"{row.gpus:7}  {row.load_pct:3} %  {row.request:7}  {row.placed:6} "
        f"{row.least_p50_us:5.0f} {row.least_p99_us:5.0f}    "
        f"{row.cpu_p50_us:5.0f}  {row.cpu_p99_us:5.0f}     "
        f"{row.wall_p50_us:5.0f}  {row.wall_p99_us:5.0f}    "
        f"{row.loop_min_us:5.0f} {row.loop_p50_us:5.0f}  {row.loop_p99_us:5.0f}  "
        f"{row.touched_max:7}\n"
    )


def passes_over(gpus: int, args: argparse.Namespace) -> dict[tuple[int, str], Times]:
    """Every row of one size of pool, pass after pass."""
    rows: dict[tuple[int, str], Times] = {}
    for number in range(args.passes):
        sys.stderr.write(f"{gpus} GPUs, pass {number + 1} of {args.passes}\n")
        load = Load(gpus, args.seed)
        for load_pct in args.load:
            load.fill_to(load_pct)
            gc.collect()
            gc.freeze()  # as the daemon does after its start: the pool is no garbage
            for name in ("slice", "whole"):
                times = rows.setdefault((load_pct, name), Times())
                measure(load, load_pct, name, args.decisions, times)
        load.books.check()
        gc.unfreeze()
    return rows


def main() -> int:
    """Prints the table; exit 1 where a p99 of all CPU times is above the target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--load", type=int, nargs="+", default=[0, 50, 90])
    parser.add_argument("--decisions", type=int, default=5_000)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    sys.stdout.write(HEAD)
    for gpus in args.gpus:
        for (load_pct, name), times in passes_over(gpus, args).items():
            rows.append(row_of(gpus, load_pct, name, times))
            sys.stdout.write(line_of(rows[-1]))
            sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0 if all(row.cpu_p99_us < TARGET_US for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
