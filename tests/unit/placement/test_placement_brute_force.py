"""A request is placed exactly when trying every possibility finds a place."""

import itertools
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.placement.pools import all_of, key, offer, place, share, uuid_of

from gpupool.model.ids import HoldId, NodeId
from gpupool.model.inventory import Device, NodeInventory
from gpupool.model.request import GpuSlice, Group, LeaseSpec, Level, TopologyConstraint, WholeGpus
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.placement import Plan, Unplaced, may_fit_now, plan, validate

MEMORY_MIB = [None, 1000, 1010, 2000]


@dataclass
class Gpu:
    """A GPU as the brute force sees it."""

    model: str
    memory_mib: int | None
    sliceable: bool
    share: int = 0
    memory: int = 0
    users: tuple[tuple[int, bool], ...] = ()
    whole: bool = False
    usable: bool = True


@dataclass
class Host:
    """A node as the brute force sees it."""

    gpus: list[Gpu]
    cpu: int
    usable: bool = True


def takes(host: Host, group: Group, uid: int, trust: bool) -> bool:
    """Puts one member on a host by trying every device, or leaves it as it is."""
    if not host.usable or host.cpu < group.cpu_milli:
        return False
    wanted = group.accelerator
    named = [g for g in host.gpus if g.usable and (not group.models or g.model in group.models)]
    if isinstance(wanted, WholeGpus):
        least = wanted.min_memory_mib
        free = [g for g in named if not g.users and (not least or (g.memory_mib or 0) >= least)]
        if len(free) < wanted.count:
            return False
        for gpu in free[: wanted.count]:
            gpu.whole, gpu.users = True, ((uid, trust),)
    elif isinstance(wanted, GpuSlice):
        fitting = [g for g in named if _takes_slice(g, wanted, uid, trust)]
        if not fitting:
            return False
        gpu = fitting[0]
        gpu.share += wanted.share_pct
        gpu.memory += _memory(gpu, wanted)
        gpu.users += ((uid, trust),)
    host.cpu -= group.cpu_milli
    return True


def _memory(gpu: Gpu, wanted: GpuSlice) -> int:
    return wanted.memory_mib or (gpu.memory_mib or 0) * wanted.share_pct // 100


def _takes_slice(gpu: Gpu, wanted: GpuSlice, uid: int, trust: bool) -> bool:
    friends = {user for user, _ in gpu.users} <= {uid} or (trust and all(t for _, t in gpu.users))
    room = gpu.memory + _memory(gpu, wanted) <= (gpu.memory_mib or 0)
    return (
        gpu.sliceable and not gpu.whole and friends and room and gpu.share + wanted.share_pct <= 100
    )


shares = st.tuples(
    st.sampled_from([10, 30, 60]), st.integers(0, 700), st.integers(1, 2), st.booleans()
)
gpus = st.tuples(
    st.sampled_from(["aa", "bb"]),
    st.sampled_from(MEMORY_MIB),
    st.sampled_from([True, True, True, False]),
    st.one_of(st.just("whole"), st.just("free"), st.just("unusable"), st.lists(shares, max_size=3)),
)
hosts = st.tuples(
    st.lists(gpus, max_size=4),
    st.sampled_from([0, 1000, 1100]),
    st.sampled_from(["", "", "held", "gone"]),
)
accelerators = st.one_of(
    st.none(),
    st.builds(WholeGpus, count=st.integers(1, 3), min_memory_mib=st.sampled_from([0, 1001, 1011])),
    st.builds(
        GpuSlice, share_pct=st.sampled_from([10, 40, 70]), memory_mib=st.sampled_from([0, 600])
    ),
    st.builds(GpuSlice, memory_mib=st.sampled_from([1, 300, 1005])),
)
wishes = st.builds(
    Group,
    accelerator=accelerators,
    models=st.sampled_from([(), ("aa",), ("bb", "cc")]),
    cpu_milli=st.sampled_from([0, 500, 1000, 1050]),
)


