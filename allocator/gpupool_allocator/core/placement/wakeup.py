"""Could a change let a waiting request in? Asked of every change, so it is cheap."""

from collections.abc import Iterable

from gpupool.model.ids import HoldId, NodeId
from gpupool.model.request import LeaseSpec
from gpupool_allocator.core.bitsets import bits
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.index import WHOLE
from gpupool_allocator.core.placement.fit import Parts, fit_unit
from gpupool_allocator.core.placement.need import needs_of
from gpupool_allocator.core.placement.plan import Run, runs_of
from gpupool_allocator.core.placement.search import host_masks, may_take

LOOKS_MAX = 64
"""Changed nodes looked at one by one; where more might fit, the answer is yes."""


def may_fit_now(
    books: Books,
    spec: LeaseSpec,
    changed_nodes: Iterable[NodeId],
    passes: frozenset[HoldId] = frozenset(),
) -> bool:
    """Whether a request that did not fit might, now that these nodes have changed.

    Exact for a request of one member, up to LOOKS_MAX nodes. For more it is an upper
    bound: some changed node takes a part of the request, and the index has the whole
    GPUs for all of it. A node that is not known is passed over.
    """
    changed = 0
    for node_id in changed_nodes:
        if books.knows_node(node_id):
            changed |= 1 << books.node(node_id).number
    changed &= books.index.reachable(passes)
    runs = runs_of(spec, needs_of(books.index, spec))
    return any(_takes(books, run.parts, changed, passes) for run in runs) and all(
        _has_whole_gpus(books, run, passes) for run in runs
    )


def _takes(books: Books, parts: Parts, nodes: int, passes: frozenset[HoldId]) -> bool:
    """Whether one of ``nodes`` takes ``parts``, or many might."""
    index = books.index
    nodes &= host_masks(index, parts)[0]
    held = books.nodes_with_held_devices(passes) & nodes
    for need, _ in parts:
        nodes = index.labels.passing(nodes, need.group.node_selectors)
        nodes &= may_take(index, need, nodes) | held
    for looked, number in enumerate(bits(nodes)):
        if looked == LOOKS_MAX or fit_unit(books.node_numbered(number), parts, passes):
            return True
    return False


def _has_whole_gpus(books: Books, run: Run, passes: frozenset[HoldId]) -> bool:
    need = run.parts[0][0]
    if not need.whole_count or run.times == 1:
        return True
    index = books.index
    reachable = index.reachable(passes)
    if books.nodes_with_held_devices(passes) & reachable:
        return True  # those are in no cell
    free = 0
    for kind in need.kinds:
        cells = index.cells(WHOLE, kind.number)
        free += sum(rank * (cells.masks[rank] & reachable).bit_count() for rank in cells.ranks)
    return free >= need.whole_count * run.times
