"""What the core accepts at all: built features and the grain.

Ranges were checked at the door. Here stand the rules that need the pool's settings,
and the list of valid fields that are not built yet: they are answered UNIMPLEMENTED
by name, never ignored.
"""

from collections.abc import Iterator

from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.request import (
    GpuSlice,
    Group,
    LeaseSpec,
    Level,
    OnFailure,
    TopologyConstraint,
)

_BUILT_ON_FAILURE = (None, OnFailure.STOP, OnFailure.WAIT)


def refusal(spec: LeaseSpec, *, grain_pct: int) -> Refused | None:
    """Why the spec cannot be taken, or None."""
    unbuilt = next(_unbuilt_fields(spec), None)
    if unbuilt is not None:
        field, value = unbuilt
        return Refused(
            kind=ErrorKind.UNIMPLEMENTED,
            field=field,
            message=f"{field}: {value} is valid but not built in this release",
        )
    for index, group in enumerate(spec.groups):
        field = f"spec.groups[{index}].slice.share_pct"
        wanted = group.accelerator
        if isinstance(wanted, GpuSlice) and wanted.share_pct % grain_pct:
            return Refused(
                kind=ErrorKind.INVALID,
                field=field,
                message=f"{field}: {wanted.share_pct} is not a multiple of the pool's grain, "
                f"{grain_pct} percent",
            )
    return None


def _unbuilt_fields(spec: LeaseSpec) -> Iterator[tuple[str, str]]:
    """Paths and values of the fields that this release does not carry out."""
    if spec.isolated:
        yield "spec.isolated", "true"
    if spec.movable:
        yield "spec.movable", "true"
    if spec.shared_trust:
        # Placement knows it already; one MPS server for several users is still to come.
        yield "spec.shared_trust", "true"
    if spec.spares:
        yield "spec.spares", str(spec.spares)
    if spec.workload_class is not None:
        yield "spec.workload_class", spec.workload_class
    if spec.on_failure not in _BUILT_ON_FAILURE:
        yield "spec.on_failure", str(spec.on_failure)
    yield from _unbuilt_levels("spec.topology", spec.topology)
    for index, group in enumerate(spec.groups):
        path = f"spec.groups[{index}]"
        yield from _unbuilt_levels(f"{path}.topology", group.topology)
        yield from _unbuilt_member_levels(f"{path}.member_topology", group)
        if isinstance(group.accelerator, GpuSlice):
            if group.accelerator.min_share_pct:
                yield f"{path}.slice.min_share_pct", str(group.accelerator.min_share_pct)
            if group.accelerator.max_share_pct:
                yield f"{path}.slice.max_share_pct", str(group.accelerator.max_share_pct)


def _unbuilt_levels(path: str, topology: TopologyConstraint) -> Iterator[tuple[str, str]]:
    built = (None, Level.NODE, Level.FABRIC)
    if topology.required not in built:
        yield f"{path}.required", str(topology.required)
    if topology.preferred not in built:
        yield f"{path}.preferred", str(topology.preferred)
    if topology.spread not in (None, Level.NODE):
        yield f"{path}.spread", str(topology.spread)


def _unbuilt_member_levels(path: str, group: Group) -> Iterator[tuple[str, str]]:
    # A member always sits on one node, so that level and wider ones hold by themselves.
    wide = (None, Level.NODE, Level.BLOCK, Level.POD, Level.FABRIC)
    topology = group.member_topology
    if topology.required not in wide:
        yield f"{path}.required", str(topology.required)
    if topology.preferred not in wide:
        yield f"{path}.preferred", str(topology.preferred)
    if topology.spread is not None:
        yield f"{path}.spread", str(topology.spread)
