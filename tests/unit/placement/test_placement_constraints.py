"""Each constraint of a request, and best fit, on pools small enough to draw."""

import pytest
from tests.unit.placement.pools import (
    all_of,
    ask,
    codes_of,
    grant,
    inventory,
    key,
    nodes_of,
    offer,
    part,
    place,
    placed,
    pool,
    refused,
    share,
    uuid_of,
    whole,
)

from gpupool.model.ids import HoldId, NodeId
from gpupool.model.request import Group, LabelSelector, LeaseSpec, Level, TopologyConstraint
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.placement import Plan, Unplaced, plan, validate

ONE_NODE = TopologyConstraint(required=Level.NODE)


def test_c02_eighty_slices_of_18_percent_go_five_on_each_gpu() -> None:
    books = pool("a", "b", grain_pct=1)
    for number in range(80):
        grant(books, f"lease-{number}", ask(part(18)))
    for node in ("a", "b"):
        counts = [len(books.keys_on(uuid)) for uuid in books.devices_of(NodeId(node))]
        assert counts == [5] * 8
    assert codes_of(refused(books, ask(part(18)))) == {"gpu_busy"}


def test_c02_holds_for_one_gang_of_eighty_too() -> None:
    books = pool("a", "b", grain_pct=1)
    answer = grant(books, "gang", ask(part(18), 80))
    assert sorted(nodes_of(answer)) == ["a"] * 40 + ["b"] * 40
    assert answer.nodes_touched == 2
    assert [member.rank for member in answer.members] == list(range(80))


def test_c64_a_node_is_known_by_its_whole_name_only() -> None:
    books = Books()
    offer(books, "r1", inventory("r1", 1, labels={"rack": "r1"}))
    offer(books, "r10", inventory("r10", 1, labels={"rack": "r10"}))
    books.hold_node(NodeId("r1"), frozenset({HoldId("h")}))
    spec = ask(whole(), selectors=(LabelSelector(key="rack", values=("r10",)),))
    assert nodes_of(grant(books, "abc", spec)) == ["r10"]
    books.hold_node(NodeId("r1"), frozenset())
    assert nodes_of(grant(books, "abc-123", ask(whole()))) == ["r1"]
    books.unbook(key("abc"))
    assert books.bookings_on(NodeId("r10")) == []
    assert [k.lease_id for k, _ in books.bookings_on(NodeId("r1"))] == ["abc-123"]


@pytest.mark.parametrize(
    ("cpu_milli", "host_memory_mib", "code"),
    [
        (100_001, 0, "cpu"),
        (0, 1_000_001, "host_memory"),
        (50_001, 1, "cpu"),
        (1, 600_000, "host_memory"),
    ],
)
def test_c94_a_free_gpu_without_host_resources_is_no_place(
    cpu_milli: int, host_memory_mib: int, code: str
) -> None:
    books = pool("a")
    if cpu_milli <= 100_000:
        grant(books, "first", ask(cpu_milli=50_000, host_memory_mib=500_000))
    answer = refused(books, ask(whole(), cpu_milli=cpu_milli, host_memory_mib=host_memory_mib))
    assert codes_of(answer) == {code}
    assert answer.explanation.summary.startswith(code.replace("_", " "))


def test_a_member_never_spans_nodes_whatever_the_sum_says() -> None:
    books = pool("a", "b", gpus=4)
    answer = refused(books, ask(whole(8)))
    assert codes_of(answer) == {"gpu_count"}


def test_the_tightest_gpu_is_taken_before_a_free_one_is_cut() -> None:
    books = pool("a", "b", gpus=2)
    books.book(key("x"), place("a", share("a", 0, 50)), uid=1000)
    books.book(key("y"), place("b", share("b", 1, 70)), uid=1000)
    assert placed(books, ask(part(30))).members[0].place.devices[0].device_uuid == uuid_of("b", 1)
    assert placed(books, ask(part(40))).members[0].place.devices[0].device_uuid == uuid_of("a", 0)
    assert placed(books, ask(part(60))).members[0].place.devices[0].share_pct == 60


def test_whole_gpus_go_where_fewest_are_free() -> None:
    books = pool("a", "b", "c", gpus=4)
    books.book(key("x"), place("b", all_of("b", 0), all_of("b", 1)), uid=1)
    books.book(key("y"), place("c", all_of("c", 0)), uid=1)
    assert nodes_of(placed(books, ask(whole(2)))) == ["b"]
    assert nodes_of(placed(books, ask(whole(3)))) == ["c"]
    assert nodes_of(placed(books, ask(whole(4)))) == ["a"]


