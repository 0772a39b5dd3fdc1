"""Why one node cannot take one member: every cause, exactly, from the node itself."""

from gpupool.model.ids import HoldId
from gpupool.model.inventory import Device
from gpupool.model.lease import Cause
from gpupool.model.request import GpuSlice, Group, LabelSelector, LeaseSpec, WholeGpus
from gpupool.model.views import NodeVerdict
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.capacity import DeviceCapacity, NodeCapacity
from gpupool_allocator.core.index import HELD
from gpupool_allocator.core.placement.fit import fit
from gpupool_allocator.core.placement.need import Need, kinds_of_models, needs_of, slice_memory_mib
from gpupool_allocator.core.words import counted, counted_are

VERDICTS_MAX = 1000


def explain(
    books: Books, spec: LeaseSpec, passes: frozenset[HoldId] = frozenset()
) -> tuple[NodeVerdict, ...]:
    """What each node says to one member of the request, in order of arrival.

    A node that can take a member of any group has no causes; else they are those
    of the request's first group. Looks at nodes one by one, at most VERDICTS_MAX.
    """
    needs = needs_of(books.index, spec)
    verdicts: list[NodeVerdict] = []
    for node in books.nodes():
        if len(verdicts) == VERDICTS_MAX:
            break
        causes = [node_causes(books, node, need, passes) for need in needs]
        verdicts.append(NodeVerdict(node_id=node.node_id, causes=() if () in causes else causes[0]))
    return tuple(verdicts)


def selector_passes(selector: LabelSelector, labels: dict[str, str]) -> bool:
    """Whether a node's labels pass one test."""
    value = labels.get(selector.key)
    has = value is not None and (not selector.values or value in selector.values)
    return has != selector.exclude


def node_causes(
    books: Books, node: NodeCapacity, need: Need, passes: frozenset[HoldId]
) -> tuple[Cause, ...]:
    """Everything that keeps one member off ``node``; empty: it can go there."""
    group = need.group
    causes: list[Cause] = []
    if not node.offered:
        causes.append(_node("unreachable", "is not connected"))
    if not node.holds <= passes:
        names = ", ".join(sorted(node.holds - passes))
        causes.append(_node(HELD, f"is held by {names}"))
    causes.extend(
        _node("label", f"fails the test on label {selector.key}")
        for selector in group.node_selectors
        if not selector_passes(selector, node.inventory.labels)
    )
    if group.accelerator is not None:
        causes.extend(_device_causes(books, node, need, passes))
    if group.cpu_milli > node.free_cpu_milli:
        causes.append(_node("cpu", need_text("cpu", group.cpu_milli, node.free_cpu_milli, "milli")))
    if group.host_memory_mib > node.free_host_memory_mib:
        free = node.free_host_memory_mib
        causes.append(
            _node("host_memory", need_text("host memory", group.host_memory_mib, free, "MiB"))
        )
    return tuple(causes)


def need_text(what: str, need: int, free: int, unit: str) -> str:
    """The one wording of an amount that is short."""
    return f"{what}: need {need} {unit}, largest free {free} {unit}"


def _node(code: str, message: str) -> Cause:
    return Cause(code=code, count=1, unit="node", message=message)


def _devices(code: str, count: int, message: str) -> Cause:
    return Cause(code=code, count=count, unit="device", message=message)


