"""Is a plan right? Asked before every commit.

Written apart from the placement code and the index on purpose: it goes through the
plan and the raw grants of the devices it names, and believes nothing that was derived
from them. A mistake in placing then meets a second opinion instead of a customer.
"""

from dataclasses import dataclass, field

from gpupool.model.ids import DeviceUuid, HoldId, NodeId
from gpupool.model.lease import DeviceShare, Place
from gpupool.model.request import GpuSlice, Group, LeaseSpec, Level, TopologyConstraint, WholeGpus
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.capacity import DeviceCapacity, NodeCapacity
from gpupool_allocator.core.placement.plan import Plan


@dataclass(slots=True)
class _Use:
    """What the plan itself takes of one device or node."""

    share_pct: int = 0
    memory_mib: int = 0
    whole: int = 0
    slices: int = 0


@dataclass(slots=True)
class _Uses:
    devices: dict[DeviceUuid, _Use] = field(default_factory=dict[DeviceUuid, _Use])
    hosts: dict[NodeId, list[int]] = field(default_factory=dict[NodeId, list[int]])


def validate(
    books: Books, spec: LeaseSpec, plan: Plan, passes: frozenset[HoldId] = frozenset()
) -> str | None:
    """The first rule that the plan breaks, or None. O(plan)."""
    wrong = _wrong_members(spec, plan)
    if wrong:
        return wrong
    groups = {group.name: group for group in spec.groups}
    uses = _Uses()
    for member in plan.members:
        if not books.knows_node(member.place.node_id):
            return f"member {member.rank}: node {member.place.node_id} is not known"
        node = books.node(member.place.node_id)
        group = groups[member.group]
        wrong = (
            _wrong_node(node, group, passes)
            or _wrong_shape(node, group, member.place)
            or _wrong_devices(books, node, group, member.place, passes)
        )
        if wrong:
            return f"member {member.rank} on {node.node_id}: {wrong}"
        _add(uses, member.place)
    return (
        _wrong_sums(books, spec, uses)
        or _wrong_topology(spec.topology, [m.place for m in plan.members], "the lease")
        or _wrong_group_topology(spec, plan)
    )


def _wrong_members(spec: LeaseSpec, plan: Plan) -> str | None:
    wanted = [(group.name, index) for group in spec.groups for index in range(group.replicas)]
    found = [(member.group, member.index) for member in plan.members]
    if found != wanted:
        return f"members: {len(found)} are planned that are not the {len(wanted)} asked for"
    if [member.rank for member in plan.members] != list(range(len(wanted))):
        return "members: ranks do not run from 0 without gaps"
    return None


def _wrong_node(node: NodeCapacity, group: Group, passes: frozenset[HoldId]) -> str | None:
    if not node.offered:
        return "the node is not offered"
    if node.holds - passes:
        return f"the node is held by {min(node.holds - passes)}"
    labels = node.inventory.labels
    for selector in group.node_selectors:
        has = selector.key in labels
        if has and selector.values:
            has = labels[selector.key] in selector.values
        if has is selector.exclude:
            return f"the node fails the test on label {selector.key}"
    return None


def _wrong_shape(node: NodeCapacity, group: Group, place: Place) -> str | None:
    if (place.cpu_milli, place.host_memory_mib) != (group.cpu_milli, group.host_memory_mib):
        return "CPU or host memory is not what was asked for"
    count = 0
    if isinstance(group.accelerator, WholeGpus):
        count = group.accelerator.count
    elif isinstance(group.accelerator, GpuSlice):
        count = 1
    if len(place.devices) != count:
        return f"{len(place.devices)} devices instead of {count}"
    if len({share.device_uuid for share in place.devices}) != count:
        return "a device is named twice"
    unknown = [
        share.device_uuid for share in place.devices if share.device_uuid not in node.devices
    ]
    return f"device {unknown[0]} is not on the node" if unknown else None


def _wrong_devices(
    books: Books, node: NodeCapacity, group: Group, place: Place, passes: frozenset[HoldId]
) -> str | None:
    for share in place.devices:
        device = node.devices[share.device_uuid]
        wrong = _wrong_access(device, group, passes) or _wrong_amount(books, device, group, share)
        if wrong:
            return f"device {share.device_uuid}: {wrong}"
    return None


def _wrong_access(device: DeviceCapacity, group: Group, passes: frozenset[HoldId]) -> str | None:
    if not device.present or not device.offered:
        return "is not offered"
    if device.holds - passes:
        return f"is held by {min(device.holds - passes)}"
    if group.models:
        words = set(device.device.model.lower().split())
        if not any(set(model.lower().split()) <= words for model in group.models):
            return f"model {device.device.model!r} was not asked for"
    return None


