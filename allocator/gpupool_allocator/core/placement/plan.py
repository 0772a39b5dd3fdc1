"""From a request to a place for every member, all or nothing.

Nothing is booked: nodes that a plan has put members on are copied, and further members
are tried on the copies. Each run of alike members takes the tightest place next, be it
on such a copy or on a node fresh from the index.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from gpupool.model.ids import HoldId, NodeId
from gpupool.model.lease import Explanation, Place
from gpupool.model.limits import MEMBERS_MAX
from gpupool.model.request import LeaseSpec, Level, TopologyConstraint
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.capacity import NodeCapacity
from gpupool_allocator.core.placement.fit import Parts, Rank, UnitFit, fit, fit_unit, take
from gpupool_allocator.core.placement.need import Need, asks_the_unknown, needs_of
from gpupool_allocator.core.placement.reasons import Shortfall, explanation_of
from gpupool_allocator.core.placement.search import Effort, candidates, host_masks, may_take


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMember:
    """One member and its place."""

    group: str
    index: int
    rank: int
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A place for every member, in rank order.

    ``nodes_touched`` counts the nodes that were looked at one by one.
    """

    members: tuple[PlannedMember, ...]
    nodes_touched: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplaced:
    """There is no place now.

    ``never``: such a request cannot be answered however long it waits. ``too_large``: it has
    its places, and its lease would not be one stored record.
    """

    explanation: Explanation
    never: bool
    too_large: bool = False
    nodes_touched: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """``times`` alike units of ``size`` members, all parts of a unit on one node."""

    parts: Parts
    times: int
    spread_max: int | None
    size: int


@dataclass(slots=True)
class _Trial:
    """What a plan that is being made has used so far."""

    nodes: dict[int, NodeCapacity] = field(default_factory=dict[int, NodeCapacity])
    members: dict[int, int] = field(default_factory=dict[int, int])
    placed: list[tuple[int, Need, Place]] = field(default_factory=list[tuple[int, Need, Place]])


def plan(
    books: Books,
    spec: LeaseSpec,
    passes: frozenset[HoldId] = frozenset(),
    *,
    exclude: frozenset[NodeId] = frozenset(),
) -> Plan | Unplaced:
    """Places every member of ``spec``, or says why not.

    ``passes`` are the holds that the request may use the places of; no member goes to
    a node of ``exclude``. Changes nothing; the same books and request give the same
    answer.
    """
    allowed = books.index.reachable(passes)
    for node_id in exclude:
        allowed &= ~(1 << books.node(node_id).number)
    needs = needs_of(books.index, spec)
    effort = Effort()
    shortfall: Shortfall | None = None
    if len(needs) == 1 and spec.groups[0].replicas == 1:
        return _plan_one(books, needs[0], passes, allowed, effort)
    for runs in _attempts(books, spec, needs):
        trial = _Trial()
        failed = _place_all(books, spec, runs, passes, allowed, trial, effort)
        if failed is None:
            return Plan(members=_ranked(spec, trial), nodes_touched=effort.looked)
        shortfall = failed
    assert shortfall is not None, "a request without groups"
    return Unplaced(
        explanation=explanation_of(books, shortfall, passes),
        never=_is_hopeless(books, spec, runs_of(spec, needs)),
        nodes_touched=effort.looked,
    )


def _plan_one(
    books: Books,
    need: Need,
    passes: frozenset[HoldId],
    allowed: int,
    effort: Effort,
) -> Plan | Unplaced:
    """Places a single member: the tightest node that takes it, without any trial.

    Most requests are such; no constraint between members can bind them.
    """
    parts = ((need, 1),)
    within = allowed
    if need.group.node_selectors:
        within = books.index.labels.passing(within, need.group.node_selectors)
    for number in candidates(books, parts, within, passes, effort):
        effort.looked += 1
        found = fit(books.node_numbered(number), need, passes)
        if found is not None:
            member = PlannedMember(group=need.group.name, index=0, rank=0, place=found.place)
            return Plan(members=(member,), nodes_touched=effort.looked)
        effort.failed += 1
    shortfall = Shortfall(
        parts=parts,
        placed=0,
        wanted=1,
        used=frozenset(),
        excluded=books.index.reachable(passes) & ~allowed,
        spread_max=None,
        bounded=effort.bounded,
    )
    return Unplaced(
        explanation=explanation_of(books, shortfall, passes),
        never=asks_the_unknown(books.index, need),
        nodes_touched=effort.looked,
    )


