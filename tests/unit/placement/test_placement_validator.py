"""The validator turns down every kind of wrong plan, whoever made it."""

from dataclasses import replace

import pytest
from tests.unit.placement.pools import (
    all_of,
    ask,
    inventory,
    key,
    offer,
    part,
    place,
    placed,
    pool,
    share,
    uuid_of,
    whole,
)

from gpupool.model.ids import HoldId, NodeId
from gpupool.model.lease import Place
from gpupool.model.request import LabelSelector, LeaseSpec, Level, TopologyConstraint
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.placement import Plan, PlannedMember, validate


def planned(*places: Place) -> Plan:
    """A plan made by hand for one group."""
    members = tuple(
        PlannedMember(group="main", index=rank, rank=rank, place=each)
        for rank, each in enumerate(places)
    )
    return Plan(members=members, nodes_touched=0)


def wrong(books: Books, spec: LeaseSpec, *places: Place) -> str:
    """What the validator says against a plan."""
    said = validate(books, spec, planned(*places))
    assert said is not None
    return said


def test_a_right_plan_passes() -> None:
    books = pool("a", "b")
    spec = ask(whole(2), 3, cpu_milli=10, host_memory_mib=20)
    assert validate(books, spec, placed(books, spec)) is None


def test_c04_one_device_for_two_members_of_a_plan() -> None:
    books = pool("a")
    spec = ask(whole(), 2)
    assert "is not free" in wrong(
        books, spec, place("a", all_of("a", 0)), place("a", all_of("a", 0))
    )


def test_c04_one_device_twice_in_a_member() -> None:
    books = pool("a")
    said = wrong(books, ask(whole(2)), place("a", all_of("a", 0), all_of("a", 0)))
    assert "named twice" in said


def test_c04_a_device_that_is_granted_already() -> None:
    books = pool("a")
    books.book(key("x"), place("a", all_of("a", 0)), uid=1)
    books.book(key("y"), place("a", share("a", 1, 10)), uid=1000)
    assert "is not free" in wrong(books, ask(whole()), place("a", all_of("a", 0)))
    assert "is not free" in wrong(books, ask(whole()), place("a", all_of("a", 1)))
    slice_of_0 = place("a", share("a", 0, 10, 8192))
    assert "granted whole already" in wrong(books, ask(part(10)), slice_of_0)


def test_more_share_or_memory_than_there_is() -> None:
    books = pool("a")
    books.book(key("x"), place("a", share("a", 0, 60, 50_000)), uid=1000)
    assert "share 110 %" in wrong(books, ask(part(50)), place("a", share("a", 0, 50, 40_960)))
    spec = ask(part(10, memory_mib=40_000))
    assert "memory 90000 MiB" in wrong(books, spec, place("a", share("a", 0, 10, 40_000)))
    twice = [place("a", share("a", 1, 60, 49_152))] * 2
    assert "share 120 %" in wrong(books, ask(part(60), 2), *twice)


def test_another_users_device() -> None:
    books = pool("a")
    books.book(key("x"), place("a", share("a", 0, 10)), uid=1, shared_trust=True)
    mine = place("a", share("a", 0, 10, 8192))
    assert "uid 1," in wrong(books, ask(part(10), uid=2), mine)
    assert validate(books, ask(part(10), uid=2, shared_trust=True), planned(mine)) is None


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([], "members: 0"),
        ([place("a", all_of("a", 0))] * 2, "members: 2"),
        ([place("z", all_of("z", 0))], "not known"),
        ([place("a", all_of("b", 0))], "is not on the node"),
        ([place("a")], "0 devices instead of 1"),
        ([place("a", all_of("a", 0), cpu_milli=1)], "CPU or host memory"),
        ([place("a", share("a", 0, 100, 81_920))], "not granted whole"),
        ([place("a", all_of("a", 0, memory_mib=5))], "not granted whole"),
    ],
)
def test_a_plan_that_is_not_what_was_asked_for(places: list[Place], said: str) -> None:
    assert said in wrong(pool("a", "b"), ask(whole()), *places)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (share("a", 0, 20, 16_384), "share 20 % instead of 10 %"),
        (share("a", 0, 10, 9000), "memory 9000 MiB instead of 8192 MiB"),
        (all_of("a", 0), "share 100 %"),
    ],
)
def test_a_slice_that_is_not_what_was_asked_for(made: object, said: str) -> None:
    assert said in wrong(pool("a"), ask(part(10)), Place(node_id=NodeId("a"), devices=(made,)))  # type: ignore[arg-type]


