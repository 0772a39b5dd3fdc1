"""From a need to the few nodes worth looking at, tightest fit first.

Cells of the shape index are gone through by rank. A cell holds nodes that fit and, at
the edge of a coarse class, some that may not: after EAGER_FAILURES_MAX nodes that did
not, only those are tried that surely fit, and the edge again after them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gpupool.model.ids import HoldId
from gpupool.model.request import GpuSlice
from gpupool_allocator.core.bitsets import bits, size_class, without
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.capacity import Kind
from gpupool_allocator.core.index import (
    JOINED,
    MEMORY_CLASSES,
    PART,
    TRUSTED,
    WHOLE,
    Cells,
    ShapeIndex,
)
from gpupool_allocator.core.placement.fit import Parts
from gpupool_allocator.core.placement.need import Need

EAGER_FAILURES_MAX = 8
FAILURES_MAX = 256
"""Nodes looked at in vain before a search gives up and says so."""

PASSES = ((False, EAGER_FAILURES_MAX), (True, FAILURES_MAX), (False, FAILURES_MAX))
"""Whether only sure nodes are tried, and how many failures end the pass."""


@dataclass(slots=True)
class Effort:
    """What a search has cost: nodes looked at, and those in vain.

    ``bounded``: it gave up at its bound, so its "no" is not a proof.
    """

    looked: int = 0
    failed: int = 0
    bounded: bool = False


def host_masks(index: ShapeIndex, parts: Parts) -> tuple[int, int]:
    """Nodes that may have the CPU and host memory of all parts, and that surely do."""
    cpu = memory = 0
    for need, count in parts:
        cpu += need.group.cpu_milli * count
        memory += need.group.host_memory_mib * count
    maybe_cpu, sure_cpu = index.free_cpu_milli.reach(cpu)
    maybe_memory, sure_memory = index.free_host_memory_mib.reach(memory)
    return maybe_cpu & maybe_memory, sure_cpu & sure_memory


def candidates(
    books: Books, parts: Parts, within: int, passes: frozenset[HoldId], effort: Effort
) -> Iterator[int]:
    """Numbers of nodes of ``within`` that may take ``parts``, each at most once.

    The caller looks at each and counts what it cost in ``effort``.
    """
    index = books.index
    maybe, sure = host_masks(index, parts)
    maybe, sure = maybe & within, sure & within
    # Devices under a hold that the request passes are in no cell.
    for number in bits(books.nodes_with_held_devices(passes) & maybe if passes else 0):
        if effort.failed >= FAILURES_MAX:
            effort.bounded = True
            return
        maybe, sure = without(maybe, 1 << number), without(sure, 1 << number)
        yield number
    lead = parts[0][0]
    single = len(parts) == 1 and parts[0][1] == 1
    if not single:
        for need, _ in parts:
            may = may_take(index, need, maybe)
            maybe, sure = maybe & may, sure & may
    start = effort.failed
    for certain, failures_max in PASSES:
        left = sure if certain else maybe
        for mask in _cells(index, lead, left, certain=certain):
            cell = mask & left
            while cell:
                if effort.failed - start >= failures_max:
                    break
                bit = tightest_bit(index, cell)
                yield bit.bit_length() - 1
                # Another is wanted; most searches end before they come here.
                cell ^= bit
                left ^= bit
                maybe, sure = without(maybe, bit), without(sure, bit)
            else:
                continue
            break
        else:
            if not certain:
                return  # everything that might fit was looked at
    effort.bounded = True


def tightest_bit(index: ShapeIndex, cell: int) -> int:
    """The node of a cell with the least free GPU, then CPU; the longest known of equals."""
    for amounts in (index.free_gpu_pct, index.free_cpu_milli):
        lowest = cell & -cell
        if cell == lowest:
            return cell
        cell = amounts.tightest(cell)
    return cell & -cell


def may_take(index: ShapeIndex, need: Need, within: int) -> int:
    """Nodes of ``within`` whose devices may take one member, CPU and host memory aside."""
    mask = 0
    for cell in _cells(index, need, within, certain=False):
        mask |= cell & within
    return mask


def _cells(index: ShapeIndex, need: Need, within: int, *, certain: bool) -> Iterator[int]:
    """Cells that may hold nodes for one member, tightest first.

    ``certain``: only cells all of whose nodes surely have the devices.
    """
    if need.slice is not None:
        owners = (need.uid, TRUSTED) if need.shared_trust else (need.uid,)
        yield from part_cells(index, need, need.slice, owners, within, certain=certain)
        yield from _free_cells(index, _surely(need) if certain else need.kinds, 1)
    elif need.whole_count:
        yield from _free_cells(index, _surely(need) if certain else need.kinds, need.whole_count)
        if need.whole_count > 1 and not certain:
            yield _mixed(index, need)
    else:
        yield index.known


def _surely(need: Need) -> tuple[Kind, ...]:
    """Kinds all of whose devices have the memory asked for."""
    wanted = need.group.accelerator
    if wanted is None:
        return ()
    least = wanted.memory_mib if isinstance(wanted, GpuSlice) else wanted.min_memory_mib
    return tuple(kind for kind in need.kinds if (kind.memory_low_mib or 0) >= least)


def _free_cells(index: ShapeIndex, kinds: tuple[Kind, ...], count: int) -> Iterator[int]:
    """Nodes with at least ``count`` free devices of one kind, fewest first."""
    heads = [index.cells(WHOLE, kind.number) for kind in kinds]
    for rank in sorted({rank for cells in heads for rank in cells.above(count)}):
        for cells in heads:
            mask = cells.masks.get(rank)
            if mask:
                yield mask


def _mixed(index: ShapeIndex, need: Need) -> int:
    """Nodes with free devices of several accepted kinds: together they may be enough."""
    once = twice = 0
    for kind in need.kinds:
        mask = index.cells(WHOLE, kind.number).union()
        twice |= once & mask
        once |= mask
    return twice


def part_cells(
    index: ShapeIndex,
    need: Need,
    wanted: GpuSlice,
    owners: tuple[int, ...],
    within: int,
    *,
    certain: bool = False,
) -> Iterator[int]:
    """Nodes with a partly used device of one of ``owners`` that may take the slice."""
    found: list[tuple[int, int, int]] = []
    heads: list[tuple[int, int, Cells]] = []
    for position, kind in enumerate(need.kinds):
        bound_mib = kind.memory_high_mib if certain else kind.memory_low_mib
        memory_mib = wanted.memory_mib or (bound_mib or 0) * wanted.share_pct // 100
        least = size_class(memory_mib) + (1 if certain and memory_mib else 0)
        heads.extend(
            (position, least, index.cells(PART, kind.number, owner))
            for owner in owners
            if index.cells(JOINED, kind.number, owner).masks.get(0, 0) & within
        )
    for position, least, cells in heads:
        for rank in cells.above(wanted.share_pct * MEMORY_CLASSES):
            if rank % MEMORY_CLASSES >= least:
                if len(heads) == 1:  # in order already, and mostly the first one does
                    yield cells.masks[rank]
                else:
                    found.append((rank, position, cells.masks[rank]))
    found.sort()
    for _, _, mask in found:
        yield mask
