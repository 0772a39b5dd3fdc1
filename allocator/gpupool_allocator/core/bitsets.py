"""Sets of nodes as whole numbers: bit n is node number n.

An intersection over 12,500 nodes is one operation on 1.6 KB, which is what lets a
decision look at a whole pool without looking at any node of it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

EXACT_VALUES_MAX = 64
"""Distinct amounts of one class that are told apart by ``Threshold.reach``."""


def bits(mask: int) -> Iterator[int]:
    """Node numbers in ``mask``, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def without(mask: int, other: int) -> int:
    """``mask`` less the nodes of ``other``; a third of what ``mask & ~other`` costs."""
    return mask ^ (mask & other)


def size_class(amount: int) -> int:
    """Geometric class of an amount, four to an octave; grows with the amount."""
    if amount < 4:
        return amount
    octave = amount.bit_length() - 3
    return (octave << 2) + (amount >> octave)


class Threshold:
    """Nodes by an amount that each has: who has at least so much, who has least of it.

    Masks are cumulative by class, so a question is one look-up. Amounts inside the
    class of the question are told apart while they are few, which pools of like
    hosts are. ``_occupied`` are the classes that some node is in, in order.
    """

    __slots__ = ("_at_least", "_occupied", "_values")

    def __init__(self) -> None:
        self._at_least: list[int] = [0]
        self._occupied: list[int] = []
        self._values: list[dict[int, int]] = [{}]

    def move(self, nodes: int, old: int | None, new: int | None) -> None:
        """Changes the amount that each node of a mask has; None: they are not there."""
        if old == new:
            return
        old_class = -1 if old is None else size_class(old)
        new_class = -1 if new is None else size_class(new)
        while len(self._at_least) <= new_class:
            self._at_least.append(0)
            self._values.append({})
        low, high = sorted((old_class, new_class))
        self._at_least[low + 1 : high + 1] = [
            mask ^ nodes for mask in self._at_least[low + 1 : high + 1]
        ]
        for number, amount in ((old_class, old), (new_class, new)):
            if amount is None:
                continue
            values = self._values[number]
            if not values:
                insort(self._occupied, number)
            mask = values.get(amount, 0) ^ nodes
            if mask:
                values[amount] = mask
                continue
            del values[amount]
            if not values:
                self._occupied.pop(bisect_left(self._occupied, number))

    def reach(self, need: int) -> tuple[int, int]:
        """Nodes that may have ``need``, and those of them that surely have it."""
        number = size_class(need)
        if number >= len(self._at_least):
            return 0, 0
        if need == 0:
            return self._at_least[0], self._at_least[0]
        sure = self._at_least[number + 1] if number + 1 < len(self._at_least) else 0
        values = self._values[number]
        if len(values) > EXACT_VALUES_MAX:
            return self._at_least[number], sure
        for amount, mask in values.items():
            if amount >= need:
                sure ^= mask  # which has none of them yet
        return sure, sure

    def tightest(self, mask: int) -> int:
        """Those nodes of ``mask`` that are in the lowest class found in it."""
        classes, at_least = self._occupied, self._at_least
        low, high = 0, len(classes)  # all of mask is in the class at low or above
        while high - low > 1:
            middle = (low + high) // 2
            if mask & at_least[classes[middle]] == mask:
                low = middle
            else:
                high = middle
        return without(mask, at_least[classes[high]]) if high < len(classes) else mask

    def largest(self, mask: int) -> int:
        """The largest amount that a node of ``mask`` has; 0 for no node."""
        low, high = 0, len(self._at_least)  # some of mask is in class low or above
        while high - low > 1:
            middle = (low + high) // 2
            if mask & self._at_least[middle]:
                low = middle
            else:
                high = middle
        for amount in sorted(self._values[low], reverse=True):
            if self._values[low][amount] & mask:
                return amount
        return 0

    def descending(self, mask: int) -> Iterator[int]:
        """The nodes of ``mask``, class by class, those with most first."""
        for at_least in reversed(self._at_least):
            if mask & at_least:
                yield mask & at_least
                mask = without(mask, at_least)

    def masks(self) -> dict[int, int]:
        """Nodes by exact amount, for checks."""
        return {amount: mask for values in self._values for amount, mask in values.items()}
