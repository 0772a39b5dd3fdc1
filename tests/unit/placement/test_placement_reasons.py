"""What a request is told that gets nothing."""

from tests.unit.placement.pools import (
    ask,
    codes_of,
    grant,
    inventory,
    offer,
    part,
    pool,
    refused,
    uuid_of,
    whole,
)

from gpupool.model.ids import HoldId, NodeId
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.placement import Plan, explain, plan


def test_c01_the_24th_slice_of_2000_mib_is_told_that_68_are_left() -> None:
    books = pool("a", gpus=1, memory_mib=46_068)
    for number in range(23):
        grant(books, f"lease-{number}", ask(part(memory_mib=2000)))
    answer = refused(books, ask(part(memory_mib=2000)))
    assert "memory: need 2000 MiB, largest free 68 MiB" in answer.explanation.summary
    assert answer.explanation.nearest_change == "ask for 68 MiB of GPU memory"
    assert [(c.code, c.count, c.unit) for c in answer.explanation.causes] == [
        ("gpu_memory", 1, "node")
    ]
    assert not answer.never


def test_c10_memory_of_a_gpu_that_does_not_know_its_size_is_refused_for_ever() -> None:
    books = pool("spark", gpus=1, memory_mib=None)
    answer = refused(books, ask(part(memory_mib=1000)))
    assert answer.never
    assert codes_of(answer) == {"memory_unknown"}
    assert "unknown" in answer.explanation.summary
    granted = grant(books, "share", ask(part(30)))
    assert granted.members[0].place.devices[0].memory_mib == 0
    assert not refused(books, ask(part(80))).never


def test_memory_that_other_gpus_have_is_waited_for_beside_unknown_ones() -> None:
    books = pool("spark", gpus=1, memory_mib=None)
    offer(books, "h", inventory("h", 1))
    grant(books, "all", ask(whole(min_memory_mib=1)))
    answer = refused(books, ask(part(memory_mib=1000)))
    assert not answer.never
    assert codes_of(answer) == {"memory_unknown", "gpu_busy"}


def test_counts_of_all_causes_add_up_to_the_pool() -> None:
    books = pool("gone", "held", "busy", "unclean", "short", gpus=1)
    offer(books, "other", inventory("other", 1, model="A100"))
    books.offer_node(NodeId("gone"), False)
    books.hold_node(NodeId("held"), frozenset({HoldId("h")}))
    books.offer_device(uuid_of("unclean", 0), False)
    grant(books, "busy", ask(whole(), models=("h100",)))
    books.put_node(NodeId("short"), inventory("short", 1, cpu_milli=500))
    answer = refused(books, ask(whole(), models=("h100",), cpu_milli=1000))
    counts = {cause.code: cause.count for cause in answer.explanation.causes}
    assert counts == {
        "unreachable": 1,
        "held": 1,
        "model": 1,
        "gpu_busy": 1,
        "unclean": 1,
        "cpu": 1,
    }
    assert answer.explanation.summary.startswith("cpu: need 1000 milli, largest free 500 milli")
    assert answer.explanation.nearest_change == "ask for 500 milli of cpu on one node"


def test_the_largest_free_amounts_are_named() -> None:
    books = pool("a", gpus=4)
    grant(books, "x", ask(whole(2)))
    answer = refused(books, ask(whole(4)))
    assert "GPUs: need 4 on one node, largest free 2 on one node" in answer.explanation.summary
    assert "ask for 2 GPUs" in answer.explanation.nearest_change
    grant(books, "y", ask(whole(1)))
    grant(books, "z", ask(part(70)))
    answer = refused(books, ask(part(40)))
    assert "share: need 40 %, largest free 30 %" in answer.explanation.summary


def test_an_empty_pool_says_so_and_lets_requests_wait() -> None:
    answer = refused(Books(), ask(whole()))
    assert answer.explanation.summary == "the pool has no nodes"
    assert not answer.never


def test_unreachable_hardware_counts_as_hardware() -> None:
    books = pool("a")
    books.offer_node(NodeId("a"), False)
    answer = refused(books, ask(whole(8)))
    assert codes_of(answer) == {"unreachable"}
    assert not answer.never


