"""Small pools and requests for placement tests."""

from gpupool.model.assignment import AssignmentKey
from gpupool.model.ids import DeviceUuid, HoldId, LeaseId, NodeId
from gpupool.model.inventory import Device, NodeInventory
from gpupool.model.lease import DeviceShare, Place
from gpupool.model.request import (
    NO_CONSTRAINT,
    GpuSlice,
    Group,
    LabelSelector,
    LeaseSpec,
    TopologyConstraint,
    WholeGpus,
)
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.placement import Plan, Unplaced, plan, validate

H100 = "NVIDIA H100 80GB HBM3"
NO_HOLDS: frozenset[HoldId] = frozenset()


def uuid_of(node: str, index: int) -> DeviceUuid:
    """UUID of a node's n-th GPU."""
    return DeviceUuid(f"GPU-{node}-{index}")


def inventory(
    node: str,
    gpus: int = 8,
    *,
    model: str = H100,
    memory_mib: int | None = 81_920,
    sliceable: bool = True,
    cpu_milli: int = 100_000,
    host_memory_mib: int = 1_000_000,
    labels: dict[str, str] | None = None,
) -> NodeInventory:
    """What a node of like GPUs has."""
    devices = tuple(
        Device(
            uuid=uuid_of(node, index),
            model=model,
            memory_mib=memory_mib,
            index=index,
            sliceable=sliceable,
        )
        for index in range(gpus)
    )
    return NodeInventory(
        devices=devices,
        cpu_milli=cpu_milli,
        host_memory_mib=host_memory_mib,
        labels=labels or {},
    )


def offer(books: Books, node: str, what: NodeInventory) -> None:
    """Adds a node with everything on it offered."""
    books.put_node(NodeId(node), what)
    books.offer_node(NodeId(node), True)
    for device in what.devices:
        books.offer_device(device.uuid, True)


def pool(*nodes: str, gpus: int = 8, grain_pct: int = 10, memory_mib: int | None = 81_920) -> Books:
    """Like nodes, all offered."""
    books = Books(grain_pct=grain_pct)
    for node in nodes:
        offer(books, node, inventory(node, gpus, memory_mib=memory_mib))
    return books


def whole(count: int = 1, *, min_memory_mib: int = 0) -> WholeGpus:
    """Whole GPUs."""
    return WholeGpus(count=count, min_memory_mib=min_memory_mib)


def part(share_pct: int = 0, *, memory_mib: int = 0) -> GpuSlice:
    """A slice."""
    return GpuSlice(share_pct=share_pct, memory_mib=memory_mib)


def ask(
    accelerator: WholeGpus | GpuSlice | None = None,
    replicas: int = 1,
    *,
    models: tuple[str, ...] = (),
    selectors: tuple[LabelSelector, ...] = (),
    cpu_milli: int = 0,
    host_memory_mib: int = 0,
    topology: TopologyConstraint = NO_CONSTRAINT,
    lease_topology: TopologyConstraint = NO_CONSTRAINT,
    uid: int = 1000,
    shared_trust: bool = False,
) -> LeaseSpec:
    """A request of one group."""
    group = Group(
        replicas=replicas,
        accelerator=accelerator,
        models=models,
        node_selectors=selectors,
        cpu_milli=cpu_milli,
        host_memory_mib=host_memory_mib,
        topology=topology,
    )
    return LeaseSpec(groups=(group,), topology=lease_topology, uid=uid, shared_trust=shared_trust)


def key(lease: str, rank: int = 0) -> AssignmentKey:
    """A member's name."""
    return AssignmentKey(lease_id=LeaseId(lease), rank=rank)


def place(node: str, *shares: DeviceShare, cpu_milli: int = 0, host_memory_mib: int = 0) -> Place:
    """A place made by hand."""
    return Place(
        node_id=NodeId(node),
        devices=shares,
        cpu_milli=cpu_milli,
        host_memory_mib=host_memory_mib,
    )


def share(node: str, index: int, share_pct: int, memory_mib: int = 0) -> DeviceShare:
    """A slice of a node's n-th GPU."""
    return DeviceShare(
        device_uuid=uuid_of(node, index), share_pct=share_pct, memory_mib=memory_mib, whole=False
    )


def all_of(node: str, index: int, memory_mib: int = 81_920) -> DeviceShare:
    """A node's n-th GPU, whole."""
    return DeviceShare(
        device_uuid=uuid_of(node, index), share_pct=100, memory_mib=memory_mib, whole=True
    )


def placed(books: Books, spec: LeaseSpec, passes: frozenset[HoldId] = NO_HOLDS) -> Plan:
    """The plan for a request that must fit, validated."""
    answer = plan(books, spec, passes)
    assert isinstance(answer, Plan), answer
    assert validate(books, spec, answer, passes) is None
    return answer


def refused(books: Books, spec: LeaseSpec, passes: frozenset[HoldId] = NO_HOLDS) -> Unplaced:
    """The answer to a request that must not fit."""
    answer = plan(books, spec, passes)
    assert isinstance(answer, Unplaced), answer
    return answer


def grant(books: Books, lease: str, spec: LeaseSpec) -> Plan:
    """Places and books a request that must fit."""
    answer = placed(books, spec)
    for member in answer.members:
        books.book(
            key(lease, member.rank), member.place, uid=spec.uid, shared_trust=spec.shared_trust
        )
    books.check()
    return answer


def nodes_of(answer: Plan) -> list[str]:
    """Nodes of the members, by rank."""
    return [str(member.place.node_id) for member in answer.members]


def codes_of(answer: Unplaced) -> set[str]:
    """Codes of all causes."""
    return {cause.code for cause in answer.explanation.causes}
