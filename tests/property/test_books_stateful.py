"""The books under any order of changes: every promise after every step."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gpupool.model.assignment import AssignmentKey
from gpupool.model.ids import DeviceUuid, HoldId, LeaseId, NodeId
from gpupool.model.inventory import Device, NodeInventory
from gpupool.model.lease import DeviceShare, Place
from gpupool.model.request import GpuSlice, Group, LeaseSpec, Level, TopologyConstraint, WholeGpus
from gpupool_allocator.core.books import BookingError, Books
from gpupool_allocator.core.placement import Plan, Unplaced, explain, plan, validate

NODES = [NodeId(f"n{number}") for number in range(4)]
UUIDS = [DeviceUuid(f"GPU-{number}") for number in range(10)]
HOLDS = [HoldId("h1"), HoldId("h2")]

nodes = st.sampled_from(NODES)
uuids = st.sampled_from(UUIDS)
hold_sets = st.frozensets(st.sampled_from(HOLDS))
devices = st.builds(
    Device,
    uuid=uuids,
    model=st.sampled_from(["NVIDIA H100", "NVIDIA A100", "GB10"]),
    memory_mib=st.sampled_from([None, 1000, 81_920]),
    index=st.integers(0, 9),
    sliceable=st.sampled_from([True, True, True, False]),
)
inventories = st.builds(
    NodeInventory,
    devices=st.lists(devices, max_size=4).map(tuple),
    cpu_milli=st.sampled_from([0, 1000, 64_000]),
    host_memory_mib=st.sampled_from([0, 1000, 64_000]),
    labels=st.dictionaries(st.sampled_from(["zone"]), st.sampled_from(["x", "y"])),
)
accelerators = st.one_of(
    st.none(),
    st.builds(WholeGpus, count=st.integers(1, 3), min_memory_mib=st.sampled_from([0, 1001])),
    st.builds(
        GpuSlice,
        share_pct=st.sampled_from([10, 30, 50, 100]),
        memory_mib=st.sampled_from([0, 0, 400]),
    ),
    st.builds(GpuSlice, memory_mib=st.sampled_from([1, 600])),
)
topologies = st.sampled_from(
    [
        TopologyConstraint(),
        TopologyConstraint(required=Level.NODE),
        TopologyConstraint(preferred=Level.NODE),
        TopologyConstraint(spread=Level.NODE, max_per_domain=1),
    ]
)
groups = st.builds(
    Group,
    replicas=st.integers(1, 4),
    accelerator=accelerators,
    models=st.sampled_from([(), (), ("h100",), ("a100", "gb10")]),
    cpu_milli=st.sampled_from([0, 0, 600]),
    host_memory_mib=st.sampled_from([0, 0, 600]),
    topology=topologies,
)


def _spec(members: list[Group], topology: TopologyConstraint, uid: int, trust: bool) -> LeaseSpec:
    named = tuple(
        Group(
            name=f"g{position}",
            replicas=group.replicas,
            accelerator=group.accelerator,
            models=group.models,
            cpu_milli=group.cpu_milli,
            host_memory_mib=group.host_memory_mib,
            topology=group.topology,
        )
        for position, group in enumerate(members)
    )
    return LeaseSpec(groups=named, topology=topology, uid=uid, shared_trust=trust)


specs = st.builds(
    _spec,
    st.lists(groups, min_size=1, max_size=2),
    topologies,
    st.integers(1, 2),
    st.booleans(),
)
shares = st.builds(
    DeviceShare,
    device_uuid=uuids,
    share_pct=st.sampled_from([0, 10, 50, 55, 100]),
    memory_mib=st.sampled_from([0, 400, 1000]),
    whole=st.booleans(),
)
places = st.builds(
    Place,
    node_id=nodes,
    devices=st.lists(shares, max_size=2).map(tuple),
    cpu_milli=st.sampled_from([0, 1000, -1]),
    host_memory_mib=st.sampled_from([0, 1000]),
)


class BooksMachine(RuleBasedStateMachine):
    """Random changes; what is refused must have changed nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books(grain_pct=10)
        self.booked: list[AssignmentKey] = []
        self.made = 0

    def attempt(self, change: Callable[[], object]) -> bool:
        """Makes a change, or sees it refused with a reason."""
        try:
            change()
        except BookingError:
            return False
        return True

    @rule(node=nodes, inventory=inventories)
    def put(self, node: NodeId, inventory: NodeInventory) -> None:
        self.attempt(lambda: self.books.put_node(node, inventory))

    @rule(node=nodes, offered=st.booleans())
    def offer_node(self, node: NodeId, offered: bool) -> None:
        if self.books.knows_node(node):
            self.books.offer_node(node, offered)

    @rule(offered=st.booleans(), cause=st.sampled_from(["unclean", "faulty"]))
    def offer_all_devices(self, offered: bool, cause: str) -> None:
        for uuid in UUIDS:
            if self.books.knows_device(uuid):
                done = self.attempt(lambda u=uuid: self.books.offer_device(u, offered, cause))
                assert done or not self.books.device(uuid).present

    @rule()
    def offer_everything(self) -> None:
        for node in NODES:
            self.offer_node(node, True)
        self.offer_all_devices(True, "unclean")

    @rule(uuid=uuids)
    def withdraw_device(self, uuid: DeviceUuid) -> None:
        if self.books.knows_device(uuid):
            self.books.offer_device(uuid, False)

    @rule(node=nodes, holds=hold_sets)
    def hold_node(self, node: NodeId, holds: frozenset[HoldId]) -> None:
        if self.books.knows_node(node):
            self.books.hold_node(node, holds)

    @rule(uuid=uuids, holds=hold_sets)
    def hold_device(self, uuid: DeviceUuid, holds: frozenset[HoldId]) -> None:
        if self.books.knows_device(uuid):
            self.books.hold_device(uuid, holds)

    @rule(node=nodes)
    def forget_node(self, node: NodeId) -> None:
        if self.books.knows_node(node):
            booked = self.books.bookings_on(node)
            assert self.attempt(lambda: self.books.forget_node(node)) is not bool(booked)

    @rule(uuid=uuids)
    def forget_device(self, uuid: DeviceUuid) -> None:
        if self.books.knows_device(uuid):
            booked = self.books.keys_on(uuid)
            assert self.attempt(lambda: self.books.forget_device(uuid)) is not bool(booked)

    @rule(place=places, uid=st.integers(1, 2), trust=st.booleans(), restored=st.booleans())
    def book_anything(self, place: Place, uid: int, trust: bool, restored: bool) -> None:
        key = AssignmentKey(lease_id=LeaseId(f"by-hand-{self.made}"), rank=0)
        self.made += 1
        if self.attempt(
            lambda: self.books.book(key, place, uid=uid, shared_trust=trust, restored=restored)
        ):
            self.booked.append(key)

    @rule(spec=specs, passes=hold_sets)
    def place_and_book(self, spec: LeaseSpec, passes: frozenset[HoldId]) -> None:
        answer = plan(self.books, spec, passes)
        assert plan(self.books, spec, passes) == answer
        if isinstance(answer, Unplaced):
            known = len(list(self.books.nodes()))
            assert answer.explanation.summary
            assert sum(cause.count for cause in answer.explanation.causes) == known
            assert "search_bound" not in {cause.code for cause in answer.explanation.causes}
            return
        assert validate(self.books, spec, answer, passes) is None
        self.made += 1
        for member in answer.members:
            key = AssignmentKey(lease_id=LeaseId(f"lease-{self.made}"), rank=member.rank)
            self.books.book(key, member.place, uid=spec.uid, shared_trust=spec.shared_trust)
            self.booked.append(key)

    @rule(spec=specs, passes=hold_sets)
    def verdicts_agree_with_placing(self, spec: LeaseSpec, passes: frozenset[HoldId]) -> None:
        for group in spec.groups:
            one = Group(
                accelerator=group.accelerator,
                models=group.models,
                cpu_milli=group.cpu_milli,
                host_memory_mib=group.host_memory_mib,
            )
            single = LeaseSpec(groups=(one,), uid=spec.uid, shared_trust=spec.shared_trust)
            open_nodes = {v.node_id for v in explain(self.books, single, passes) if not v.causes}
            answer = plan(self.books, single, passes)
            if isinstance(answer, Plan):
                assert answer.members[0].place.node_id in open_nodes
            else:
                assert not open_nodes

    @rule(pick=st.integers(0, 1000))
    def unbook(self, pick: int) -> None:
        if self.booked:
            key = self.booked.pop(pick % len(self.booked))
            place = self.books.place_of(key)
            assert self.books.unbook(key) == place
            assert not self.attempt(lambda: self.books.unbook(key))

    @rule()
    def unbook_everything(self) -> None:
        for key in self.booked:
            self.books.unbook(key)
        self.booked.clear()
        for node in self.books.nodes():
            assert node.free_cpu_milli == node.inventory.cpu_milli
            assert all(device.free_share_pct == 100 for device in node.devices.values())

    @invariant()
    def promises_hold(self) -> None:
        self.books.check()


TestBooks = BooksMachine.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_check_finds_an_over_booking_made_behind_its_back() -> None:
    books = Books()
    device = Device(uuid=UUIDS[0], model="X", memory_mib=100)
    books.put_node(NODES[0], NodeInventory(devices=(device,)))
    share = DeviceShare(device_uuid=UUIDS[0], share_pct=60, memory_mib=60, whole=False)
    key = AssignmentKey(lease_id=LeaseId("a"), rank=0)
    books.book(key, Place(node_id=NODES[0], devices=(share,)), uid=1)
    books.check()
    other = AssignmentKey(lease_id=LeaseId("b"), rank=0)
    node = books.node(NODES[0])
    node.take(other, node.bookings[key])
    with pytest.raises(AssertionError, match="over 100 % share"):
        books.check()
