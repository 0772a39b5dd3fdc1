"""Counted reasons for "no", from the index's totals.

Every node is ruled out once, by the first thing in its way, so the counts add up to
the pool. The last thing that ruled a node out is named as what is limiting: those
nodes came nearest to a yes.
"""

from dataclasses import dataclass, field

from gpupool.model.ids import HoldId
from gpupool.model.lease import Cause, Explanation
from gpupool.model.request import GpuSlice, WholeGpus
from gpupool_allocator.core.bitsets import bits
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.capacity import CAUSES, DeviceCapacity
from gpupool_allocator.core.index import (
    ANY,
    BACK,
    HELD,
    MEMORY_CLASSES,
    PART,
    TOTAL,
    TRUSTED,
    WHOLE,
    ShapeIndex,
)
from gpupool_allocator.core.placement.fit import Parts
from gpupool_allocator.core.placement.need import Need, kinds_of_models, slice_memory_mib
from gpupool_allocator.core.placement.search import may_take, part_cells
from gpupool_allocator.core.placement.verdicts import (
    need_text,
    node_causes,
    size_text,
    uid_text,
    unknown_text,
)
from gpupool_allocator.core.words import counted

SAMPLES_MAX = 32
"""Nodes looked at one by one to tell an exact amount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Where placing stopped: the unit that found no node, and what had been placed.

    ``used`` are the numbers of nodes that the request's other members took,
    ``excluded`` the nodes that it must not go to again.
    """

    parts: Parts
    placed: int
    wanted: int
    used: frozenset[int]
    excluded: int
    spread_max: int | None
    bounded: bool


@dataclass(slots=True)
class _Funnel:
    """Nodes that nothing has ruled out yet, and what ruled out the others."""

    left: int
    causes: list[Cause] = field(default_factory=list[Cause])
    nearest: list[str] = field(default_factory=list[str])

    def rule_out(self, mask: int, code: str, message: str, nearest: str = "") -> None:
        """Takes the nodes of ``mask`` out for one cause."""
        count = (self.left & mask).bit_count()
        if count:
            self.causes.append(Cause(code=code, count=count, unit="node", message=message))
            self.nearest.append(nearest)
            self.left &= ~mask

    def keep(self, mask: int, code: str, message: str, nearest: str = "") -> None:
        """Takes all other nodes out for one cause."""
        self.rule_out(self.left & ~mask, code, message, nearest)


def explanation_of(books: Books, shortfall: Shortfall, passes: frozenset[HoldId]) -> Explanation:
    """Why a request was not placed, and the nearest change that would place it."""
    index = books.index
    if not index.known:
        return Explanation(summary="the pool has no nodes", nearest_change="add a node")
    funnel = _Funnel(index.known)
    # First what never changes by itself: a node that is not meant is no reason to wait.
    for part, _ in shortfall.parts:
        for selector in part.group.node_selectors:
            passing = index.labels.passing(index.known, (selector,))
            funnel.keep(passing, "label", f"nodes that fail the test on label {selector.key}",
                        f"relax the test on label {selector.key}")  # fmt: skip
    funnel.keep(index.offered, "unreachable", "nodes that are not connected",
                "nodes that are not connected come back")  # fmt: skip
    held = funnel.left & ~index.reachable(passes) & hardware(index, shortfall.parts)
    funnel.keep(index.reachable(passes), HELD, "nodes under a hold", "remove a hold on a node")
    text = "nodes that have failed to prepare this request"
    funnel.rule_out(shortfall.excluded, "faulty", text, "add a node")
    for part, count in shortfall.parts:
        _rule_out_devices(books, funnel, part, count, passes)
    _rule_out_host(index, funnel, shortfall.parts)
    _rule_out_rest(books, funnel, shortfall, passes, held)
    return _explanation(funnel, shortfall)


def hardware(index: ShapeIndex, parts: Parts) -> int:
    """Nodes that could take ``parts`` if everything on them were free."""
    mask = index.cpu_milli.reach(sum(need.group.cpu_milli * count for need, count in parts))[0]
    memory_mib = sum(need.group.host_memory_mib * count for need, count in parts)
    mask &= index.host_memory_mib.reach(memory_mib)[0]
    for need, count in parts:
        if need.group.accelerator is not None:
            mask &= _having(index, need, _devices_least(need, count))
    return mask