def test_work_without_gpus_keeps_off_nodes_with_free_gpus() -> None:
    books = pool("a", "b", gpus=1)
    books.book(key("x"), place("b", all_of("b", 0)), uid=1)
    assert nodes_of(placed(books, ask(cpu_milli=1000))) == ["b"]


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ("h100", True),
        ("nvidia h100", True),
        ("NVIDIA H100 80GB HBM3", True),
        ("h10", False),
        ("a100", False),
    ],
)
def test_a_model_is_named_in_full_or_by_words(wanted: str, fits: bool) -> None:
    books = pool("a")
    spec = ask(whole(), models=("b200", wanted))
    if fits:
        placed(books, spec)
    else:
        answer = refused(books, spec)
        assert codes_of(answer) == {"model"}
        assert not answer.never, "such a GPU may be added"


def test_least_memory_rules_out_small_gpus() -> None:
    books = Books()
    offer(books, "small", inventory("small", memory_mib=40_000))
    offer(books, "large", inventory("large", memory_mib=80_000))
    assert nodes_of(placed(books, ask(whole(), models=()))) == ["small"]
    assert nodes_of(placed(books, ask(whole(min_memory_mib=40_001)))) == ["large"]
    answer = refused(books, ask(whole(min_memory_mib=80_001)))
    assert "largest GPU has 80000 MiB" in answer.explanation.summary


def test_a_slice_without_memory_gets_its_share_of_it() -> None:
    books = pool("a", memory_mib=81_079)
    assert placed(books, ask(part(10))).members[0].place.devices[0].memory_mib == 8107
    for number in range(10):
        grant(books, f"lease-{number}", ask(part(10)))
    assert books.free_share_pct(uuid_of("a", 0)) == 0
    assert books.free_memory_mib(uuid_of("a", 0)) == 81_079 - 10 * 8107


def test_a_slice_of_memory_alone_takes_no_share() -> None:
    books = pool("a", gpus=1)
    grant(books, "memory", ask(part(memory_mib=10_000)))
    assert books.free_share_pct(uuid_of("a", 0)) == 100
    assert codes_of(refused(books, ask(whole()))) == {"gpu_busy"}
    assert codes_of(refused(books, ask(part(100)))) == {"gpu_memory"}
    grant(books, "share", ask(part(100, memory_mib=71_920)))


def test_slices_of_two_users_share_a_gpu_only_in_mutual_trust() -> None:
    books = pool("a", gpus=1)
    grant(books, "one", ask(part(10), uid=1, shared_trust=True))
    grant(books, "two", ask(part(10), uid=2, shared_trust=True))
    assert codes_of(refused(books, ask(part(10), uid=1))) == {"uid"}
    assert codes_of(refused(books, ask(part(10), uid=3))) == {"uid"}
    grant(books, "three", ask(part(10), uid=3, shared_trust=True))
    books.unbook(key("two"))
    books.unbook(key("three"))
    grant(books, "own", ask(part(10), uid=1))
    assert codes_of(refused(books, ask(part(10), uid=2, shared_trust=True))) == {"uid"}


def test_a_gpu_that_takes_no_slices_is_granted_whole_only() -> None:
    books = Books()
    offer(books, "mig", inventory("mig", 1, sliceable=False))
    answer = refused(books, ask(part(10)))
    assert codes_of(answer) == {"slicing"}
    placed(books, ask(whole()))


def test_selectors_test_presence_value_and_absence() -> None:
    books = Books()
    offer(books, "a", inventory("a", labels={"zone": "x", "old": "yes"}))
    offer(books, "b", inventory("b", labels={"zone": "y"}))
    for selector, nodes in [
        (LabelSelector(key="zone", values=("y",)), ["b"]),
        (LabelSelector(key="old"), ["a"]),
        (LabelSelector(key="old", exclude=True), ["b"]),
        (LabelSelector(key="zone", values=("x", "z"), exclude=True), ["b"]),
    ]:
        assert nodes_of(placed(books, ask(whole(), selectors=(selector,)))) == nodes
    books.put_node(NodeId("b"), inventory("b", labels={"zone": "x"}))
    answer = refused(books, ask(whole(), selectors=(LabelSelector(key="zone", values=("y",)),)))
    assert codes_of(answer) == {"label"}
    assert not answer.never


