"""Where and when a request that waits will fit: the places to keep for it.

Each candidate node is emptied in thought, lease by lease as they end, and notes when
its next unit of the request fits. The earliest of all nodes are chosen.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

from gpupool.model.ids import HoldId, LeaseId, NodeId
from gpupool.model.request import LeaseSpec, Level
from gpupool_allocator.core.bitsets import bits
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.capacity import BookingKey, NodeCapacity, UnclaimedKey
from gpupool_allocator.core.placement.fit import fit_unit, take
from gpupool_allocator.core.placement.need import needs_of
from gpupool_allocator.core.placement.plan import Run, runs_of
from gpupool_allocator.core.placement.reasons import hardware

CANDIDATES_MIN = 128
"""Nodes looked at, plus two for each unit of the request: those with most free GPU."""

Ends = Callable[[LeaseId], float]


@dataclass(slots=True)
class _Future:
    """A node as it will be: ``time`` and ``waits`` are what it took to get there.

    ``leases`` are those still on it, first to end last.
    """

    node: NodeCapacity
    leases: list[tuple[float, LeaseId, list[BookingKey]]]
    time: float
    waits: int = 0
    members: int = 0

    def copy(self) -> "_Future":
        return _Future(self.node.copy(), list(self.leases), self.time, self.waits, self.members)


def soonest(
    books: Books,
    spec: LeaseSpec,
    ends: Ends,
    now: float,
    passes: frozenset[HoldId] = frozenset(),
) -> tuple[float, tuple[NodeId, ...]]:
    """When the request will fit and on which nodes, as far as can be foreseen.

    ``ends`` tells when a lease will end, inf where nobody knows; then those nodes are
    chosen that wait for the fewest leases. The time is inf where it is not known;
    without any nodes, the nodes looked at will not do even when empty.
    """
    futures: dict[int, _Future] = {}
    soonest_s = now
    nodes: dict[NodeId, None] = {}
    cap = spec.topology.max_per_domain if spec.topology.spread is Level.NODE else inf
    runs = runs_of(spec, needs_of(books.index, spec))
    for run in runs:
        last = run is runs[-1]
        openings: list[tuple[float, int, int]] = []
        for number in _candidates(books, run, passes):
            if number not in futures:
                futures[number] = _future(books.node_numbered(number), ends, now)
            limit = _limit(run, futures[number], cap)
            # Copies are most of the work: what no later run looks at is used up.
            trial = futures[number] if last else futures[number].copy()
            openings.extend(
                (time, waits, number) for time, waits in _openings(trial, run, limit, passes)
            )
        openings.sort()
        if len(openings) < run.times:
            return inf, ()
        chosen: dict[int, int] = {}
        for time, _, number in openings[: run.times]:
            soonest_s = max(soonest_s, time)
            chosen[number] = chosen.get(number, 0) + 1
        for number, units in chosen.items():
            nodes[books.node_numbered(number).node_id] = None
            if last:
                continue
            for _ in _openings(futures[number], run, units, passes):
                futures[number].members += run.size
    return soonest_s, tuple(nodes)


def _candidates(books: Books, run: Run, passes: frozenset[HoldId]) -> list[int]:
    index = books.index
    mask = index.reachable(passes) & hardware(index, run.parts)
    for need, _ in run.parts:
        mask = index.labels.passing(mask, need.group.node_selectors)
    found: list[int] = []
    for nodes in index.free_gpu_pct.descending(mask):
        for number in bits(nodes):
            if len(found) == CANDIDATES_MIN + 2 * run.times:
                return found
            found.append(number)
    return found


def _future(node: NodeCapacity, ends: Ends, now: float) -> _Future:
    by_lease: dict[tuple[LeaseId, bool], list[BookingKey]] = {}
    for key in node.bookings:
        by_lease.setdefault((key.lease_id, isinstance(key, UnclaimedKey)), []).append(key)
    # Nobody knows when unclaimed work ends, whatever the pool knows of a lease of its name.
    leases = [
        (inf if unclaimed else ends(lease_id), lease_id, keys)
        for (lease_id, unclaimed), keys in by_lease.items()
    ]
    # Of leases that end together the one with most devices frees most.
    leases.sort(key=lambda each: (-each[0], _devices(node, each[2]), each[1]))
    return _Future(node.copy(), leases, now)


def _devices(node: NodeCapacity, keys: list[BookingKey]) -> int:
    return sum(len(node.bookings[key].place.devices) for key in keys)


def _limit(run: Run, future: _Future, cap: float) -> int:
    """Units of a run that the spread limits let onto a node."""
    left = min(cap - future.members, run.spread_max or inf)
    return int(min(run.times, left // run.size))


def _openings(
    future: _Future, run: Run, limit: int, passes: frozenset[HoldId]
) -> Iterator[tuple[float, int]]:
    """When each next unit fits and after how many leases; changes ``future``."""
    found = 0
    while found < limit:
        unit = fit_unit(future.node, run.parts, passes)
        if unit is not None:
            for need, place in unit.places:
                take(future.node, need, place)
            found += 1
            yield future.time, future.waits
        elif future.leases:
            end, _, keys = future.leases.pop()
            future.time, future.waits = max(future.time, end), future.waits + 1
            for key in keys:
                future.node.give(key)
        else:
            return
