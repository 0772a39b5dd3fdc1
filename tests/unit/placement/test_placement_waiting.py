"""When a waiting request is asked again, and which places are kept for it."""

from collections.abc import Callable
from math import inf

from tests.unit.placement.pools import all_of, ask, key, part, place, pool, share, whole

from gpupool.model.ids import HoldId, LeaseId, NodeId
from gpupool.model.request import Level, TopologyConstraint
from gpupool_allocator.core.placement import may_fit_now, soonest

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def ending(**times: float) -> Callable[[LeaseId], float]:
    """Ends by lease; any other lease has no known end."""
    return lambda lease: times.get(str(lease), inf)


def test_c82_a_change_elsewhere_does_not_wake_a_request() -> None:
    books = pool("a", "b", gpus=2)
    books.book(key("x"), place("a", all_of("a", 0)), uid=1)
    books.book(key("y"), place("b", all_of("b", 0), all_of("b", 1)), uid=1)
    assert not may_fit_now(books, ask(whole(2)), [A, B])
    books.unbook(key("y"))
    assert may_fit_now(books, ask(whole(2)), [B])
    assert not may_fit_now(books, ask(whole(2)), [A])
    assert not may_fit_now(books, ask(whole(3)), [A, B])
    assert not may_fit_now(books, ask(whole(2)), [NodeId("gone")])


def test_a_request_of_one_member_is_answered_exactly() -> None:
    books = pool("a", gpus=1)
    books.book(key("x"), place("a", share("a", 0, 10, 41_000)), uid=1)
    assert may_fit_now(books, ask(part(10, memory_mib=40_920), uid=1), [A])
    assert not may_fit_now(books, ask(part(10, memory_mib=40_921), uid=1), [A])
    assert not may_fit_now(books, ask(part(10), uid=2), [A])


def test_a_gang_is_woken_only_when_there_are_gpus_for_all_of_it() -> None:
    books = pool("a", "b", gpus=2)
    books.book(key("x"), place("a", all_of("a", 0)), uid=1)
    assert may_fit_now(books, ask(whole(1), 3), [B])
    assert not may_fit_now(books, ask(whole(1), 4), [B])


def test_holds_count_for_waking() -> None:
    books = pool("a", gpus=1)
    hold = frozenset({HoldId("h")})
    books.hold_node(A, hold)
    assert not may_fit_now(books, ask(whole()), [A])
    assert may_fit_now(books, ask(whole()), [A], hold)
    books.hold_node(A, frozenset())
    books.hold_device(books.devices_of(A)[0], hold)
    assert not may_fit_now(books, ask(whole()), [A])
    assert may_fit_now(books, ask(whole()), [A], hold)


def test_the_node_whose_leases_end_first_is_kept() -> None:
    books = pool("a", "b", gpus=2)
    books.book(key("late"), place("a", all_of("a", 0)), uid=1)
    books.book(key("early"), place("b", all_of("b", 0)), uid=1)
    books.book(key("later"), place("b", all_of("b", 1)), uid=1)
    ends = ending(late=300.0, early=100.0, later=200.0)
    assert soonest(books, ask(whole(2)), ends, 50.0) == (200.0, (B,))
    assert soonest(books, ask(whole(1)), ends, 50.0) == (50.0, (A,))


def test_without_known_ends_the_fewest_leases_are_waited_for() -> None:
    books = pool("a", "b", gpus=2)
    books.book(key("one"), place("a", all_of("a", 0)), uid=1)
    books.book(key("two"), place("a", all_of("a", 1)), uid=1)
    books.book(key("both"), place("b", all_of("b", 0), all_of("b", 1)), uid=1)
    assert soonest(books, ask(whole(2)), ending(), 0.0) == (inf, (B,))
    assert soonest(books, ask(whole(2)), ending(one=10.0, two=20.0), 0.0) == (20.0, (A,))


def test_a_lease_with_several_members_on_a_node_is_waited_for_once() -> None:
    books = pool("a", "b", gpus=2)
    books.book(key("gang", 0), place("a", all_of("a", 0)), uid=1)
    books.book(key("gang", 1), place("a", all_of("a", 1)), uid=1)
    books.book(key("x"), place("b", all_of("b", 0)), uid=1)
    books.book(key("y"), place("b", all_of("b", 1)), uid=1)
    assert soonest(books, ask(whole(2)), ending(), 0.0) == (inf, (A,))


def test_a_gang_is_given_as_many_nodes_as_it_needs() -> None:
    books = pool("a", "b", "c", gpus=2)
    for node, lease in (("a", "x"), ("b", "y"), ("c", "z")):
        books.book(key(lease), place(node, all_of(node, 0), all_of(node, 1)), uid=1)
    ends = ending(x=30.0, y=10.0, z=20.0)
    assert soonest(books, ask(whole(2), 2), ends, 0.0) == (20.0, (B, C))
    assert soonest(books, ask(whole(1), 2), ends, 0.0) == (10.0, (B,))
    spread = TopologyConstraint(spread=Level.NODE, max_per_domain=1)
    assert soonest(books, ask(whole(1), 2, lease_topology=spread), ends, 0.0) == (20.0, (B, C))


def test_no_node_is_kept_for_what_none_can_take() -> None:
    books = pool("a", "b", gpus=2)
    assert soonest(books, ask(whole(3)), ending(), 0.0) == (inf, ())
    assert soonest(books, ask(whole(2), 3), ending(), 0.0) == (inf, ())
    books.hold_node(A, frozenset({HoldId("operator")}))
    books.offer_node(B, False)
    assert soonest(books, ask(whole()), ending(), 0.0) == (inf, ())
