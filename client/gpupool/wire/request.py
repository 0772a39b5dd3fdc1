"""A lease's request, with every range of resources.proto checked."""

from collections.abc import Sequence

from gpupool.model import limits
from gpupool.model.request import (
    NO_CONSTRAINT,
    GpuSlice,
    Group,
    LabelSelector,
    LeaseSpec,
    TopologyConstraint,
    WholeGpus,
)
from gpupool.v1 import resources_pb2 as pb
from gpupool.wire import door
from gpupool.wire.enums import LEVELS, ON_FAILURES, WORKLOAD_CLASSES
from gpupool.wire.errors import BadField
from gpupool.wire.times import duration_from_proto, duration_to_proto

_MAX_PER_DOMAIN_MAX = 1024


def topology_constraint_to_proto(constraint: TopologyConstraint) -> pb.TopologyConstraint:
    """``max_per_domain`` is sent only where ``spread`` is set."""
    message = pb.TopologyConstraint()
    if constraint.required is not None:
        message.required = LEVELS.to_proto(constraint.required)
    if constraint.preferred is not None:
        message.preferred = LEVELS.to_proto(constraint.preferred)
    if constraint.spread is not None:
        message.spread = LEVELS.to_proto(constraint.spread)
        message.max_per_domain = constraint.max_per_domain
    return message


def topology_constraint_from_proto(at: str, message: pb.TopologyConstraint) -> TopologyConstraint:
    """Raises BadField for unknown levels and a maximum outside 1..1024."""
    if not message.ByteSize():
        return NO_CONSTRAINT
    spread = LEVELS.optional_from_proto(at, "spread", message.spread)
    if spread is None:
        door.integer(at, "max_per_domain (without spread)", message.max_per_domain, 0, 1)
    most = door.integer(at, "max_per_domain", message.max_per_domain, 0, _MAX_PER_DOMAIN_MAX)
    return TopologyConstraint(
        required=LEVELS.optional_from_proto(at, "required", message.required),
        preferred=LEVELS.optional_from_proto(at, "preferred", message.preferred),
        spread=spread,
        max_per_domain=most or 1,
    )


def whole_gpus_to_proto(whole: WholeGpus) -> pb.WholeGpus:
    """Whole GPUs of one replica."""
    return pb.WholeGpus(count=whole.count, min_memory_mib=whole.min_memory_mib)


def whole_gpus_from_proto(at: str, message: pb.WholeGpus) -> WholeGpus:
    """Raises BadField for a count outside 1..64 or impossible memory."""
    return WholeGpus(
        count=door.integer(at, "count", message.count, 1, limits.GPUS_PER_MEMBER_MAX),
        min_memory_mib=_gpu_memory(at, "min_memory_mib", message.min_memory_mib),
    )


def gpu_slice_to_proto(part: GpuSlice) -> pb.GpuSlice:
    """A slice of one GPU."""
    return pb.GpuSlice(
        share_pct=part.share_pct,
        memory_mib=part.memory_mib,
        min_share_pct=part.min_share_pct,
        max_share_pct=part.max_share_pct,
    )


def gpu_slice_from_proto(at: str, message: pb.GpuSlice) -> GpuSlice:
    """Raises BadField where it names more than one GPU, nothing, or a wrong order."""
    if message.count not in (0, 1):
        accepted = "0..1: a process can speak to one MPS daemon; use replicas"
        raise BadField(door.path(at, "count"), message.count, accepted)
    part = GpuSlice(
        share_pct=door.integer(at, "share_pct", message.share_pct, 0, 100),
        memory_mib=_gpu_memory(at, "memory_mib", message.memory_mib),
        min_share_pct=door.integer(at, "min_share_pct", message.min_share_pct, 0, 100),
        max_share_pct=door.integer(at, "max_share_pct", message.max_share_pct, 0, 100),
    )
    if part.share_pct == 0 and part.memory_mib == 0:
        accepted = "1..100 where memory_mib is 0"
        raise BadField(door.path(at, "share_pct"), part.share_pct, accepted)
    if part.min_share_pct or part.max_share_pct:
        door.integer(at, "max_share_pct", part.max_share_pct, 1, 100)
        door.integer(at, "min_share_pct", part.min_share_pct, 1, part.max_share_pct)
        door.integer(at, "share_pct", part.share_pct, part.min_share_pct, part.max_share_pct)
    return part


