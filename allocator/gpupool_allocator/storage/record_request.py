"""Stored shape of a request: ``LeaseSpec``, its groups and constraints.

A field that has its usual value is left out; the usual values written here belong
to the stored format and stay even if the model's defaults change one day.
"""

from typing import Any

from gpupool.model.request import (
    GpuSlice,
    Group,
    LabelSelector,
    LeaseSpec,
    Level,
    OnFailure,
    TopologyConstraint,
    WholeGpus,
    WorkloadClass,
)

Json = dict[str, Any]
"""A JSON object. Its values are untyped until a ``..._from_json`` has read them."""


def constraint_to_json(constraint: TopologyConstraint) -> Json:
    """Shape of a constraint; empty for one that asks for nothing."""
    shape: Json = {}
    if constraint.required is not None:
        shape["required"] = constraint.required
    if constraint.preferred is not None:
        shape["preferred"] = constraint.preferred
    if constraint.spread is not None:
        shape["spread"] = constraint.spread
    if constraint.max_per_domain != 1:
        shape["max_per_domain"] = constraint.max_per_domain
    return shape


def constraint_from_json(shape: Json) -> TopologyConstraint:
    """Inverse of ``constraint_to_json``."""
    return TopologyConstraint(
        required=_level(shape.get("required")),
        preferred=_level(shape.get("preferred")),
        spread=_level(shape.get("spread")),
        max_per_domain=shape.get("max_per_domain", 1),
    )


def _level(word: str | None) -> Level | None:
    return None if word is None else Level(word)


def _selector_to_json(selector: LabelSelector) -> Json:
    shape: Json = {"key": selector.key}
    if selector.values:
        shape["values"] = selector.values
    if selector.exclude:
        shape["exclude"] = True
    return shape


def _selector_from_json(shape: Json) -> LabelSelector:
    return LabelSelector(
        key=shape["key"],
        values=tuple(shape.get("values", ())),
        exclude=shape.get("exclude", False),
    )


def _slice_to_json(part: GpuSlice) -> Json:
    shape: Json = {}
    if part.share_pct:
        shape["share_pct"] = part.share_pct
    if part.memory_mib:
        shape["memory_mib"] = part.memory_mib
    if part.min_share_pct:
        shape["min_share_pct"] = part.min_share_pct
    if part.max_share_pct:
        shape["max_share_pct"] = part.max_share_pct
    return shape


def _slice_from_json(shape: Json) -> GpuSlice:
    return GpuSlice(
        share_pct=shape.get("share_pct", 0),
        memory_mib=shape.get("memory_mib", 0),
        min_share_pct=shape.get("min_share_pct", 0),
        max_share_pct=shape.get("max_share_pct", 0),
    )


def _whole_to_json(whole: WholeGpus) -> Json:
    shape: Json = {"count": whole.count}
    if whole.min_memory_mib:
        shape["min_memory_mib"] = whole.min_memory_mib
    return shape


def _whole_from_json(shape: Json) -> WholeGpus:
    return WholeGpus(count=shape["count"], min_memory_mib=shape.get("min_memory_mib", 0))


def _group_to_json(group: Group) -> Json:
    shape: Json = {"name": group.name, "replicas": group.replicas}
    match group.accelerator:
        case WholeGpus() as whole:
            shape["whole"] = _whole_to_json(whole)
        case GpuSlice() as part:
            shape["slice"] = _slice_to_json(part)
        case None:
            pass
    if group.models:
        shape["models"] = group.models
    if group.node_selectors:
        shape["selectors"] = [_selector_to_json(each) for each in group.node_selectors]
    if group.cpu_milli:
        shape["cpu_milli"] = group.cpu_milli
    if group.host_memory_mib:
        shape["host_memory_mib"] = group.host_memory_mib
    if topology := constraint_to_json(group.topology):
        shape["topology"] = topology
    if topology := constraint_to_json(group.member_topology):
        shape["member_topology"] = topology
    return shape


def _group_from_json(shape: Json) -> Group:
    accelerator: WholeGpus | GpuSlice | None = None
    if "whole" in shape:
        accelerator = _whole_from_json(shape["whole"])
    elif "slice" in shape:
        accelerator = _slice_from_json(shape["slice"])
    return Group(
        name=shape["name"],
        replicas=shape["replicas"],
        accelerator=accelerator,
        models=tuple(shape.get("models", ())),
        node_selectors=tuple(_selector_from_json(each) for each in shape.get("selectors", ())),
        cpu_milli=shape.get("cpu_milli", 0),
        host_memory_mib=shape.get("host_memory_mib", 0),
        topology=constraint_from_json(shape.get("topology", {})),
        member_topology=constraint_from_json(shape.get("member_topology", {})),
    )


def spec_to_json(spec: LeaseSpec) -> Json:
    """Shape of a request as accepted."""
    shape: Json = {
        "groups": [_group_to_json(group) for group in spec.groups],
        "tenant": spec.tenant,
        "uid": spec.uid,
        "disconnect_s": spec.disconnect_s,
    }
    if topology := constraint_to_json(spec.topology):
        shape["topology"] = topology
    if spec.display_name:
        shape["display_name"] = spec.display_name
    if spec.labels:
        shape["labels"] = spec.labels
    if spec.priority:
        shape["priority"] = spec.priority
    if spec.max_duration_s is not None:
        shape["max_duration_s"] = spec.max_duration_s
    if spec.spares:
        shape["spares"] = spec.spares
    if spec.on_failure is not None:
        shape["on_failure"] = spec.on_failure
    if spec.workload_class is not None:
        shape["workload_class"] = spec.workload_class
    if spec.isolated:
        shape["isolated"] = True
    if spec.movable:
        shape["movable"] = True
    if spec.shared_trust:
        shape["shared_trust"] = True
    if spec.on_caller_node:
        shape["on_caller_node"] = True
    return shape


def spec_from_json(shape: Json) -> LeaseSpec:
    """Inverse of ``spec_to_json``."""
    on_failure = shape.get("on_failure")
    workload_class = shape.get("workload_class")
    return LeaseSpec(
        groups=tuple(_group_from_json(each) for each in shape["groups"]),
        topology=constraint_from_json(shape.get("topology", {})),
        display_name=shape.get("display_name", ""),
        labels=shape.get("labels", {}),
        tenant=shape["tenant"],
        uid=shape["uid"],
        priority=shape.get("priority", 0),
        max_duration_s=shape.get("max_duration_s"),
        disconnect_s=shape["disconnect_s"],
        spares=shape.get("spares", 0),
        on_failure=None if on_failure is None else OnFailure(on_failure),
        isolated=shape.get("isolated", False),
        movable=shape.get("movable", False),
        workload_class=None if workload_class is None else WorkloadClass(workload_class),
        shared_trust=shape.get("shared_trust", False),
        on_caller_node=shape.get("on_caller_node", False),
    )
