"""Thresholds say the same as a list of amounts does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool_allocator.core.bitsets import EXACT_VALUES_MAX, Threshold, bits, size_class

amounts = st.lists(st.integers(0, 5000), max_size=40)


def threshold_of(values: list[int]) -> Threshold:
    """Node n has the n-th amount."""
    threshold = Threshold()
    for number, value in enumerate(values):
        threshold.move(1 << number, None, value)
    return threshold


@given(amounts)
def test_nodes_that_change_alike_may_move_together(values: list[int]) -> None:
    together = Threshold()
    for value in set(values):
        together.move(sum(1 << n for n, each in enumerate(values) if each == value), None, value)
    assert together.masks() == threshold_of(values).masks()
    for need in values:
        assert together.reach(need) == threshold_of(values).reach(need)


def test_bits_are_counted_from_the_lowest() -> None:
    assert list(bits(0b101001)) == [0, 3, 5]
    assert list(bits(0)) == []


def test_classes_grow_with_the_amount_four_to_an_octave() -> None:
    classes = [size_class(amount) for amount in range(100_000)]
    assert classes == sorted(classes)
    assert size_class(1 << 20) - size_class(1 << 19) == 4
    assert size_class(16_777_216) < 256


@given(amounts, st.integers(0, 6000))
def test_reach_is_exact_while_amounts_are_few(values: list[int], need: int) -> None:
    maybe, sure = threshold_of(values).reach(need)
    assert maybe == sure
    assert list(bits(sure)) == [n for n, value in enumerate(values) if value >= need]


@pytest.mark.parametrize("need", [4095, 4100, 4200, 5000])
def test_reach_bounds_the_truth_when_amounts_are_many(need: int) -> None:
    values = [*range(4096, 4096 + 2 * EXACT_VALUES_MAX), 9000, 100]
    maybe, sure = threshold_of(values).reach(need)
    truth = sum(1 << n for n, value in enumerate(values) if value >= need)
    assert sure & ~truth == 0
    assert truth & ~maybe == 0


@given(amounts, st.integers(0))
def test_tightest_largest_and_descending_follow_the_classes(values: list[int], pick: int) -> None:
    threshold = threshold_of(values)
    mask = pick & ((1 << len(values)) - 1)
    chosen = {n: size_class(values[n]) for n in bits(mask)}
    least = min(chosen.values(), default=0)
    assert list(bits(threshold.tightest(mask))) == [n for n, c in chosen.items() if c == least]
    assert threshold.largest(mask) == max((values[n] for n in chosen), default=0)
    order = [n for part in threshold.descending(mask) for n in bits(part)]
    assert order == sorted(chosen, key=lambda n: (-chosen[n], n))


@given(amounts, amounts)
def test_moves_leave_nothing_behind(old: list[int], new: list[int]) -> None:
    threshold = threshold_of(old)
    for number in range(max(len(old), len(new))):
        before = old[number] if number < len(old) else None
        after = new[number] if number < len(new) else None
        threshold.move(1 << number, before, after)
    assert threshold.masks() == threshold_of(new).masks()
