"""The shape index: which nodes look alike for a request, without looking at them.

Nodes of equal shape sit in one cell, a bitset over node numbers. A cell is found by
its head (what is counted, of which kind of device) and a rank inside the head that
sorts tightest first:

* ``WHOLE``: usable devices of a kind with nothing on them; rank: how many.
* ``PART``: partly used devices that a user may join; rank: free share, then class of
  free memory. A device is in the cell of its only user, in ``TRUSTED``'s where all
  on it accept a shared server, and in ``ANY``'s.
* ``JOINED``: all nodes of such a PART head; rank 0. One look says "none of them".
* ``BACK``: devices with nothing on them if a cause (unclean, held) went away, plus
  those of WHOLE; only for nodes where that makes a difference.
* ``TOTAL``: devices of a kind that a node has, in whatever state.

Free CPU, host memory and GPU share are thresholds (bitsets.py). Whether a node is
offered or held is one bit in a mask of its own, so a node that comes or goes does not
touch its cells.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

from gpupool.model.ids import HoldId
from gpupool.model.inventory import Device
from gpupool.model.request import GpuSlice, LabelSelector, WholeGpus
from gpupool_allocator.core.bitsets import Threshold, bits, size_class, without
from gpupool_allocator.core.capacity import DeviceCapacity, Kind, NodeCapacity

WHOLE, PART, JOINED, BACK, TOTAL = "whole", "part", "joined", "back", "total"
TRUSTED, ANY = -1, -2
"""Owners of PART cells besides user ids."""

HELD = "held"
MEMORY_CLASSES = 256
"""More than ``size_class`` has for the largest GPU memory accepted (16 TiB)."""

LABEL_MASKS_MAX = 1024
"""Masks of label values kept ready; others are made again when asked for."""

KINDS_TOLD_MAX = 1024
"""Descriptions of devices whose kind is remembered as they came."""

ANSWERS_MAX = 1024
"""Questions for devices whose kinds are remembered."""

Head = tuple[str, int, int | str]

Asked = tuple[tuple[str, ...], WholeGpus | GpuSlice | None]
"""What decides which kinds answer a member: its models, and what it wants of them."""

Answer = tuple[tuple[Kind, ...], frozenset[int]]
"""Kinds in the order they are tried, and their numbers."""


def part_rank(free_share_pct: int, free_memory_mib: int | None) -> int:
    """Rank of a partly used device; unknown memory counts as none."""
    return free_share_pct * MEMORY_CLASSES + size_class(free_memory_mib or 0)


class Cells:
    """Cells of one head: masks by rank, and the ranks in order."""

    __slots__ = ("masks", "ranks")

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self.ranks: list[int] = []

    def toggle(self, rank: int, nodes: int) -> None:
        """Puts each node of a mask into the cell, or takes it out."""
        old = self.masks.get(rank, 0)
        mask = old ^ nodes
        if not mask:
            del self.masks[rank]
            self.ranks.pop(bisect_left(self.ranks, rank))
            return
        if not old:
            insort(self.ranks, rank)
        self.masks[rank] = mask

    def above(self, rank: int) -> list[int]:
        """Ranks that are not empty, from ``rank`` up."""
        return self.ranks[bisect_left(self.ranks, rank) :]

    def union(self, rank: int = 0) -> int:
        """Nodes in any cell from ``rank`` up."""
        mask = 0
        for each in self.above(rank):
            mask |= self.masks[each]
        return mask


NO_CELLS = Cells()


class Labels:
    """Nodes by their labels."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[str, set[int]]] = {}
        self._ready: dict[LabelSelector, int] = {}

    def change(self, number: int, old: dict[str, str], new: dict[str, str]) -> None:
        """Replaces the labels of a node."""
        if old == new:
            return
        self._ready.clear()
        for key, value in old.items():
            values = self._nodes[key]
            values[value].discard(number)
            if not values[value]:
                del values[value]
            if not values:
                del self._nodes[key]
        for key, value in new.items():
            self._nodes.setdefault(key, {}).setdefault(value, set()).add(number)

    def passing(self, known: int, selectors: tuple[LabelSelector, ...]) -> int:
        """Nodes of ``known`` that pass every selector."""
        for selector in selectors:
            mask = self._mask(selector)
            known = without(known, mask) if selector.exclude else known & mask
        return known

    def _mask(self, selector: LabelSelector) -> int:
        mask = self._ready.get(selector)
        if mask is None:
            values = self._nodes.get(selector.key, {})
            numbers = set[int]()
            for value in selector.values or tuple(values):
                numbers |= values.get(value, set())
            marks = bytearray(max(numbers, default=0) // 8 + 1)
            for number in numbers:
                marks[number >> 3] |= 1 << (number & 7)
            mask = int.from_bytes(marks, "little")
            if len(self._ready) >= LABEL_MASKS_MAX:
                self._ready.pop(next(iter(self._ready)))
            self._ready[selector] = mask
        return mask


class ShapeIndex:
    """Everything that a decision looks at before it looks at a node."""

    def __init__(self) -> None:
        self.kinds: list[Kind] = []
        self.answers: dict[Asked, Answer] = {}
        self.known = 0
        self.offered = 0
        self.held = 0
        self.labels = Labels()
        self.free_cpu_milli = Threshold()
        self.free_host_memory_mib = Threshold()
        self.free_gpu_pct = Threshold()
        self.cpu_milli = Threshold()
        self.host_memory_mib = Threshold()
        self._kinds_told: dict[tuple[str, int | None, bool], Kind] = {}
        self._kind_numbers: dict[tuple[str, int | None, bool], int] = {}
        self._heads: dict[Head, Cells] = {}
        self._placed: dict[int, frozenset[tuple[Head, int]]] = {}
        self._amounts: dict[int, tuple[int, ...]] = {}
        self._labels_of: dict[int, dict[str, str]] = {}
        self._holds_of: dict[int, frozenset[HoldId]] = {}
        self._held_by: dict[HoldId, int] = {}
        self._held_twice = 0

    def kind_of(self, device: Device) -> Kind:
        """The kind of a device, made when it is the first of its kind."""
        told = (device.model, device.memory_mib, device.sliceable)
        kind = self._kinds_told.get(told)
        if kind is None:
            if len(self._kinds_told) >= KINDS_TOLD_MAX:
                self._kinds_told.clear()
            kind = self._kinds_told[told] = self._kind_of(device)
        return kind

    def _kind_of(self, device: Device) -> Kind:
        model = " ".join(device.model.lower().split())
        low = high = device.memory_mib
        if device.memory_mib is not None:
            # Seven leading bits: some hundred kinds of a model at the very most.
            shift = max(0, device.memory_mib.bit_length() - 7)
            low = device.memory_mib >> shift << shift
            high = low + (1 << shift) - 1
        key = (model, low, device.sliceable)
        number = self._kind_numbers.setdefault(key, len(self.kinds))
        if number == len(self.kinds):
            words = frozenset(model.split())
            self.kinds.append(Kind(number, words, low, high, device.sliceable))
            self.answers.clear()
        return self.kinds[number]

    def remember_answer(self, asked: Asked, answer: Answer) -> None:
        """Keeps which kinds answer a member, until another kind of device turns up."""
        if len(self.answers) >= ANSWERS_MAX:
            self.answers.clear()
        self.answers[asked] = answer

    def cells(self, head: str, kind: int, part: int | str = 0) -> Cells:
        """Cells of a head; empty ones where nothing is in it."""
        return self._heads.get((head, kind, part), NO_CELLS)

    def reachable(self, passes: frozenset[HoldId]) -> int:
        """Nodes that are offered and under no hold but those in ``passes``."""
        if not passes:
            return without(self.offered, self.held)
        passed = 0
        for hold in passes:
            passed |= self._held_by.get(hold, 0)
        for number in bits(passed & self._held_twice):
            if not self._holds_of[number] <= passes:
                passed &= ~(1 << number)
        return self.offered & (~self.held | passed)

    def refresh(self, nodes: Iterable[NodeCapacity]) -> None:
        """Takes over everything about these nodes that may have changed.

        Those that change alike move together: at a restart that is a whole pool.
        """
        toggled: dict[tuple[Head, int], int] = {}
        moved: dict[tuple[tuple[int, ...] | None, tuple[int, ...]], int] = {}
        for node in nodes:
            number, bit = node.number, 1 << node.number
            self.known |= bit
            placed = frozenset(shape(node))
            for place in placed ^ self._placed.get(number, frozenset()):
                toggled[place] = toggled.get(place, 0) | bit
            self._placed[number] = placed
            move = self._amounts.get(number), amounts(node)
            moved[move] = moved.get(move, 0) | bit
            self._amounts[number] = move[1]
            labels = node.inventory.labels
            self.labels.change(number, self._labels_of.get(number, {}), labels)
            self._labels_of[number] = labels
        for (head, rank), mask in toggled.items():
            self._toggle(head, rank, mask)
        for (old, new), mask in moved.items():
            self._move(mask, old, new)

    def refresh_access(self, node: NodeCapacity) -> None:
        """Takes over whether a node is offered and what holds it."""
        number, bit = node.number, 1 << node.number
        self.offered = self.offered | bit if node.offered else self.offered & ~bit
        self.held = self.held | bit if node.holds else self.held & ~bit
        twice = len(node.holds) > 1
        self._held_twice = self._held_twice | bit if twice else self._held_twice & ~bit
        for hold in node.holds ^ self._holds_of.get(number, frozenset()):
            mask = self._held_by.get(hold, 0) ^ bit
            if mask:
                self._held_by[hold] = mask
            else:
                del self._held_by[hold]
        self._holds_of[number] = node.holds

    def forget(self, node: NodeCapacity) -> None:
        """Takes a node out; it is neither offered nor held any more."""
        number, bit = node.number, 1 << node.number
        for head, rank in self._placed.pop(number):
            self._toggle(head, rank, bit)
        self._move(bit, self._amounts.pop(number), None)
        self.labels.change(number, self._labels_of.pop(number), {})
        self._holds_of.pop(number, None)
        self.known &= ~bit

    def check(self, nodes: list[NodeCapacity]) -> None:
        """Asserts that the index is what these nodes make it."""
        heads: dict[tuple[Head, int], int] = {}
        sums: list[dict[int, int]] = [{} for _ in self._thresholds()]
        for node in nodes:
            bit = 1 << node.number
            for place in shape(node):
                heads[place] = heads.get(place, 0) | bit
            for masks, amount in zip(sums, amounts(node), strict=True):
                masks[amount] = masks.get(amount, 0) | bit
        mine = {(h, r): m for h, cells in self._heads.items() for r, m in cells.masks.items()}
        assert mine == heads, "index cells differ from the books"
        assert all(c.ranks == sorted(c.masks) for c in self._heads.values()), "ranks out of order"
        assert [t.masks() for t in self._thresholds()] == sums, "index amounts differ"
        assert self.known == sum(1 << n.number for n in nodes), "index knows other nodes"
        assert self.offered == sum(1 << n.number for n in nodes if n.offered), "offered differs"
        assert self.held == sum(1 << n.number for n in nodes if n.holds), "held differs"

    def _thresholds(self) -> tuple[Threshold, ...]:
        """In the order of ``amounts``."""
        return (
            self.free_cpu_milli,
            self.free_host_memory_mib,
            self.free_gpu_pct,
            self.cpu_milli,
            self.host_memory_mib,
        )

    def _toggle(self, head: Head, rank: int, mask: int) -> None:
        cells = self._heads.get(head)
        if cells is None:
            cells = self._heads[head] = Cells()
        cells.toggle(rank, mask)
        if not cells.ranks:
            del self._heads[head]

    def _move(self, mask: int, old: tuple[int, ...] | None, new: tuple[int, ...] | None) -> None:
        for position, threshold in enumerate(self._thresholds()):
            threshold.move(
                mask,
                None if old is None else old[position],
                None if new is None else new[position],
            )


def amounts(node: NodeCapacity) -> tuple[int, ...]:
    """Free CPU, host memory and GPU share of a node, then all its CPU and host memory."""
    gpu_pct = 0
    for device in node.devices.values():
        if device.offered and not device.holds and not device.whole:
            gpu_pct += device.free_share_pct
    return (
        node.free_cpu_milli,
        node.free_host_memory_mib,
        gpu_pct,
        node.inventory.cpu_milli,
        node.inventory.host_memory_mib,
    )


def shape(node: NodeCapacity) -> set[tuple[Head, int]]:
    """Cells that a node belongs to."""
    places: set[tuple[Head, int]] = set()
    whole: dict[int, int] = {}
    back: dict[tuple[int, str], int] = {}
    total: dict[int, int] = {}
    for device in node.devices.values():
        kind = device.kind.number
        if device.present:
            total[kind] = total.get(kind, 0) + 1
        if not device.usable():
            if not device.granted and device.present:
                cause = (kind, HELD if device.offered else device.cause)
                back[cause] = back.get(cause, 0) + 1
        elif not device.granted:
            whole[kind] = whole.get(kind, 0) + 1
        elif not device.whole:
            _part(places, device)
    places.update(((WHOLE, kind, 0), count) for kind, count in whole.items())
    places.update(((TOTAL, kind, 0), count) for kind, count in total.items())
    places.update(
        ((BACK, kind, cause), count + whole.get(kind, 0)) for (kind, cause), count in back.items()
    )
    return places


def _part(places: set[tuple[Head, int]], device: DeviceCapacity) -> None:
    kind = device.kind.number
    rank = part_rank(device.free_share_pct, device.free_memory_mib)
    owners = [ANY]
    if device.sole_uid is not None:
        owners.append(device.sole_uid)
    if device.trusted:
        owners.append(TRUSTED)
    for owner in owners:
        places.add(((PART, kind, owner), rank))
        places.add(((JOINED, kind, owner), 0))