def _device_causes(
    books: Books, node: NodeCapacity, need: Need, passes: frozenset[HoldId]
) -> list[Cause]:
    group = need.group
    if fit(node, need, passes) is not None:
        return []
    models = {kind.number for kind in kinds_of_models(books.index, group.models)}
    present = [device for device in node.devices.values() if device.present]
    named = [device for device in present if device.kind.number in models]
    if not named:
        wanted = " or ".join(group.models) or "GPU"
        return [_devices("model", len(present), f"no {wanted} on the node")]
    able, causes = _able(named, group)
    causes = [*causes, *_not_offered(able, passes)]
    usable = [device for device in able if device.usable(passes)]
    match group.accelerator:
        case WholeGpus(count=count):
            free = sum(not device.granted for device in usable)
            if len(able) < count <= len(named) or not usable:
                pass  # said by what was said above
            elif len(named) < count:
                text = f"need {counted(count, 'GPU')} on one node, it has {len(named)}"
                causes.append(_devices("gpu_count", len(named), text))
            elif free < count and len(usable) > free:
                text = need_text("GPUs", count, free, "on one node")
                causes.append(_devices("gpu_busy", len(usable) - free, text))
        case GpuSlice() as part:
            causes.extend(_slice_causes(usable, need, part))
        case None:
            pass
    return causes


def _able(named: list[DeviceCapacity], group: Group) -> tuple[list[DeviceCapacity], list[Cause]]:
    """Devices that could answer when free, and why the others never can."""
    wanted = group.accelerator
    if wanted is None:
        return [], []
    least = wanted.memory_mib if isinstance(wanted, GpuSlice) else wanted.min_memory_mib
    able: list[DeviceCapacity] = []
    unsliceable = unknown = small = 0
    for each in named:
        if isinstance(wanted, GpuSlice) and not each.device.sliceable:
            unsliceable += 1
        elif least and each.device.memory_mib is None:
            unknown += 1
        elif least and (each.device.memory_mib or 0) < least:
            small += 1
        else:
            able.append(each)
    causes: list[Cause] = []
    if unsliceable:
        causes.append(_devices("slicing", unsliceable, "takes no slices"))
    if unknown:
        causes.append(_devices("memory_unknown", unknown, unknown_text(least)))
    if small:
        largest = max(each.device.memory_mib or 0 for each in named)
        causes.append(_devices("gpu_memory", small, size_text(least, largest)))
    return able, causes


def unknown_text(need_mib: int) -> str:
    """What is said of devices whose memory nobody knows."""
    return f"memory: need {need_mib} MiB, but the GPU's memory is unknown; ask for a share"


def size_text(need_mib: int, largest_mib: int) -> str:
    """What is said of devices that are too small even when empty."""
    return f"memory: need {need_mib} MiB, largest GPU has {largest_mib} MiB"


def _not_offered(able: list[DeviceCapacity], passes: frozenset[HoldId]) -> list[Cause]:
    counts: dict[str, int] = {}
    for each in able:
        if not each.usable(passes):
            code = HELD if each.offered else each.cause
            counts[code] = counts.get(code, 0) + 1
    return [
        _devices(code, count, f"{counted_are(count, 'GPU')} {code}")
        for code, count in counts.items()
    ]


def _slice_causes(usable: list[DeviceCapacity], need: Need, wanted: GpuSlice) -> list[Cause]:
    """Each usable device is counted by the first thing that rules it out."""
    busy: list[DeviceCapacity] = []
    foreign: list[DeviceCapacity] = []
    full: list[tuple[int, Device]] = []
    for each in usable:
        if each.whole or wanted.share_pct > each.free_share_pct:
            busy.append(each)
        elif not each.admits(need.uid, need.shared_trust):
            foreign.append(each)
        else:
            full.append((each.free_memory_mib or 0, each.device))
    causes: list[Cause] = []
    if full:
        free_mib, device = max(full, key=lambda each: each[0])
        text = need_text("memory", slice_memory_mib(device, wanted), free_mib, "MiB")
        causes.append(_devices("gpu_memory", len(full), text))
    if foreign:
        causes.append(_devices("uid", len(foreign), uid_text(need.uid)))
    if busy:
        free = max(each.free_share_pct for each in busy)
        causes.append(
            _devices("gpu_busy", len(busy), need_text("share", wanted.share_pct, free, "%"))
        )
    return causes


def uid_text(uid: int) -> str:
    """What is said of devices that another user's slices are on."""
    return f"GPUs with room are used by others than uid {uid}"
