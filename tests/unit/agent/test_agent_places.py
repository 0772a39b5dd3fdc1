"""Places at the agent's socket: what one user takes is not missing to the others."""

import pytest

from gpupool_agent.local.places import Places, Seldom


def fill(places: Places, uid: int) -> int:
    """Takes all places that a user gets; how many."""
    taken = 0
    while places.take(uid):
        taken += 1
        assert taken <= 4096
    return taken


def test_one_user_has_a_quarter_and_all_users_leave_an_eighth_to_root() -> None:
    places = Places(256)
    assert [fill(places, uid) for uid in (1000, 1001, 1002, 1003, 1004)] == [64, 64, 64, 32, 0]
    assert fill(places, 0) == 32
    assert fill(places, 1000) == 0
    places.give_back(1000)
    # Back to its own share, and no further.
    assert (places.of(1000), fill(places, 1000), places.of(1000)) == (63, 1, 64)


def test_root_may_have_all_and_then_nobody_else_has_any() -> None:
    places = Places(256)
    assert fill(places, 0) == 256
    assert fill(places, 1000) == 0


def test_what_root_has_beyond_its_part_is_missing_to_all_but_not_what_is_kept_for_it() -> None:
    places = Places(16)
    assert sum(places.take(0) for _ in range(2)) == 2
    assert [fill(places, uid) for uid in (1, 2, 3, 4)] == [4, 4, 4, 2]
    assert fill(places, 0) == 0


@pytest.mark.parametrize(
    ("most", "a_users", "all_users", "then_roots"),
    [(1, 1, 1, 0), (2, 1, 1, 1), (3, 1, 2, 1), (4, 1, 3, 1), (4096, 1024, 3584, 512)],
)
def test_small_and_large_numbers_of_places(
    most: int, a_users: int, all_users: int, then_roots: int
) -> None:
    places = Places(most)
    taken = [fill(places, uid) for uid in range(1, 9)]
    assert (taken[0], sum(taken), fill(places, 0)) == (a_users, all_users, then_roots)
    for uid, count in enumerate(taken, start=1):
        for _ in range(count):
            places.give_back(uid)
        assert places.of(uid) == 0


def test_each_uid_is_named_once_in_a_while() -> None:
    seldom = Seldom(60.0)
    times = ((1, 0.0), (1, 59.0), (2, 59.0), (1, 60.0), (2, 118.9), (1, 119.0), (2, 119.0))
    said = [seldom.due(uid, at_s) for uid, at_s in times]
    assert said == [True, False, True, True, False, False, True]