def label_selector_to_proto(selector: LabelSelector) -> pb.LabelSelector:
    """One test on a node's labels."""
    return pb.LabelSelector(key=selector.key, values=selector.values, exclude=selector.exclude)


def label_selector_from_proto(at: str, message: pb.LabelSelector) -> LabelSelector:
    """Raises BadField for bad names, too many values and values named twice."""
    door.count(at, "values", message.values, 0, limits.SELECTOR_VALUES_MAX)
    values = tuple(
        door.text(at, f"values[{index}]", value) for index, value in enumerate(message.values)
    )
    door.unique(at, "values", values)
    return LabelSelector(
        key=door.text(at, "key", message.key, least=1), values=values, exclude=message.exclude
    )


def group_to_proto(group: Group) -> pb.Group:
    """One group of a request."""
    message = pb.Group(
        name=group.name,
        replicas=group.replicas,
        models=group.models,
        node_selectors=[label_selector_to_proto(selector) for selector in group.node_selectors],
        cpu_milli=group.cpu_milli,
        host_memory_mib=group.host_memory_mib,
    )
    match group.accelerator:
        case WholeGpus():
            message.whole.CopyFrom(whole_gpus_to_proto(group.accelerator))
        case GpuSlice():
            message.slice.CopyFrom(gpu_slice_to_proto(group.accelerator))
        case None:
            pass
    if group.topology != NO_CONSTRAINT:
        message.topology.CopyFrom(topology_constraint_to_proto(group.topology))
    if group.member_topology != NO_CONSTRAINT:
        message.member_topology.CopyFrom(topology_constraint_to_proto(group.member_topology))
    return message


def group_from_proto(at: str, message: pb.Group) -> Group:
    """Raises BadField; model names come out in lower case."""
    return Group(
        name=door.group_name(at, "name", message.name) if message.name else "main",
        replicas=door.integer(at, "replicas", message.replicas, 1, limits.REPLICAS_MAX),
        accelerator=_accelerator(at, message),
        models=_models(at, message.models),
        node_selectors=_selectors(at, message.node_selectors),
        cpu_milli=door.integer(at, "cpu_milli", message.cpu_milli, 0, limits.CPU_MILLI_MAX),
        host_memory_mib=door.integer(
            at, "host_memory_mib", message.host_memory_mib, 0, limits.HOST_MEMORY_MIB_MAX
        ),
        topology=topology_constraint_from_proto(f"{at}.topology", message.topology),
        member_topology=topology_constraint_from_proto(
            f"{at}.member_topology", message.member_topology
        ),
    )


def lease_spec_to_proto(spec: LeaseSpec) -> pb.LeaseSpec:
    """A whole request."""
    message = pb.LeaseSpec(
        groups=[group_to_proto(group) for group in spec.groups],
        display_name=spec.display_name,
        labels=spec.labels,
        tenant=spec.tenant,
        uid=spec.uid,
        priority=spec.priority,
        disconnect_timeout=duration_to_proto(spec.disconnect_s),
        spares=spec.spares,
        isolated=spec.isolated,
        movable=spec.movable,
        shared_trust=spec.shared_trust,
        on_caller_node=spec.on_caller_node,
    )
    if spec.topology != NO_CONSTRAINT:
        message.topology.CopyFrom(topology_constraint_to_proto(spec.topology))
    if spec.max_duration_s is not None:
        message.max_duration.CopyFrom(duration_to_proto(spec.max_duration_s))
    if spec.on_failure is not None:
        message.on_failure = ON_FAILURES.to_proto(spec.on_failure)
    if spec.workload_class is not None:
        message.workload_class = WORKLOAD_CLASSES.to_proto(spec.workload_class)
    return message