def _wrong_amount(
    books: Books, device: DeviceCapacity, group: Group, share: DeviceShare
) -> str | None:
    usable_mib = device.device.memory_mib
    match group.accelerator:
        case WholeGpus(min_memory_mib=least):
            if not share.whole or share.share_pct != 100 or share.memory_mib != (usable_mib or 0):
                return "is not granted whole"
            if least and (usable_mib is None or usable_mib < least):
                return f"has not the {least} MiB asked for"
        case GpuSlice() as wanted:
            if share.whole or share.share_pct != wanted.share_pct:
                return f"share {share.share_pct} % instead of {wanted.share_pct} %"
            if share.share_pct % books.grain_pct:
                return f"share {share.share_pct} % is no multiple of {books.grain_pct} %"
            memory_mib = wanted.memory_mib or (usable_mib or 0) * wanted.share_pct // 100
            if share.memory_mib != memory_mib:
                return f"memory {share.memory_mib} MiB instead of {memory_mib} MiB"
            if not device.device.sliceable:
                return "takes no slices"
        case None:
            return "was not asked for"
    return None


def _add(uses: _Uses, place: Place) -> None:
    host = uses.hosts.setdefault(place.node_id, [0, 0])
    host[0] += place.cpu_milli
    host[1] += place.host_memory_mib
    for share in place.devices:
        use = uses.devices.setdefault(share.device_uuid, _Use())
        use.share_pct += share.share_pct
        use.memory_mib += share.memory_mib
        use.whole += share.whole
        use.slices += not share.whole


def _wrong_sums(books: Books, spec: LeaseSpec, uses: _Uses) -> str | None:
    """Plan and grants together against what there is."""
    for uuid, use in uses.devices.items():
        wrong = _wrong_sum(books.device(uuid), spec, use)
        if wrong:
            return f"device {uuid}: {wrong}"
    for node_id, (cpu_milli, memory_mib) in uses.hosts.items():
        wrong = _wrong_host(books.node(node_id), cpu_milli, memory_mib)
        if wrong:
            return f"node {node_id}: {wrong}"
    return None


def _wrong_host(node: NodeCapacity, cpu_milli: int, memory_mib: int) -> str | None:
    """Nothing asked of a node is right even where it has less than it gave before."""
    if not cpu_milli and not memory_mib:
        return None
    cpu, memory = cpu_milli, memory_mib
    for booking in node.bookings.values():
        cpu += booking.place.cpu_milli
        memory += booking.place.host_memory_mib
    if cpu_milli and cpu > node.inventory.cpu_milli:
        return f"CPU {cpu} milli of {node.inventory.cpu_milli}"
    if memory_mib and memory > node.inventory.host_memory_mib:
        return f"host memory {memory} of {node.inventory.host_memory_mib} MiB"
    return None


def _wrong_sum(device: DeviceCapacity, spec: LeaseSpec, use: _Use) -> str | None:
    if use.whole:
        taken = use.whole > 1 or use.slices or device.granted
        return "is planned whole and is not free" if taken else None
    share_pct, memory_mib = use.share_pct, use.memory_mib
    for grant in device.granted.values():
        if grant.whole:
            return "is granted whole already"
        if grant.uid != spec.uid and not (grant.shared_trust and spec.shared_trust):
            return f"is used by uid {grant.uid}, the request is of uid {spec.uid}"
        share_pct += grant.share_pct
        memory_mib += grant.memory_mib
    if share_pct > 100:
        return f"share {share_pct} % of 100 %"
    if use.memory_mib and memory_mib > (device.device.memory_mib or 0):
        return f"memory {memory_mib} MiB of {device.device.memory_mib or 0} MiB"
    return None


def _wrong_topology(topology: TopologyConstraint, places: list[Place], whose: str) -> str | None:
    if topology.required is not Level.NODE and topology.spread is not Level.NODE:
        return None
    members: dict[NodeId, int] = {}
    for place in places:
        members[place.node_id] = members.get(place.node_id, 0) + 1
    if topology.required is Level.NODE and len(members) > 1:
        return f"{whose} is on {len(members)} nodes, required is one"
    most = max(members.values(), default=0)
    if topology.spread is Level.NODE and most > topology.max_per_domain:
        return f"{whose} has {most} members on one node, spread allows {topology.max_per_domain}"
    return None


def _wrong_group_topology(spec: LeaseSpec, plan: Plan) -> str | None:
    for group in spec.groups:
        if group.topology.required is Level.NODE or group.topology.spread is Level.NODE:
            places = [member.place for member in plan.members if member.group == group.name]
            wrong = _wrong_topology(group.topology, places, f"group {group.name}")
            if wrong:
                return wrong
    return None
