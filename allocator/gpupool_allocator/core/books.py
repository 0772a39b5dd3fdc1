"""The capacity books: what every node has, and what of it is granted to whom.

The only place that changes capacity. Each change is checked as a whole before any of
it is made, and the shape index follows in the same step, so the two never disagree.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from operator import attrgetter

from gpupool.model.ids import DeviceUuid, HoldId, NodeId
from gpupool.model.inventory import NodeInventory
from gpupool.model.lease import DeviceShare, Place
from gpupool_allocator.core.capacity import (
    CAUSES,
    UNCLEAN,
    Booking,
    BookingKey,
    DeviceCapacity,
    NodeCapacity,
)
from gpupool_allocator.core.index import ShapeIndex
from gpupool_allocator.core.totals import NOTHING, Totals, totals_of


class BookingError(Exception):
    """A change would break a promise of the books. Nothing was changed."""


class Books:
    """Free and granted capacity of every node and device.

    Nodes are numbered as they arrive; the number of a forgotten node is used again.
    Nothing is offered until ``offer_node`` and ``offer_device`` say so. Reading
    methods raise KeyError for a node or device that is not known.
    """

    def __init__(self, *, grain_pct: int = 10) -> None:
        if not 1 <= grain_pct <= 100:
            raise ValueError(f"grain_pct: {grain_pct} is outside 1..100")
        self.grain_pct = grain_pct
        self._index = ShapeIndex()
        self._stale: dict[int, NodeCapacity] = {}
        self._nodes: dict[NodeId, NodeCapacity] = {}
        self._by_number: dict[int, NodeCapacity] = {}
        self._free_numbers: list[int] = []
        self._devices: dict[DeviceUuid, DeviceCapacity] = {}
        self._homes: dict[BookingKey, NodeCapacity] = {}
        self._held_devices: dict[HoldId, dict[DeviceUuid, NodeCapacity]] = {}
        self._totals = NOTHING
        self._totals_of: dict[NodeId, Totals] = {}

    @property
    def index(self) -> ShapeIndex:
        """Which nodes look alike for a request."""
        self._catch_up()
        return self._index

    # -- what there is ---------------------------------------------------------

    def put_node(self, node_id: NodeId, inventory: NodeInventory) -> None:
        """Adds a node or updates its inventory. Bookings, offers and holds stay.

        New devices are not offered. A device that the inventory lacks is no longer
        offered, and known until ``forget_device``; one that another node has lost,
        with nothing on it, moves here. Raises BookingError where a device is named
        twice, or is another node's.
        """
        node = self._nodes.get(node_id)
        named = {device.uuid for device in inventory.devices}
        if len(named) != len(inventory.devices):
            raise BookingError(f"node {node_id}: a device is named twice in its inventory")
        moved = [
            known
            for uuid in named
            if (known := self._devices.get(uuid)) is not None and known.node_id != node_id
        ]
        for device in moved:
            if device.present or device.granted:
                raise BookingError(
                    f"device {device.device.uuid} of node {node_id} is known on {device.node_id}"
                )
        for device in moved:
            self.forget_device(device.device.uuid)
        if node is None:
            node = NodeCapacity(node_id, self._free_number(), inventory)
            self._nodes[node_id] = self._by_number[node.number] = node
        node.inventory = inventory
        self._put_devices(node, inventory)
        node.recount()
        self._capacity_changed(node)

    def forget_device(self, uuid: DeviceUuid) -> None:
        """Forgets a device; BookingError while something is booked on it."""
        device = self._devices[uuid]
        if device.granted:
            raise BookingError(f"device {uuid} is booked by {_first(device.granted)}")
        node = self._nodes[device.node_id]
        self._note_holds(node, device, frozenset())
        del self._devices[uuid], node.devices[uuid]
        node.recount()
        self._capacity_changed(node)

    def forget_node(self, node_id: NodeId) -> None:
        """Forgets a node and its devices; BookingError while something is booked on it."""
        node = self._nodes[node_id]
        if node.bookings:
            raise BookingError(f"node {node_id} is booked by {_first(node.bookings)}")
        self.offer_node(node_id, False)
        self.hold_node(node_id, frozenset())
        for device in node.devices.values():
            self._note_holds(node, device, frozenset())
            del self._devices[device.device.uuid]
        self.index.forget(node)  # which has caught up with what it forgets
        self._totals = self._totals.replaced(self._totals_of.pop(node.node_id, NOTHING), NOTHING)
        del self._nodes[node_id]
        del self._by_number[node.number]
        heappush(self._free_numbers, node.number)

    # -- what of it may be granted ---------------------------------------------

    def offer_node(self, node_id: NodeId, offered: bool) -> None:
        """Says whether a node is connected and has reported in this epoch."""
        node = self._nodes[node_id]
        if node.offered != offered:
            node.offered = offered
            self._access_changed(node)

    def offer_device(self, uuid: DeviceUuid, offered: bool, cause: str = UNCLEAN) -> None:
        """Says whether a device is clean, present and healthy, and why not.

        ``cause`` is one of capacity.CAUSES (ValueError). A device that is absent
        from its node's inventory cannot be offered (BookingError).
        """
        if cause not in CAUSES:
            raise ValueError(f"cause: {cause!r} is none of {', '.join(CAUSES)}")
        device = self._devices[uuid]
        if offered and not device.present:
            raise BookingError(f"device {uuid} is absent from node {device.node_id}")
        if device.offered != offered or device.cause != cause:
            device.offered, device.cause = offered, cause
            self._capacity_changed(self._nodes[device.node_id])

    def hold_node(self, node_id: NodeId, holds: frozenset[HoldId]) -> None:
        """Replaces the holds on a node."""
        node = self._nodes[node_id]
        if node.holds != holds:
            node.holds = holds
            self._access_changed(node)

    def hold_device(self, uuid: DeviceUuid, holds: frozenset[HoldId]) -> None:
        """Replaces the holds on a device."""
        device = self._devices[uuid]
        if device.holds != holds:
            node = self._nodes[device.node_id]
            self._note_holds(node, device, holds)
            self._capacity_changed(node)

    # -- what is granted -------------------------------------------------------

    def book(
        self,
        key: BookingKey,
        place: Place,
        *,
        uid: int,
        shared_trust: bool = False,
        restored: bool = False,
    ) -> None:
        """Grants ``place`` to ``key``, on offered devices or not.

        ``restored``: the grant is an older one, which stays even where the
        inventory or the grain has changed since. Raises BookingError if it would
        break promise 1 or is booked already; nothing has changed then.
        """
        if key in self._homes:
            raise BookingError(f"{key} is booked on node {self._homes[key].node_id} already")
        node = self._nodes.get(place.node_id)
        if node is None:
            raise BookingError(f"node {place.node_id} is not known")
        if not restored:
            _check_host(node, place)
        seen: set[DeviceUuid] = set()
        for share in place.devices:
            device = node.devices.get(share.device_uuid)
            if device is None:
                raise BookingError(f"device {share.device_uuid} is not on node {node.node_id}")
            if share.device_uuid in seen:
                raise BookingError(f"device {share.device_uuid} is named twice in one place")
            seen.add(share.device_uuid)
            grain = 1 if restored else self.grain_pct
            reason = _refusal(device, share, uid, shared_trust, grain, restored)
            if reason:
                raise BookingError(f"device {share.device_uuid}: {reason}")
        node.take(key, Booking(place, uid, shared_trust))
        if restored:
            node.recount()
        self._homes[key] = node
        self._capacity_changed(node)
        if not restored:
            self._catch_up()

    def unbook(self, key: BookingKey) -> Place:
        """Takes a grant back; BookingError where there is none."""
        node = self._homes.pop(key, None)
        if node is None:
            raise BookingError(f"{key} is not booked")
        booking = node.give(key)
        self._capacity_changed(node)
        self._catch_up()
        return booking.place

    # -- reading ---------------------------------------------------------------

    def nodes(self) -> Iterable[NodeCapacity]:
        """Every node; not to be changed by the reader."""
        return self._nodes.values()

    def node(self, node_id: NodeId) -> NodeCapacity:
        """One node; not to be changed by the reader."""
        return self._nodes[node_id]

    def knows_node(self, node_id: NodeId) -> bool:
        """Whether a node is known."""
        return node_id in self._nodes

    def node_numbered(self, number: int) -> NodeCapacity:
        """The node behind a bit of the index."""
        return self._by_number[number]

    def device(self, uuid: DeviceUuid) -> DeviceCapacity:
        """One device; not to be changed by the reader."""
        return self._devices[uuid]

    def knows_device(self, uuid: DeviceUuid) -> bool:
        """Whether a device is known."""
        return uuid in self._devices

    def node_of(self, uuid: DeviceUuid) -> NodeId:
        """Node that a device is on."""
        return self._devices[uuid].node_id

    def devices_of(self, node_id: NodeId) -> list[DeviceUuid]:
        """Devices of a node in index order."""
        return list(self._nodes[node_id].devices)

    def free_share_pct(self, uuid: DeviceUuid) -> int:
        """Share of a device that nobody has."""
        return self._devices[uuid].free_share_pct

    def free_memory_mib(self, uuid: DeviceUuid) -> int | None:
        """Memory of a device that nobody has; None: unknown."""
        return self._devices[uuid].free_memory_mib

    def uid_of(self, uuid: DeviceUuid) -> int | None:
        """The only user on a device; None: nobody, or several who trust one another."""
        return self._devices[uuid].sole_uid

    def keys_on(self, uuid: DeviceUuid) -> list[BookingKey]:
        """Who has something of a device, oldest booking first."""
        return list(self._devices[uuid].granted)

    def free_cpu_milli(self, node_id: NodeId) -> int:
        """CPU of a node that nobody has."""
        return self._nodes[node_id].free_cpu_milli

    def free_host_memory_mib(self, node_id: NodeId) -> int:
        """Host memory of a node that nobody has."""
        return self._nodes[node_id].free_host_memory_mib

    def bookings_on(self, node_id: NodeId) -> list[tuple[BookingKey, Place]]:
        """Grants on a node, oldest booking first."""
        return [(key, each.place) for key, each in self._nodes[node_id].bookings.items()]

    def keys(self) -> Iterable[BookingKey]:
        """Everybody who has something booked."""
        return self._homes.keys()

    def is_whole(self, uuid: DeviceUuid) -> bool:
        """The device is granted to one member as a whole."""
        return self._devices[uuid].whole

    def totals(self) -> Totals:
        """Sums over the pool."""
        self._catch_up()
        return self._totals

    def place_of(self, key: BookingKey) -> Place | None:
        """Where a key is booked."""
        node = self._homes.get(key)
        return None if node is None else node.bookings[key].place

    def nodes_with_held_devices(self, passes: frozenset[HoldId]) -> int:
        """Mask of nodes with a device under one of these holds."""
        mask = 0
        for hold in passes:
            for node in self._held_devices.get(hold, {}).values():
                mask |= 1 << node.number
        return mask

    def check(self) -> None:
        """Recomputes everything from scratch; AssertionError on a broken promise."""
        homes: dict[BookingKey, NodeCapacity] = {}
        devices = 0
        for node in self._nodes.values():
            assert self._by_number[node.number] is node, f"number of {node.node_id}"
            fresh = node.copy()
            fresh.recount()
            for uuid, device in fresh.devices.items():
                assert self._devices[uuid] is node.devices[uuid], f"{uuid} is on two nodes"
                _check_device(node, device)
                devices += 1
            assert fresh == node, f"{node.node_id} differs from its bookings"
            for key in node.bookings:
                assert key not in homes, f"{key} is booked twice"
                homes[key] = node
        assert devices == len(self._devices), "a device is on no node"
        assert homes.keys() == self._homes.keys(), "homes differ from the bookings"
        assert all(self._homes[key] is node for key, node in homes.items()), "wrong home"
        self.index.check(list(self._nodes.values()))
        fresh_totals = NOTHING
        for node in self._nodes.values():
            fresh_totals = fresh_totals.replaced(NOTHING, totals_of(node))
        assert self._totals == fresh_totals, "totals differ from the devices"

    # -- inside ----------------------------------------------------------------

    def _capacity_changed(self, node: NodeCapacity) -> None:
        """Lets the index and the totals follow what a node has and what is granted of it.

        After a booking they do at once, so that the next decision does not wait for it, else
        when they are next looked at: a restart changes every node, a Hello every device of its
        node.
        """
        self._stale[node.number] = node

    def _catch_up(self) -> None:
        if self._stale:
            self._index.refresh(self._stale.values())
            for node in self._stale.values():
                self._recount(node)
            self._stale.clear()

    def _access_changed(self, node: NodeCapacity) -> None:
        """Lets the index and the totals follow whether a node may be used at all."""
        self._index.refresh_access(node)
        self._recount(node)

    def _recount(self, node: NodeCapacity) -> None:
        new = totals_of(node)
        self._totals = self._totals.replaced(self._totals_of.get(node.node_id, NOTHING), new)
        self._totals_of[node.node_id] = new

    def _free_number(self) -> int:
        # Lowest first: bitsets stay short, and ties fall to the longest-known node.
        return heappop(self._free_numbers) if self._free_numbers else len(self._by_number)

    def _put_devices(self, node: NodeCapacity, inventory: NodeInventory) -> None:
        known = node.devices
        node.devices = {}
        for device in sorted(inventory.devices, key=attrgetter("index")):
            kind = self._index.kind_of(device)
            capacity = known.pop(device.uuid, None)
            if capacity is None:
                capacity = DeviceCapacity(
                    device, node.node_id, kind, free_memory_mib=device.memory_mib
                )
                self._devices[device.uuid] = capacity
            else:
                capacity.device, capacity.kind, capacity.present = device, kind, True
                capacity.recount()
            node.devices[device.uuid] = capacity
        for uuid, capacity in known.items():
            capacity.present = capacity.offered = False
            node.devices[uuid] = capacity

    def _note_holds(
        self, node: NodeCapacity, device: DeviceCapacity, holds: frozenset[HoldId]
    ) -> None:
        uuid = device.device.uuid
        for hold in device.holds - holds:
            held = self._held_devices[hold]
            del held[uuid]
            if not held:
                del self._held_devices[hold]
        for hold in sorted(holds - device.holds):
            self._held_devices.setdefault(hold, {})[uuid] = node
        device.holds = holds


def _first(keys: Iterable[BookingKey]) -> BookingKey:
    return next(iter(keys))


def _check_host(node: NodeCapacity, place: Place) -> None:
    for name, need, free in (
        ("cpu_milli", place.cpu_milli, node.free_cpu_milli),
        ("host_memory_mib", place.host_memory_mib, node.free_host_memory_mib),
    ):
        if not 0 <= need <= free:
            raise BookingError(f"node {node.node_id}: {name} {need} is outside 0..{free}")


def _refusal(
    device: DeviceCapacity,
    share: DeviceShare,
    uid: int,
    shared_trust: bool,
    grain_pct: int,
    restored: bool,
) -> str:
    """Why this share of the device cannot be granted; empty: it can."""
    if share.whole:
        if share.share_pct != 100:
            return f"share_pct {share.share_pct} of a whole device is not 100"
        return "is not free, and is asked for whole" if device.granted else ""
    if share.share_pct % grain_pct or not 0 <= share.share_pct <= device.free_share_pct:
        free, grain = device.free_share_pct, grain_pct
        return f"share_pct {share.share_pct} is outside 0..{free} in steps of {grain}"
    if device.whole or not device.admits(uid, shared_trust):
        return f"is not open to slices of uid {uid}"
    if restored:
        return ""
    if not device.device.sliceable:
        return "takes no slices"
    free_mib = device.free_memory_mib
    if not 0 <= share.memory_mib <= (free_mib or 0):
        return f"memory_mib {share.memory_mib} is outside 0..{free_mib or 0}"
    return "" if share.share_pct or share.memory_mib else "neither share nor memory is asked for"


def _check_device(node: NodeCapacity, device: DeviceCapacity) -> None:
    """Promise 1 for one device, from its grants alone."""
    uuid = device.device.uuid
    grants = list(device.granted.values())
    derived = (device.free_share_pct, device.free_memory_mib, device.whole, device.sole_uid)
    trusted = device.trusted
    device.recount()
    again = (device.free_share_pct, device.free_memory_mib, device.whole, device.sole_uid)
    assert derived == again, f"{uuid} differs from its grants"
    assert trusted == device.trusted, f"{uuid} differs from its grants"
    assert sum(g.share_pct for g in grants) <= 100, f"{uuid} is over 100 % share"
    assert not device.whole or len(grants) == 1, f"{uuid} is whole and shared"
    usable, sliced = device.device.memory_mib, sum(g.memory_mib for g in grants if not g.whole)
    assert usable is None or sliced <= usable or uuid in node.overdrawn, f"{uuid} over memory"
    users = {g.uid for g in grants}
    assert len(users) <= 1 or device.trusted, f"{uuid} has users that do not share"
    assert device.node_id == node.node_id, f"{uuid} is on another node"
    assert device.present or not device.offered, f"{uuid} is offered and absent"
    for key in device.granted:
        named = [share.device_uuid for share in node.bookings[key].place.devices]
        assert uuid in named, f"{uuid} is granted without a booking"
