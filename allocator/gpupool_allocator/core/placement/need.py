"""What a member needs, made ready for many questions."""

from dataclasses import dataclass

from gpupool.model.inventory import Device
from gpupool.model.request import GpuSlice, Group, LeaseSpec, WholeGpus
from gpupool_allocator.core.capacity import Kind
from gpupool_allocator.core.index import ShapeIndex


@dataclass(frozen=True, slots=True)
class Need:
    """One member of a group, with the kinds of device that may answer it.

    ``position`` is the group's in its request. ``kinds`` come with the least memory
    first, so that a request that asks for little does not use up the large ones;
    ``accepted`` are their numbers.
    """

    position: int
    group: Group
    uid: int
    shared_trust: bool
    kinds: tuple[Kind, ...]
    accepted: frozenset[int]

    @property
    def whole_count(self) -> int:
        """Whole GPUs of the member; 0 for a slice or none."""
        accelerator = self.group.accelerator
        return accelerator.count if isinstance(accelerator, WholeGpus) else 0

    @property
    def slice(self) -> GpuSlice | None:
        """The slice of the member, if it wants one."""
        accelerator = self.group.accelerator
        return accelerator if isinstance(accelerator, GpuSlice) else None


def needs_of(index: ShapeIndex, spec: LeaseSpec) -> tuple[Need, ...]:
    """The needs of a request, by group."""
    return tuple(_need(index, spec, position, group) for position, group in enumerate(spec.groups))


def _need(index: ShapeIndex, spec: LeaseSpec, position: int, group: Group) -> Need:
    asked = (group.models, group.accelerator)
    answer = index.answers.get(asked)
    if answer is None:
        kinds = sorted(
            (kind for kind in kinds_of_models(index, group.models) if _may_answer(kind, group)),
            key=lambda kind: (kind.memory_low_mib or 0, kind.number),
        )
        answer = tuple(kinds), frozenset(kind.number for kind in kinds)
        index.remember_answer(asked, answer)
    return Need(position, group, spec.uid, spec.shared_trust, *answer)


def kinds_of_models(index: ShapeIndex, models: tuple[str, ...]) -> list[Kind]:
    """Kinds whose model is one of ``models``; all kinds where there are none.

    A model is wanted by its full name or by words of it: "h100" and "nvidia h100"
    both mean "NVIDIA H100 80GB HBM3", "h10" does not. Case does not count.
    """
    if not models:
        return index.kinds
    wanted = [frozenset(model.lower().split()) for model in models]
    return [kind for kind in index.kinds if any(words and words <= kind.words for words in wanted)]


def asks_the_unknown(index: ShapeIndex, need: Need) -> bool:
    """The member asks for memory, and all GPUs of its models cannot tell theirs."""
    wanted = need.group.accelerator
    if wanted is None:
        return False
    least = wanted.memory_mib if isinstance(wanted, GpuSlice) else wanted.min_memory_mib
    kinds = kinds_of_models(index, need.group.models)
    return bool(least and kinds) and all(kind.memory_high_mib is None for kind in kinds)


def slice_memory_mib(device: Device, wanted: GpuSlice) -> int:
    """Memory that a slice gets on a device; 0 where the device's memory is unknown."""
    if wanted.memory_mib:
        return wanted.memory_mib
    return (device.memory_mib or 0) * wanted.share_pct // 100


def _may_answer(kind: Kind, group: Group) -> bool:
    high = kind.memory_high_mib
    match group.accelerator:
        case WholeGpus(min_memory_mib=least):
            return not least or (high is not None and high >= least)
        case GpuSlice(memory_mib=memory_mib):
            return kind.sliceable and (not memory_mib or (high is not None and high >= memory_mib))
        case None:
            return False