def lease_spec_from_proto(message: pb.LeaseSpec, at: str = "spec") -> LeaseSpec:
    """The request with defaults filled in.

    Raises BadField for every value outside the ranges of resources.proto, in any
    group, and for sums over MEMBERS_MAX members or GPUS_MAX GPUs.
    """
    return LeaseSpec(
        groups=_groups(at, message.groups),
        topology=topology_constraint_from_proto(f"{at}.topology", message.topology),
        display_name=door.text(at, "display_name", message.display_name),
        labels=door.labels(at, "labels", message.labels, limits.LABELS_MAX),
        tenant=door.text(at, "tenant", message.tenant) or "default",
        uid=door.integer(at, "uid", message.uid, 0, limits.UID_MAX),
        priority=door.integer(
            at, "priority", message.priority, limits.PRIORITY_MIN, limits.PRIORITY_MAX
        ),
        max_duration_s=_max_duration_s(at, message),
        disconnect_s=_disconnect_s(at, message),
        spares=door.integer(at, "spares", message.spares, 0, limits.SPARES_MAX),
        on_failure=ON_FAILURES.optional_from_proto(at, "on_failure", message.on_failure),
        isolated=message.isolated,
        movable=message.movable,
        workload_class=WORKLOAD_CLASSES.optional_from_proto(
            at, "workload_class", message.workload_class
        ),
        shared_trust=message.shared_trust,
        on_caller_node=message.on_caller_node,
    )


def _groups(at: str, messages: Sequence[pb.Group]) -> tuple[Group, ...]:
    door.count(at, "groups", messages, 1, limits.GROUPS_MAX)
    groups = tuple(
        group_from_proto(f"{at}.groups[{index}]", message) for index, message in enumerate(messages)
    )
    if len(groups) > 1:
        door.unique(at, "groups", [group.name for group in groups])
    members = sum(group.replicas for group in groups)
    door.integer(at, "groups (members in all)", members, 1, limits.MEMBERS_MAX)
    gpus = sum(group.replicas * _gpus_of_replica(group) for group in groups)
    door.integer(at, "groups (GPUs in all)", gpus, 0, limits.GPUS_MAX)
    return groups


def _gpus_of_replica(group: Group) -> int:
    match group.accelerator:
        case WholeGpus(count=count):
            return count
        case GpuSlice():
            return 1
        case None:
            return 0


def _accelerator(at: str, message: pb.Group) -> WholeGpus | GpuSlice | None:
    match message.WhichOneof("accelerator"):
        case "whole":
            return whole_gpus_from_proto(f"{at}.whole", message.whole)
        case "slice":
            return gpu_slice_from_proto(f"{at}.slice", message.slice)
        case _:
            return None


def _models(at: str, values: Sequence[str]) -> tuple[str, ...]:
    if not values:
        return ()
    door.count(at, "models", values, 0, limits.MODELS_MAX)
    models = tuple(
        door.text(at, f"models[{index}]", value.lower(), least=1)
        for index, value in enumerate(values)
    )
    door.unique(at, "models", models)
    return models


def _selectors(at: str, messages: Sequence[pb.LabelSelector]) -> tuple[LabelSelector, ...]:
    door.count(at, "node_selectors", messages, 0, limits.SELECTORS_MAX)
    return tuple(
        label_selector_from_proto(f"{at}.node_selectors[{index}]", message)
        for index, message in enumerate(messages)
    )


def _gpu_memory(at: str, name: str, value: int) -> int:
    return door.integer(at, name, value, 0, limits.GPU_MEMORY_MIB_MAX)


def _max_duration_s(at: str, message: pb.LeaseSpec) -> float | None:
    if not message.HasField("max_duration"):
        return None
    return duration_from_proto(
        at,
        "max_duration",
        message.max_duration,
        limits.MAX_DURATION_S_MIN,
        limits.MAX_DURATION_S_MAX,
    )


def _disconnect_s(at: str, message: pb.LeaseSpec) -> float:
    if not message.HasField("disconnect_timeout"):
        return limits.DISCONNECT_S_DEFAULT
    return duration_from_proto(
        at,
        "disconnect_timeout",
        message.disconnect_timeout,
        limits.DISCONNECT_S_MIN,
        limits.DISCONNECT_S_MAX,
    )
