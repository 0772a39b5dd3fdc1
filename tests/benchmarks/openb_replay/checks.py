"""The promises, checked from outside: by what anybody can see, not by the pool's own code.

Each check yields one sentence for each thing that is not as it should be.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from tests.benchmarks.openb_replay.picture import Picture, Running, on_node
from tests.benchmarks.openb_replay.trace import TraceNode, TracePod

from gpupool.model.event import Event
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId
from gpupool.model.lease import DeviceShare, Lease, LeaseState, Member, MemberState
from gpupool.model.request import GpuSlice, WholeGpus
from gpupool.model.views import DeviceState, DeviceView, NodeState

LIFE = ("granted", "active", "releasing", "released")
"""Every change of a lease that fits at once and is given back."""


def wrong_when_loaded(
    picture: Picture,
    hosts: Sequence[TraceNode],
    held: Mapping[LeaseId, TracePod],
    refused: Sequence[TracePod],
) -> Iterator[str]:
    """Everything that is wrong while ``held`` are held and ``refused`` were refused."""
    yield from wrong_inventory(picture, hosts)
    yield from wrong_leases(picture.leases, held)
    yield from wrong_grants(picture, held)
    yield from wrong_capacity(picture)
    yield from wrong_sums(picture)
    yield from wrong_agents(picture)
    yield from wrong_refusals(picture, refused)


def wrong_when_empty(picture: Picture, hosts: Sequence[TraceNode]) -> Iterator[str]:
    """Everything that is wrong when nothing is held: no trace of any lease is left."""
    yield from wrong_inventory(picture, hosts)
    yield from wrong_leases(picture.leases, {})
    yield from wrong_sums(picture)
    yield from wrong_agents(picture)
    for device in picture.devices:
        if device.state is not DeviceState.FREE:
            why = "; ".join(device.reasons)
            yield f"{device.device.uuid} is {device.state} in an empty pool: {why}"
    for node in picture.nodes:
        free = (node.free_cpu_milli, node.free_host_memory_mib)
        if free != (node.inventory.cpu_milli, node.inventory.host_memory_mib):
            yield f"node {node.node_id} has only {free} free in an empty pool"


def wrong_inventory(picture: Picture, hosts: Sequence[TraceNode]) -> Iterator[str]:
    """The pool has the hosts of the list, connected, with their GPUs, and no others."""
    for node in picture.nodes:
        if node.state is not NodeState.CONNECTED:
            yield f"node {node.node_id} is {node.state}"
    listed = {
        node.node_id: (
            node.inventory.cpu_milli,
            node.inventory.host_memory_mib,
            tuple(device.model for device in node.inventory.devices),
        )
        for node in picture.nodes
    }
    wanted = {
        NodeId(host.name): (host.cpu_milli, host.memory_mib, (host.model,) * host.gpus)
        for host in hosts
    }
    for node_id in sorted(listed.keys() | wanted.keys()):
        if listed.get(node_id) != wanted.get(node_id):
            yield f"node {node_id} is {listed.get(node_id)}, the list has {wanted.get(node_id)}"
    on_devices = Counter(device.node_id for device in picture.devices)
    if on_devices != Counter({NodeId(host.name): host.gpus for host in hosts if host.gpus}):
        yield "the devices are not those of the nodes"


def wrong_leases(leases: Sequence[Lease], held: Mapping[LeaseId, TracePod]) -> Iterator[str]:
    """What was granted is there and active; what was refused, or released, is not."""
    listed = {lease.lease_id: lease for lease in leases}
    if len(listed) != len(leases):
        yield "a lease is listed twice"
    for lease_id in sorted(held.keys() - listed.keys()):
        yield f"lease {lease_id} was granted and is not listed"
    for lease_id in sorted(listed.keys() - held.keys()):
        yield f"lease {lease_id} is {listed[lease_id].state} and nobody holds it"
    for lease_id in sorted(held.keys() & listed.keys()):
        lease = listed[lease_id]
        if lease.state is not LeaseState.ACTIVE:
            yield f"lease {lease_id} is {lease.state}, its holder was told that it is active"
        if lease.spec != held[lease_id].spec():
            yield f"lease {lease_id} is not what pod {held[lease_id].name} asked for"


def wrong_grants(picture: Picture, held: Mapping[LeaseId, TracePod]) -> Iterator[str]:
    """Each lease has what its pod asked for: all of it, on one node, of an accepted model."""
    devices = {device.device.uuid: device for device in picture.devices}
    for lease in picture.leases:
        pod = held.get(lease.lease_id)
        if pod is None:
            continue
        if len(lease.members) != 1:
            yield f"lease {lease.lease_id} has {len(lease.members)} members"
            continue
        (member,) = lease.members
        if member.state is not MemberState.READY:
            yield f"lease {lease.lease_id} has a member that is {member.state}"
        place = member.place
        if (place.cpu_milli, place.host_memory_mib) != (pod.cpu_milli, pod.memory_mib):
            yield f"lease {lease.lease_id} has not the CPU and memory that were asked for"
        shares = [(share.share_pct, share.whole) for share in place.devices]
        if shares != _shares_asked(pod):
            yield f"lease {lease.lease_id} has {shares}, not {_shares_asked(pod)}"
        yield from _wrong_devices(lease.lease_id, member, pod, devices)


def _shares_asked(pod: TracePod) -> list[tuple[int, bool]]:
    match pod.spec().groups[0].accelerator:
        case WholeGpus(count=count):
            return [(100, True)] * count
        case GpuSlice(share_pct=share_pct):
            return [(share_pct, False)]
        case None:
            return []


def _wrong_devices(
    lease_id: LeaseId, member: Member, pod: TracePod, devices: Mapping[DeviceUuid, DeviceView]
) -> Iterator[str]:
    uuids = [share.device_uuid for share in member.place.devices]
    if len(set(uuids)) != len(uuids):
        yield f"lease {lease_id} has a device twice"
    for uuid in uuids:
        device = devices.get(uuid)
        if device is None or device.node_id != member.place.node_id:
            yield f"lease {lease_id} has {uuid}, which is not on its node"
        elif pod.models and device.device.model.lower() not in pod.models:
            yield f"lease {lease_id} has a {device.device.model}, accepted are {pod.models}"


def shares_by_device(
    leases: Sequence[Lease],
) -> dict[DeviceUuid, list[tuple[LeaseId, DeviceShare]]]:
    """Who has what of each device."""
    shares: dict[DeviceUuid, list[tuple[LeaseId, DeviceShare]]] = defaultdict(list)
    for lease in leases:
        for member in lease.members:
            for share in member.place.devices:
                shares[share.device_uuid].append((lease.lease_id, share))
    return shares


def wrong_capacity(picture: Picture) -> Iterator[str]:
    """No device over 100 % or over its memory, none whole and shared, no host over its own."""
    memory_mib = {device.device.uuid: device.device.memory_mib for device in picture.devices}
    for uuid, shares in shares_by_device(picture.leases).items():
        if sum(share.share_pct for _, share in shares) > 100:
            yield f"{uuid} is over 100 %: {shares}"
        if len(shares) > 1 and any(share.whole for _, share in shares):
            yield f"{uuid} is whole for one and shared by others: {shares}"
        usable_mib = memory_mib.get(uuid)
        if usable_mib is not None and sum(share.memory_mib for _, share in shares) > usable_mib:
            yield f"{uuid} has more than its {usable_mib} MiB granted: {shares}"
    cpu_milli, host_memory_mib = _taken(picture.leases)
    for node in picture.nodes:
        room = node.inventory
        if cpu_milli[node.node_id] > room.cpu_milli:
            yield f"node {node.node_id} has more than its CPU granted"
        if host_memory_mib[node.node_id] > room.host_memory_mib:
            yield f"node {node.node_id} has more than its memory granted"


def _taken(leases: Sequence[Lease]) -> tuple[Counter[NodeId], Counter[NodeId]]:
    """CPU and host memory granted, by node."""
    cpu_milli: Counter[NodeId] = Counter()
    host_memory_mib: Counter[NodeId] = Counter()
    for lease in leases:
        for member in lease.members:
            cpu_milli[member.place.node_id] += member.place.cpu_milli
            host_memory_mib[member.place.node_id] += member.place.host_memory_mib
    return cpu_milli, host_memory_mib


def wrong_sums(picture: Picture) -> Iterator[str]:
    """Free + granted + unavailable = inventory: for each device, each node and the pool."""
    shares = shares_by_device(picture.leases)
    for device in picture.devices:
        own = shares.get(device.device.uuid, [])
        granted_pct = sum(share.share_pct for _, share in own)
        if device.free_share_pct + granted_pct != 100:
            yield f"{device.device.uuid}: {device.free_share_pct} free, {granted_pct} granted"
        if set(device.lease_ids) != {lease_id for lease_id, _ in own}:
            yield f"{device.device.uuid} names other leases than those that have it"
        whole = any(share.whole for _, share in own)
        expected = DeviceState.WHOLE if whole else DeviceState.SLICED
        if own and device.state is not expected:
            yield f"{device.device.uuid} is {device.state}, not {expected}"
        if not own and device.state not in (DeviceState.FREE, DeviceState.UNAVAILABLE):
            yield f"{device.device.uuid} is {device.state}, nobody has it"
    cpu_milli, host_memory_mib = _taken(picture.leases)
    for node in picture.nodes:
        if node.free_cpu_milli + cpu_milli[node.node_id] != node.inventory.cpu_milli:
            yield f"node {node.node_id}: free and granted CPU are not what it has"
        granted_mib = host_memory_mib[node.node_id]
        if node.free_host_memory_mib + granted_mib != node.inventory.host_memory_mib:
            yield f"node {node.node_id}: free and granted memory are not what it has"
    yield from _wrong_summary(picture)


def _wrong_summary(picture: Picture) -> Iterator[str]:
    states = Counter(device.state for device in picture.devices)
    expected = {
        "devices": len(picture.devices),
        "devices_free": states[DeviceState.FREE],
        "devices_used": states[DeviceState.SLICED] + states[DeviceState.WHOLE],
        "devices_unavailable": states[DeviceState.UNAVAILABLE],
        "granted_share_pct": sum(100 - device.free_share_pct for device in picture.devices),
        "nodes": len(picture.nodes),
        "leases": len(picture.leases),
        "waiting": 0,
    }
    for name, value in expected.items():
        if getattr(picture.summary, name) != value:
            yield f"the pool's {name} is {getattr(picture.summary, name)}, counted are {value}"


def wrong_agents(picture: Picture) -> Iterator[str]:
    """Each agent runs exactly what the allocator has granted on its node, prepared."""
    yield from picture.unprepared
    wanted: dict[NodeId, set[Running]] = defaultdict(set)
    for lease in picture.leases:
        for node_id, running in on_node(lease).items():
            wanted[node_id] |= running
    for node_id in sorted(wanted.keys() | picture.agents.keys()):
        runs = picture.agents.get(node_id, frozenset())
        for missing in wanted[node_id] - runs:
            yield f"node {node_id} does not run {missing}"
        for surplus in runs - wanted[node_id]:
            yield f"node {node_id} runs {surplus}, which is not granted"


def wrong_refusals(picture: Picture, refused: Sequence[TracePod]) -> Iterator[str]:
    """No pod that was refused fits now. Room only shrinks while nothing is given back."""
    on_node = defaultdict[NodeId, list[DeviceView]](list)
    for device in picture.devices:
        on_node[device.node_id].append(device)
    # The trace draws from a few thousand pods, so many are alike in all but their names.
    for pod in {replace(pod, name=""): pod for pod in refused}.values():
        shares = _shares_asked(pod)
        for node in picture.nodes:
            if (
                node.free_cpu_milli >= pod.cpu_milli
                and node.free_host_memory_mib >= pod.memory_mib
                and _fit(pod, shares, on_node[node.node_id])
            ):
                yield f"pod {pod.name} was refused and fits on node {node.node_id}"
                break


def _fit(pod: TracePod, shares: Sequence[tuple[int, bool]], devices: Sequence[DeviceView]) -> bool:
    enough = [
        device
        for device in devices
        if device.free_share_pct >= (shares[0][0] if shares else 0)
        and device.state in (DeviceState.FREE, DeviceState.SLICED)
        and (not pod.models or device.device.model.lower() in pod.models)
    ]
    return len(enough) >= len(shares)


def tokens_by_device(leases: Sequence[Lease]) -> dict[DeviceUuid, list[int]]:
    """Fencing numbers in use on each device, the highest last."""
    tokens: dict[DeviceUuid, list[int]] = defaultdict(list)
    for lease in leases:
        for member in lease.members:
            for share in member.place.devices:
                tokens[share.device_uuid].append(member.token)
    return {uuid: sorted(used) for uuid, used in tokens.items()}


def wrong_tokens(leases: Sequence[Lease], floors: Mapping[DeviceUuid, int]) -> Iterator[str]:
    """On each device every token is above those of the leases before, and none is there twice."""
    for uuid, used in tokens_by_device(leases).items():
        if used[0] <= floors.get(uuid, 0):
            yield f"{uuid} has token {used[0]}, {floors[uuid]} was used on it before"
        if len(set(used)) != len(used):
            yield f"{uuid} has a token twice: {used}"


def wrong_history(events: Sequence[Event], after: int, held: Collection[LeaseId]) -> Iterator[str]:
    """Every change is an event with a cause, without gaps; refusals have changed nothing."""
    lives: dict[str, list[str]] = {lease_id: [] for lease_id in held}
    for sequence, event in enumerate(events, start=after + 1):
        if event.sequence != sequence:
            yield f"event {sequence} is missing: the next is {event.sequence}"
            return
        if not event.cause:
            yield f"event {sequence}, {event.kind} of {event.subject}, has no cause"
        topic, _, change = event.kind.partition(".")
        if topic == "alarm":
            yield f"the allocator raised {event.kind}: {event.cause}"
        elif topic == "lease":
            lives.setdefault(event.subject, []).append(change)
    for lease_id, life in lives.items():
        if tuple(life) != LIFE or lease_id not in held:
            yield f"lease {lease_id} went through {life}"