def test_a_hopeless_request_costs_no_look_at_any_node() -> None:
    books = pool(*(f"n{number}" for number in range(50)))
    assert refused(books, ask(whole(9))).nodes_touched == 0
    assert refused(books, ask(whole(), models=("b200",))).nodes_touched == 0


def test_explain_names_every_cause_of_every_node() -> None:
    books = pool("a", "b", gpus=1)
    books.offer_node(NodeId("a"), False)
    books.hold_node(NodeId("a"), frozenset({HoldId("h")}))
    verdicts = explain(books, ask(whole(2), cpu_milli=100_001))
    assert [verdict.node_id for verdict in verdicts] == ["a", "b"]
    assert [c.code for c in verdicts[0].causes] == ["unreachable", "held", "gpu_count", "cpu"]
    assert [c.code for c in verdicts[1].causes] == ["gpu_count", "cpu"]
    assert [v.causes for v in explain(books, ask(whole()))][1] == ()


def test_explain_is_bounded() -> None:
    books = pool(*(f"n{number}" for number in range(1001)), gpus=0)
    assert len(explain(books, ask(whole()))) == 1000


def test_a_search_that_reaches_its_bound_says_so() -> None:
    """Amounts all different and just too small: the index cannot tell, so nodes are tried."""
    books = Books(grain_pct=1)
    for number in range(400):
        name = f"n{number}"
        offer(books, name, inventory(name, 1, memory_mib=100_000))
        grant(books, name, ask(part(1, memory_mib=100_000 - 60_000 + number)))
        books.hold_node(NodeId(name), frozenset({HoldId("filled")}))
    for number in range(400):
        books.hold_node(NodeId(f"n{number}"), frozenset())
    answer = plan(books, ask(part(1, memory_mib=60_001)))
    assert not isinstance(answer, Plan)
    assert "search_bound" in codes_of(answer)
    assert answer.nodes_touched <= 600


def test_the_edge_of_a_coarse_class_does_not_hide_a_node_that_fits() -> None:
    """300 nodes just too small come first; the one that surely fits is found all the same."""
    books = Books(grain_pct=1)
    for number in range(300):
        name = f"n{number}"
        offer(books, name, inventory(name, 1, memory_mib=100_000))
        grant(books, name, ask(part(20, memory_mib=41_000)))
        books.hold_node(NodeId(name), frozenset({HoldId("filled")}))
    offer(books, "good", inventory("good", 1, memory_mib=100_000))
    grant(books, "good", ask(part(1, memory_mib=1_000)))
    for number in range(300):
        books.hold_node(NodeId(f"n{number}"), frozenset())
    answer = plan(books, ask(part(1, memory_mib=59_001)))
    assert isinstance(answer, Plan)
    assert answer.members[0].place.node_id == "good"
    assert answer.nodes_touched <= 10


def test_a_lost_gpu_is_faulty_and_the_free_ones_beside_it_are_counted() -> None:
    books = pool("lost", "busy", gpus=8)
    books.offer_device(uuid_of("lost", 3), False, "faulty")
    grant(books, "all", ask(whole(8)))
    answer = refused(books, ask(whole(8)))
    assert codes_of(answer) == {"faulty", "gpu_busy"}
    assert "largest free 7 on one node" in answer.explanation.summary
    assert answer.explanation.nearest_change == (
        "1 more free GPU on one node, or ask for 7 GPUs in each member"
    )


def test_a_gang_is_told_of_a_held_node_that_would_take_a_member() -> None:
    books = pool("free", "held", gpus=8)
    books.hold_node(NodeId("held"), frozenset({HoldId("h")}))
    answer = refused(books, ask(whole(8), 2))
    assert answer.explanation.summary.startswith("1 of 2 members fit")
    assert answer.explanation.nearest_change == "remove a hold on a node, or ask for fewer members"


def test_a_hold_on_a_node_that_could_not_help_is_no_advice() -> None:
    books = pool("free", gpus=8)
    offer(books, "small", inventory("small", 1))
    books.hold_node(NodeId("small"), frozenset({HoldId("h")}))
    answer = refused(books, ask(whole(8), 2))
    assert answer.explanation.nearest_change == "ask for fewer members"