def build(described: list[tuple[list[tuple[object, ...]], int, str]]) -> tuple[Books, list[Host]]:
    """The same pool twice: as books, and for the brute force."""
    books, pool = Books(grain_pct=10), list[Host]()
    for number, (cards, cpu, state) in enumerate(described):
        name = f"n{number}"
        devices = tuple(
            Device(uuid=uuid_of(name, i), model=c[0], memory_mib=c[1], sliceable=c[2], index=i)  # type: ignore[arg-type]
            for i, c in enumerate(cards)
        )
        offer(books, name, NodeInventory(devices=devices, cpu_milli=cpu))
        pool.append(Host([Gpu(d.model, d.memory_mib, d.sliceable) for d in devices], cpu))
        for index, card in enumerate(cards):
            _occupy(books, name, index, pool[-1].gpus[index], card[3])
        if state == "held":
            books.hold_node(NodeId(name), frozenset({HoldId("h")}))
        if state == "gone":
            books.offer_node(NodeId(name), False)
        pool[-1].usable = not state
    books.check()
    return books, pool


def _occupy(books: Books, name: str, index: int, gpu: Gpu, state: object) -> None:
    if state == "unusable":
        gpu.usable = False
        books.offer_device(uuid_of(name, index), False)
    elif state == "whole":
        books.book(key(f"{name}-{index}"), place(name, all_of(name, index)), uid=1)
        gpu.whole, gpu.users = True, ((1, False),)
    elif isinstance(state, list):
        for number, (pct, memory_mib, uid, trust) in enumerate(state):
            wanted = GpuSlice(share_pct=pct, memory_mib=memory_mib)
            if not _takes_slice(gpu, wanted, uid, trust):
                continue
            granted = share(name, index, pct, _memory(gpu, wanted))
            books.book(
                key(f"{name}-{index}-{number}"), place(name, granted), uid=uid, shared_trust=trust
            )
            gpu.memory += _memory(gpu, wanted)
            gpu.share += pct
            gpu.users += ((uid, trust),)


def agree(books: Books, spec: LeaseSpec, fits: bool) -> None:
    """The plan says what the brute force found, and is right."""
    answer = plan(books, spec)
    assert isinstance(answer, Plan) is fits, answer
    if isinstance(answer, Plan):
        assert validate(books, spec, answer) is None
    elif isinstance(answer, Unplaced):
        assert sum(c.count for c in answer.explanation.causes) == len(list(books.nodes()))
    if fits:
        assert may_fit_now(books, spec, [node.node_id for node in books.nodes()])


@settings(max_examples=300)
@given(st.lists(hosts, max_size=5), wishes, st.integers(1, 2), st.booleans())
def test_one_member_is_placed_exactly_when_some_node_takes_it(
    described: list[tuple[list[tuple[object, ...]], int, str]], group: Group, uid: int, trust: bool
) -> None:
    books, pool = build(described)
    spec = LeaseSpec(groups=(group,), uid=uid, shared_trust=trust)
    fits = any(takes(host, group, uid, trust) for host in pool)
    agree(books, spec, fits)
    all_nodes = [node.node_id for node in books.nodes()]
    assert may_fit_now(books, spec, all_nodes) is fits


def _taken(host: Host, group: Group, uid: int, trust: bool, limit: int) -> int:
    """Members that a host takes, at most ``limit``."""
    tries = (takes(host, group, uid, trust) for _ in range(limit))
    return sum(itertools.takewhile(bool, tries))


@settings(max_examples=300)
@given(
    st.lists(hosts, max_size=4),
    wishes,
    st.integers(2, 6),
    st.sampled_from(["", "one node", "spread 1", "spread 2"]),
    st.integers(1, 2),
    st.booleans(),
)
def test_a_gang_of_alike_members_is_placed_exactly_when_it_fits(
    described: list[tuple[list[tuple[object, ...]], int, str]],
    group: Group,
    replicas: int,
    shape: str,
    uid: int,
    trust: bool,
) -> None:
    """Alike members: what each node takes does not depend on what the others take."""
    books, pool = build(described)
    limit = {"spread 1": 1, "spread 2": 2}.get(shape, replicas)
    taken = [_taken(host, group, uid, trust, limit) for host in pool]
    fits = max(taken, default=0) >= replicas if shape == "one node" else sum(taken) >= replicas
    topology = TopologyConstraint()
    if shape == "one node":
        topology = TopologyConstraint(required=Level.NODE)
    elif shape:
        topology = TopologyConstraint(spread=Level.NODE, max_per_domain=limit)
    gang = Group(
        replicas=replicas,
        accelerator=group.accelerator,
        models=group.models,
        cpu_milli=group.cpu_milli,
        topology=topology,
    )
    agree(books, LeaseSpec(groups=(gang,), uid=uid, shared_trust=trust), fits)