def runs_of(spec: LeaseSpec, needs: tuple[Need, ...], *, preferred: bool = False) -> list[Run]:
    """The runs that a request is placed as, in the order of its groups.

    ``preferred``: a node that is preferred is taken as required.
    """
    if _on_one_node(spec.topology, preferred):
        size = sum(group.replicas for group in spec.groups)
        parts = tuple((need, need.group.replicas) for need in needs)
        return [Run(parts, 1, _forbidden_above(spec), size)]
    runs: list[Run] = []
    for need in needs:
        topology = need.group.topology
        spread = topology.max_per_domain if topology.spread is Level.NODE else None
        replicas = need.group.replicas
        if _on_one_node(topology, preferred):
            runs.append(Run(((need, replicas),), 1, spread, replicas))
        else:
            runs.append(Run(((need, 1),), replicas, spread, 1))
    return runs


def _forbidden_above(spec: LeaseSpec) -> int | None:
    """Members that one node may have, where a group may not have all of its own on one."""
    return min(
        (
            group.topology.max_per_domain
            for group in spec.groups
            if group.topology.spread is Level.NODE
            and group.replicas > group.topology.max_per_domain
        ),
        default=None,
    )


def _on_one_node(topology: TopologyConstraint, preferred: bool) -> bool:
    return topology.required is Level.NODE or (preferred and topology.preferred is Level.NODE)


def _is_hopeless(books: Books, spec: LeaseSpec, runs: list[Run]) -> bool:
    """The request contradicts itself, or asks for memory that no GPU can tell.

    Hardware that is only missing or too small is no such thing: it may be added.
    """
    lease_max = spec.topology.max_per_domain if spec.topology.spread is Level.NODE else None
    return any(
        run.size > _left(_smaller(run.spread_max, lease_max), 0)
        or any(asks_the_unknown(books.index, need) for need, _ in run.parts)
        for run in runs
    )


def _attempts(books: Books, spec: LeaseSpec, needs: tuple[Need, ...]) -> Iterator[list[Run]]:
    """Ways to go about it, best first: what is preferred, then what is required.

    The largest members go first; where that leads nowhere, those with the fewest nodes.
    """
    topologies = [spec.topology, *(group.topology for group in spec.groups)]
    prefers = any(each.preferred is Level.NODE for each in topologies)
    for preferred in (True, False) if prefers else (False,):
        runs = runs_of(spec, needs, preferred=preferred)
        if len(runs) == 1:
            yield runs
            continue
        largest = sorted(runs, key=_largest_first)
        yield largest
        width = {id(run): _width(books, run) for run in runs}
        scarcest = sorted(largest, key=lambda run: width[id(run)])
        if scarcest != largest:
            yield scarcest


def _width(books: Books, run: Run) -> int:
    """Nodes that may take a unit of the run, about."""
    may = may_take(books.index, run.parts[0][0], books.index.known)
    return (may & host_masks(books.index, run.parts)[0]).bit_count()


def _largest_first(run: Run) -> tuple[int, ...]:
    gpu_pct = cpu = memory = 0
    for need, count in run.parts:
        share = need.slice.share_pct if need.slice else 0
        gpu_pct += count * (need.whole_count * 100 + share)
        cpu += count * need.group.cpu_milli
        memory += count * need.group.host_memory_mib
    kinds = min(len(need.kinds) for need, _ in run.parts)
    return (-gpu_pct, kinds, -cpu, -memory, run.parts[0][0].position)


def _place_all(
    books: Books,
    spec: LeaseSpec,
    runs: list[Run],
    passes: frozenset[HoldId],
    allowed: int,
    trial: _Trial,
    effort: Effort,
) -> Shortfall | None:
    """Fills ``trial``; what was missing where it cannot be filled."""
    lease_max = spec.topology.max_per_domain if spec.topology.spread is Level.NODE else None
    for run in runs:
        in_group: dict[int, int] = {}
        last = run is runs[-1]
        failed = _place_run(books, run, passes, allowed, trial, effort, in_group, lease_max, last)
        if failed:
            return Shortfall(
                parts=run.parts,
                placed=len(trial.placed),
                wanted=sum(group.replicas for group in spec.groups),
                used=frozenset(trial.members),
                excluded=books.index.reachable(passes) & ~allowed,
                spread_max=_smaller(run.spread_max, lease_max),
                bounded=effort.bounded,
            )
    return None