def test_ranks_out_of_order() -> None:
    books = pool("a")
    spec = ask(whole(), 2)
    first, second = placed(books, spec).members
    swapped = Plan(members=(replace(first, rank=1), replace(second, rank=0)), nodes_touched=0)
    assert "ranks" in (validate(books, spec, swapped) or "")


def test_what_may_not_be_used() -> None:
    books = pool("a")
    spec, right = ask(whole()), place("a", all_of("a", 0))
    hold = frozenset({HoldId("h")})
    books.offer_device(uuid_of("a", 0), False)
    assert "is not offered" in wrong(books, spec, right)
    books.offer_device(uuid_of("a", 0), True)
    books.hold_device(uuid_of("a", 0), hold)
    assert "held by h" in wrong(books, spec, right)
    assert validate(books, spec, planned(right), hold) is None
    books.hold_device(uuid_of("a", 0), frozenset())
    books.hold_node(NodeId("a"), hold)
    assert "held by h" in wrong(books, spec, right)
    assert validate(books, spec, planned(right), hold) is None
    books.hold_node(NodeId("a"), frozenset())
    books.offer_node(NodeId("a"), False)
    assert "not offered" in wrong(books, spec, right)


def test_hardware_that_was_not_asked_for() -> None:
    books = Books(grain_pct=10)
    offer(books, "a", inventory("a", 1, sliceable=False, labels={"zone": "x"}))
    right = place("a", all_of("a", 0))
    assert "model" in wrong(books, ask(whole(), models=("h10",)), right)
    assert "has not the" in wrong(books, ask(whole(min_memory_mib=90_000)), right)
    assert "no slices" in wrong(books, ask(part(10)), place("a", share("a", 0, 10, 8192)))
    assert "no multiple" in wrong(books, ask(part(15)), place("a", share("a", 0, 15, 12_288)))
    label = LabelSelector(key="zone", values=("y",))
    assert "label zone" in wrong(books, ask(whole(), selectors=(label,)), right)


def test_more_cpu_or_host_memory_than_there_is() -> None:
    books = pool("a")
    books.book(key("x"), place("a", cpu_milli=99_999, host_memory_mib=999_999), uid=1)
    cpu, memory = ask(cpu_milli=2), ask(host_memory_mib=2)
    assert "CPU 100001" in wrong(books, cpu, place("a", cpu_milli=2))
    assert "host memory 1000001" in wrong(books, memory, place("a", host_memory_mib=2))


def test_members_apart_or_together_against_the_request() -> None:
    books = pool("a", "b")
    one_node = TopologyConstraint(required=Level.NODE)
    spread = TopologyConstraint(spread=Level.NODE, max_per_domain=1)
    apart = [place("a", all_of("a", 0)), place("b", all_of("b", 0))]
    together = [place("a", all_of("a", 0)), place("a", all_of("a", 1))]
    assert "2 nodes" in wrong(books, ask(whole(), 2, lease_topology=one_node), *apart)
    assert "group main" in wrong(books, ask(whole(), 2, topology=one_node), *apart)
    assert "2 members" in wrong(books, ask(whole(), 2, lease_topology=spread), *together)
    assert "group main" in wrong(books, ask(whole(), 2, topology=spread), *together)