def _devices_least(need: Need, members: int) -> int:
    """Fewest devices that so many members of one need can be on."""
    share_pct = need.slice.share_pct if need.slice else 0
    return max(1, need.whole_count * members, -(-share_pct * members // 100))


def _having(index: ShapeIndex, need: Need, devices: int) -> int:
    """Nodes with so many devices that can answer, or with several kinds of them."""
    enough = once = twice = 0
    for kind in need.kinds:
        cells = index.cells(TOTAL, kind.number)
        enough |= cells.union(devices)
        has = cells.union()
        twice |= once & has
        once |= has
    return enough | twice if devices > 1 else enough


def _rule_out_devices(
    books: Books, funnel: _Funnel, need: Need, members: int, passes: frozenset[HoldId]
) -> None:
    wanted = need.group.accelerator
    if wanted is None:
        return
    index = books.index
    named = kinds_of_models(index, need.group.models)
    has_model = 0
    for kind in named:
        has_model |= index.cells(TOTAL, kind.number).union()
    models = " or ".join(need.group.models) or "GPU"
    funnel.keep(has_model, "model", f"nodes without {models}", "name other models")
    _rule_out_unable(index, funnel, need, members)
    failing = funnel.left & ~may_take(index, need, funnel.left)
    failing &= ~books.nodes_with_held_devices(passes)
    free = _most_free(index, need, failing)
    for code in (*CAUSES, HELD):
        back = 0
        for kind in need.kinds:
            back |= index.cells(BACK, kind.number, code).union(need.whole_count or 1)
        text = f"nodes whose free GPUs are {code}"
        funnel.rule_out(failing & back, code, text, f"GPUs that are {code} come back")
    failing &= funnel.left
    if isinstance(wanted, WholeGpus):
        nearest = f"{counted(wanted.count - free, 'more free GPU')} on one node"
        if free:
            nearest += f", or ask for {counted(free, 'GPU')} in each member"
        funnel.rule_out(
            failing, "gpu_busy", need_text("GPUs", wanted.count, free, "on one node"), nearest
        )
    else:
        _rule_out_slice(books, funnel, need, wanted, failing)


def _rule_out_unable(index: ShapeIndex, funnel: _Funnel, need: Need, members: int) -> None:
    """Rules out nodes whose devices cannot answer even when free."""
    wanted = need.group.accelerator
    assert wanted is not None, "a need without devices"
    least = wanted.memory_mib if isinstance(wanted, GpuSlice) else wanted.min_memory_mib
    unsliceable = unknown = largest = 0
    for kind in kinds_of_models(index, need.group.models):
        nodes = index.cells(TOTAL, kind.number).union()
        if isinstance(wanted, GpuSlice) and not kind.sliceable:
            unsliceable |= nodes
        elif kind.memory_high_mib is None:
            unknown |= nodes
        elif nodes:
            largest = max(largest, kind.memory_low_mib or 0)
    failing = funnel.left & ~_having(index, need, 1)
    if least:
        funnel.rule_out(failing & unknown, "memory_unknown", unknown_text(least), "ask for a share")
        text = size_text(least, largest)
        funnel.rule_out(failing & ~unsliceable, "gpu_memory", text, f"ask for {largest} MiB")
    text = "nodes whose GPUs take no slices"
    funnel.rule_out(failing & unsliceable, "slicing", text, "ask for whole GPUs")
    devices = _devices_least(need, members)
    text = f"nodes with fewer than {counted(devices, 'such GPU')}"
    nearest = "spread the GPUs over more members"
    funnel.keep(_having(index, need, devices), "gpu_count", text, nearest)


def _rule_out_slice(
    books: Books, funnel: _Funnel, need: Need, wanted: GpuSlice, failing: int
) -> None:
    index = books.index
    share_only = GpuSlice(share_pct=wanted.share_pct)
    owners = (need.uid, TRUSTED) if need.shared_trust else (need.uid,)
    joinable = 0
    for mask in _shares(index, need, share_only, owners):
        joinable |= mask
    short_mib, free_mib = _memory_short(books, need, wanted, failing & joinable)
    funnel.rule_out(
        failing & joinable, "gpu_memory", need_text("memory", short_mib, free_mib, "MiB"),
        f"ask for {free_mib} MiB of GPU memory" if free_mib else "a slice ends",
    )  # fmt: skip
    foreign = 0
    for mask in part_cells(index, need, wanted, (ANY,), failing):
        foreign |= mask
    nearest = "a GPU that others use becomes free, or all on it accept shared_trust"
    funnel.rule_out(failing & foreign, "uid", uid_text(need.uid), nearest)
    free_pct = 0
    for kind in need.kinds:
        for owner in owners:
            cells = index.cells(PART, kind.number, owner)
            for rank in reversed(cells.ranks):
                if cells.masks[rank] & failing:
                    free_pct = max(free_pct, rank // MEMORY_CLASSES)
                    break
    funnel.rule_out(
        failing, "gpu_busy", need_text("share", wanted.share_pct, free_pct, "%"),
        f"ask for a share of {free_pct} %" if free_pct else "a lease on a GPU ends",
    )  # fmt: skip


def _shares(index: ShapeIndex, need: Need, wanted: GpuSlice, owners: tuple[int, ...]) -> list[int]:
    """Cells with the share asked for, whatever their memory."""
    least = wanted.share_pct * MEMORY_CLASSES
    return [
        cells.masks[rank]
        for kind in need.kinds
        for owner in owners
        for cells in (index.cells(PART, kind.number, owner),)
        for rank in cells.above(least)
    ]


def _memory_short(books: Books, need: Need, wanted: GpuSlice, nodes: int) -> tuple[int, int]:
    """Memory that a slice needs and the most that is free for it on ``nodes``.

    Looks at the nodes of the highest class of free memory, at most SAMPLES_MAX.
    """
    by_class: dict[int, int] = {}
    owners = (need.uid, TRUSTED) if need.shared_trust else (need.uid,)
    for kind in need.kinds:
        for owner in owners:
            cells = books.index.cells(PART, kind.number, owner)
            for rank in cells.above(wanted.share_pct * MEMORY_CLASSES):
                number = rank % MEMORY_CLASSES
                by_class[number] = by_class.get(number, 0) | (cells.masks[rank] & nodes)
    top = next(
        (by_class[number] for number in sorted(by_class, reverse=True) if by_class[number]), 0
    )
    best = (wanted.memory_mib, 0)
    for number, _ in zip(bits(top), range(SAMPLES_MAX), strict=False):
        for device in books.node_numbered(number).devices.values():
            if _joinable(device, need, wanted) and (device.free_memory_mib or 0) >= best[1]:
                best = (slice_memory_mib(device.device, wanted), device.free_memory_mib or 0)
    return best


def _joinable(device: DeviceCapacity, need: Need, wanted: GpuSlice) -> bool:
    return (
        device.kind.number in need.accepted
        and device.usable()
        and device.free_share_pct >= wanted.share_pct
        and device.admits(need.uid, need.shared_trust)
    )


def _most_free(index: ShapeIndex, need: Need, nodes: int) -> int:
    """Most free devices of one kind on one of ``nodes``."""
    most = 0
    for kind in need.kinds:
        cells = index.cells(WHOLE, kind.number)
        for rank in reversed(cells.ranks):
            if cells.masks[rank] & nodes:
                most = max(most, rank)
                break
    return most


def _rule_out_host(index: ShapeIndex, funnel: _Funnel, parts: Parts) -> None:
    cpu = sum(need.group.cpu_milli * count for need, count in parts)
    memory = sum(need.group.host_memory_mib * count for need, count in parts)
    for code, what, unit, need, free in (
        ("cpu", "cpu", "milli", cpu, index.free_cpu_milli),
        ("host_memory", "host memory", "MiB", memory, index.free_host_memory_mib),
    ):
        short = funnel.left & ~free.reach(need)[0]
        if short:
            most = free.largest(short)
            nearest = f"ask for {most} {unit} of {what} on one node"
            funnel.rule_out(short, code, need_text(what, need, most, unit), nearest)


def _rule_out_rest(
    books: Books, funnel: _Funnel, shortfall: Shortfall, passes: frozenset[HoldId], held: int
) -> None:
    """Nodes that one member might go to, and the request still did not.

    ``held``: nodes under a hold that the members without a place might go to.
    """
    need = shortfall.parts[0][0]
    used = 0
    for number in shortfall.used:
        used |= 1 << number
    limit, size = shortfall.spread_max, sum(count for _, count in shortfall.parts)
    if limit is not None:
        text = f"spread: at most {counted(limit, 'member')} on one node"
        mask = funnel.left if size > limit else used
        funnel.rule_out(mask, "spread", text, "allow more members on one node")
    text = "nodes that the request's other members fill"
    nearest = (
        "remove a hold on a node, or ask for fewer members" if held else "ask for fewer members"
    )
    funnel.rule_out(used, "gpu_busy" if need.kinds else "cpu", text, nearest)
    if size > 1:
        text = f"nodes that take a member, but not {size} together"
        funnel.rule_out(funnel.left, "gpu_busy" if need.kinds else "cpu", text,
                        "do not require one node")  # fmt: skip
    # The edge of a coarse class: only the node itself can tell.
    for number, _ in zip(bits(funnel.left), range(SAMPLES_MAX), strict=False):
        causes = node_causes(books, books.node_numbered(number), need, passes)
        if causes:
            funnel.rule_out(1 << number, causes[0].code, causes[0].message)
    text = "nodes left when the search reached its bound"
    funnel.rule_out(funnel.left, "search_bound", text, "ask again, or name a model or label")


def _explanation(funnel: _Funnel, shortfall: Shortfall) -> Explanation:
    merged: dict[str, Cause] = {}
    for cause in funnel.causes:
        count = cause.count + (merged[cause.code].count if cause.code in merged else 0)
        merged[cause.code] = Cause(code=cause.code, count=count, unit="node", message=cause.message)
    limiting = funnel.causes[-1]
    counts = sorted(merged.values(), key=lambda cause: (-cause.count, cause.code))
    nodes = ", ".join(f"{cause.count} {cause.code}" for cause in counts)
    begin = f"{shortfall.placed} of {shortfall.wanted} members fit; " if shortfall.placed else ""
    return Explanation(
        summary=f"{begin}{limiting.message} (nodes: {nodes})",
        causes=tuple(counts),
        nearest_change=funnel.nearest[-1],
    )