def _place_run(
    books: Books,
    run: Run,
    passes: frozenset[HoldId],
    allowed: int,
    trial: _Trial,
    effort: Effort,
    in_group: dict[int, int],
    lease_max: int | None,
    last: bool,
) -> bool:
    """Places one run; True when it failed."""
    index = books.index
    within = allowed
    for need, _ in run.parts:
        within = index.labels.passing(within, need.group.node_selectors)

    def open_for(number: int) -> bool:
        """Whether the spread limits let one more unit onto a node."""
        group_left = _left(run.spread_max, in_group.get(number, 0))
        return min(group_left, _left(lease_max, trial.members.get(number, 0))) >= run.size

    used: list[tuple[Rank, int, UnitFit]] = []
    for number, node in trial.nodes.items():
        if within >> number & 1:
            within ^= 1 << number
            _push(used, number, node, run, passes, open_for)
    if run.size > _left(_smaller(run.spread_max, lease_max), 0):
        return True
    fresh = candidates(books, run.parts, within, passes, effort)
    next_fresh: tuple[Rank, int, UnitFit] | None = None
    for turn in range(run.times):
        if next_fresh is None:
            next_fresh = _next_fitting(books, fresh, run, passes, effort)
        if used and (next_fresh is None or used[0][0] <= next_fresh[0]):
            _, number, found = heappop(used)
        elif next_fresh is not None:
            (_, number, found), next_fresh = next_fresh, None
        else:
            return True
        trial.placed.extend((number, need, place) for need, place in found.places)
        if last and turn + 1 == run.times:
            return False
        node = trial.nodes.get(number) or books.node_numbered(number).copy()
        trial.nodes[number] = node
        for need, place in found.places:
            take(node, need, place)
        in_group[number] = in_group.get(number, 0) + run.size
        trial.members[number] = trial.members.get(number, 0) + run.size
        if turn + 1 < run.times:
            _push(used, number, node, run, passes, open_for)
    return False


def _push(
    used: list[tuple[Rank, int, UnitFit]],
    number: int,
    node: NodeCapacity,
    run: Run,
    passes: frozenset[HoldId],
    open_for: Callable[[int], bool],
) -> None:
    """Queues a node that the plan already uses, if one more unit fits there."""
    found = fit_unit(node, run.parts, passes) if open_for(number) else None
    if found is not None:
        heappush(used, (found.rank, number, found))


def _next_fitting(
    books: Books,
    fresh: Iterator[int],
    run: Run,
    passes: frozenset[HoldId],
    effort: Effort,
) -> tuple[Rank, int, UnitFit] | None:
    for number in fresh:
        effort.looked += 1
        found = fit_unit(books.node_numbered(number), run.parts, passes)
        if found is not None:
            return found.rank, number, found
        effort.failed += 1
    return None


def _smaller(one: int | None, other: int | None) -> int | None:
    limits = [limit for limit in (one, other) if limit is not None]
    return min(limits) if limits else None


def _left(limit: int | None, used: int) -> int:
    return MEMBERS_MAX if limit is None else limit - used


def _ranked(spec: LeaseSpec, trial: _Trial) -> tuple[PlannedMember, ...]:
    """Members by rank: by group, and inside it node by node, so neighbours are near."""
    by_group: list[list[tuple[int, Place]]] = [[] for _ in spec.groups]
    for number, need, place in trial.placed:
        by_group[need.position].append((number, place))
    members: list[PlannedMember] = []
    for group, placed in zip(spec.groups, by_group, strict=True):
        placed.sort(key=lambda each: each[0])
        for index, (_, place) in enumerate(placed):
            rank = len(members)
            members.append(PlannedMember(group=group.name, index=index, rank=rank, place=place))
    return tuple(members)