def test_a_held_node_is_open_only_to_those_who_pass_every_hold() -> None:
    books = pool("a")
    mine, other = HoldId("mine"), HoldId("other")
    books.hold_node(NodeId("a"), frozenset({mine}))
    assert codes_of(refused(books, ask(whole()))) == {"held"}
    placed(books, ask(whole()), frozenset({mine, HoldId("unused")}))
    books.hold_node(NodeId("a"), frozenset({mine, other}))
    assert codes_of(refused(books, ask(whole()), frozenset({mine}))) == {"held"}
    placed(books, ask(whole()), frozenset({mine, other}))


def test_a_held_device_is_open_only_to_those_who_pass() -> None:
    books = pool("a", gpus=2)
    mine = HoldId("mine")
    books.hold_device(uuid_of("a", 0), frozenset({mine}))
    assert placed(books, ask(whole())).members[0].place.devices[0].device_uuid == uuid_of("a", 1)
    assert codes_of(refused(books, ask(whole(2)))) == {"held"}
    assert len(placed(books, ask(whole(2)), frozenset({mine})).members[0].place.devices) == 2


@pytest.mark.parametrize("cause", ["unclean", "faulty"])
def test_a_device_that_is_not_offered_is_no_place_and_says_why(cause: str) -> None:
    books = pool("a", gpus=2)
    books.offer_device(uuid_of("a", 0), False, cause)
    assert placed(books, ask(whole())).members[0].place.devices[0].device_uuid == uuid_of("a", 1)
    assert codes_of(refused(books, ask(whole(2)))) == {cause}


def test_a_gang_is_placed_whole_or_not_at_all() -> None:
    books = pool("a", "b", gpus=4)
    answer = refused(books, ask(whole(2), 5))
    assert answer.explanation.summary.startswith("4 of 5 members fit; ")
    assert not answer.never
    assert sorted(nodes_of(placed(books, ask(whole(2), 4)))) == ["a", "a", "b", "b"]


def test_groups_are_placed_together_largest_first() -> None:
    books = pool("a", "b", gpus=4)
    spec = LeaseSpec(
        groups=(
            Group(name="router", replicas=2, cpu_milli=1000),
            Group(name="decode", replicas=2, accelerator=part(50)),
            Group(name="prefill", replicas=1, accelerator=whole(4)),
        )
    )
    answer = placed(books, spec)
    assert [(m.group, m.index, m.rank) for m in answer.members] == [
        ("router", 0, 0),
        ("router", 1, 1),
        ("decode", 0, 2),
        ("decode", 1, 3),
        ("prefill", 0, 4),
    ]
    prefill, decode = answer.members[4].place.node_id, answer.members[2].place.node_id
    assert prefill != decode


def test_a_group_that_names_its_model_is_not_robbed_by_one_that_does_not() -> None:
    books = Books()
    offer(books, "h", inventory("h", 1, memory_mib=80_000))
    offer(books, "a", inventory("a", 1, model="NVIDIA A100", memory_mib=80_000))
    spec = LeaseSpec(
        groups=(
            Group(name="any", accelerator=whole()),
            Group(name="named", accelerator=whole(), models=("h100",)),
        )
    )
    assert nodes_of(placed(books, spec)) == ["a", "h"]


def test_required_node_keeps_a_lease_or_a_group_on_one_node() -> None:
    books = pool("a", "b", gpus=4)
    books.book(key("x"), place("a", all_of("a", 0)), uid=1)
    assert nodes_of(placed(books, ask(whole(1), 4, topology=ONE_NODE))) == ["b"] * 4
    assert nodes_of(placed(books, ask(whole(2), 2, lease_topology=ONE_NODE))) == ["b"] * 2
    assert codes_of(refused(books, ask(whole(1), 5, lease_topology=ONE_NODE))) == {"gpu_count"}
    books.book(key("y"), place("b", all_of("b", 0)), uid=1)
    later = refused(books, ask(whole(1), 4, topology=ONE_NODE))
    assert not later.never
    assert "4 together" in later.explanation.summary


def test_preferred_node_is_tried_first_and_not_insisted_on() -> None:
    books = pool("a", "b", gpus=4)
    books.book(key("x"), place("a", all_of("a", 0), all_of("a", 1)), uid=1)
    wish = TopologyConstraint(preferred=Level.NODE)
    assert nodes_of(placed(books, ask(whole(1), 3, topology=wish))) == ["b"] * 3
    assert sorted(nodes_of(placed(books, ask(whole(1), 5, topology=wish)))) == ["a"] * 2 + ["b"] * 3


@pytest.mark.parametrize("whose", ["lease", "group"])
def test_spread_limits_the_members_on_one_node(whose: str) -> None:
    books = pool("a", "b", "c", gpus=8)
    spread = TopologyConstraint(spread=Level.NODE, max_per_domain=2)
    keyword = "lease_topology" if whose == "lease" else "topology"

    def wanting(replicas: int) -> LeaseSpec:
        if keyword == "topology":
            return ask(whole(1), replicas, topology=spread)
        return ask(whole(1), replicas, lease_topology=spread)

    nodes = nodes_of(placed(books, wanting(6)))
    assert sorted(nodes) == ["a", "a", "b", "b", "c", "c"]
    answer = refused(books, wanting(7))
    assert codes_of(answer) == {"spread"}
    assert not answer.never


def test_one_node_and_spread_contradict_each_other() -> None:
    books = pool("a")
    both = TopologyConstraint(required=Level.NODE, spread=Level.NODE, max_per_domain=1)
    answer = refused(books, ask(whole(1), 2, lease_topology=both))
    assert answer.never
    assert codes_of(answer) == {"spread"}


def test_a_fabric_is_no_constraint() -> None:
    books = pool("a", "b", gpus=1)
    fabric = TopologyConstraint(required=Level.FABRIC, preferred=Level.FABRIC)
    assert len(placed(books, ask(whole(1), 2, lease_topology=fabric)).members) == 2


def test_gpus_of_one_member_are_of_one_kind_where_they_can_be() -> None:
    books = Books()
    mixed = inventory("m", 2, model="A", memory_mib=1000).devices
    more = tuple(device for device in inventory("n", 3, model="B", memory_mib=1000).devices)
    offer(books, "m", type(inventory("m"))(devices=mixed + more))
    uuids = [s.device_uuid for s in placed(books, ask(whole(3))).members[0].place.devices]
    assert uuids == [uuid_of("n", index) for index in range(3)]
    assert len(placed(books, ask(whole(5))).members[0].place.devices) == 5


def test_equal_nodes_are_taken_in_the_order_of_arrival() -> None:
    books = pool("z", "a", "m", gpus=1)
    order = [nodes_of(grant(books, f"l{n}", ask(whole())))[0] for n in range(3)]
    assert order == ["z", "a", "m"]


def test_the_same_question_gets_the_same_answer_and_changes_nothing() -> None:
    books = pool("a", "b")
    grant(books, "x", ask(part(30)))
    spec = ask(part(20), 30)
    first = placed(books, spec)
    books.check()
    assert placed(books, spec) == first
    assert validate(books, spec, first) is None


def test_nodes_touched_per_grant_do_not_grow_with_the_pool() -> None:
    touched: dict[int, list[int]] = {}
    for size in (20, 1000):
        books = pool(*(f"n{number}" for number in range(size)), gpus=2)
        for number in range(size // 2):
            books.book(key(f"s{number}"), place(f"n{number}", share(f"n{number}", 0, 50)), uid=1000)
        wanted = [ask(part(50)), ask(part(70)), ask(whole(2)), ask(whole(1), cpu_milli=60_000)]
        touched[size] = [placed(books, spec).nodes_touched for spec in wanted]
    assert touched[20] == touched[1000] == [1, 1, 1, 1]


def test_an_excluded_node_is_no_place_and_is_named_as_the_reason() -> None:
    books = pool("a", "b", gpus=1)
    first = plan(books, ask(whole()), exclude=frozenset({NodeId("a")}))
    assert isinstance(first, Plan)
    assert nodes_of(first) == ["b"]
    none = plan(books, ask(whole()), exclude=frozenset({NodeId("a"), NodeId("b")}))
    assert isinstance(none, Unplaced)
    assert codes_of(none) == {"faulty"}


def test_a_group_that_must_spread_is_never_put_on_one_node() -> None:
    """Wanted on one node and spread over nodes at once: a contradiction, or a wish given up."""
    books = pool("n1", "n2")
    spread = TopologyConstraint(spread=Level.NODE)
    group = Group(replicas=2, accelerator=whole(1), topology=spread)
    required = LeaseSpec(groups=(group,), topology=TopologyConstraint(required=Level.NODE))
    refused = plan(books, required)
    assert isinstance(refused, Unplaced)
    assert refused.never
    assert "spread" in {cause.code for cause in refused.explanation.causes}
    preferred = LeaseSpec(groups=(group,), topology=TopologyConstraint(preferred=Level.NODE))
    found = plan(books, preferred)
    assert isinstance(found, Plan)
    assert {member.place.node_id for member in found.members} == {"n1", "n2"}
    assert validate(books, preferred, found) is None
