"""What one node and one device have, and what of it is granted.

Facts and their arithmetic only. Who may change them is decided in books.py.
"""

from dataclasses import dataclass, field

from gpupool.model.assignment import AssignmentKey
from gpupool.model.ids import DeviceUuid, HoldId, LeaseId, NodeId
from gpupool.model.inventory import Device, NodeInventory
from gpupool.model.lease import Place

UNCLEAN = "unclean"
FAULTY = "faulty"
CAUSES = (UNCLEAN, FAULTY)
"""Causes of a device that is not offered, as codes of ``Cause``."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Devices that answer a request alike, as far as the index tells them apart.

    ``memory_low_mib`` and ``memory_high_mib`` bound the usable memory of its
    devices (within 2 %); None: unknown. ``words`` are the model's, lower case.
    """

    number: int
    words: frozenset[str]
    memory_low_mib: int | None
    memory_high_mib: int | None
    sliceable: bool


@dataclass(frozen=True, slots=True, order=True)
class UnclaimedKey:
    """Names an assignment that a node runs and the pool does not know.

    The node is part of it: several nodes may claim the same member, and the book may
    have that member somewhere else.
    """

    node_id: NodeId
    lease_id: LeaseId
    rank: int


BookingKey = AssignmentKey | UnclaimedKey
"""Names what is booked: a member of a lease, or what is unclaimed."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What one assignment has of a device."""

    share_pct: int
    memory_mib: int
    whole: bool
    uid: int
    shared_trust: bool


@dataclass(frozen=True, slots=True)
class Booking:
    """One assignment's place and user."""

    place: Place
    uid: int
    shared_trust: bool


@dataclass(slots=True)
class DeviceCapacity:
    """One device. The fields after ``granted`` follow from it.

    ``free_memory_mib`` is None where the device's memory is unknown. ``sole_uid``
    is the only user's id, None for nobody or several; ``trusted`` says that all
    on it accept a shared server.
    """

    device: Device
    node_id: NodeId
    kind: Kind
    present: bool = True
    offered: bool = False
    cause: str = UNCLEAN
    holds: frozenset[HoldId] = frozenset()
    granted: dict[BookingKey, Grant] = field(default_factory=dict[BookingKey, Grant])
    free_share_pct: int = 100
    free_memory_mib: int | None = None
    whole: bool = False
    sole_uid: int | None = None
    trusted: bool = True

    def usable(self, passes: frozenset[HoldId] = frozenset()) -> bool:
        """Offered, and under no hold but those in ``passes``."""
        return self.offered and self.holds <= passes

    def admits(self, uid: int, shared_trust: bool) -> bool:
        """Whether a slice of ``uid`` may join those that are on the device."""
        if not self.granted:
            return True
        if self.whole:
            return False
        return self.sole_uid == uid or (shared_trust and self.trusted)

    def recount(self) -> None:
        """Derives the free amounts and users from the device and its grants."""
        memory_mib = self.device.memory_mib
        if not self.granted:
            # Nearly all devices at a restart, which waits for this.
            self.whole, self.free_share_pct, self.free_memory_mib = False, 100, memory_mib
            self.sole_uid, self.trusted = None, True
            return
        grants = self.granted.values()
        self.whole = any(grant.whole for grant in grants)
        self.free_share_pct = 100 - sum(grant.share_pct for grant in grants)
        if memory_mib is None:
            self.free_memory_mib = None
        elif self.whole:
            self.free_memory_mib = 0
        else:
            # Below 0 where a driver update left less than was granted before it.
            self.free_memory_mib = max(0, memory_mib - sum(grant.memory_mib for grant in grants))
        uids = {grant.uid for grant in grants}
        self.sole_uid = next(iter(uids)) if len(uids) == 1 else None
        self.trusted = all(grant.shared_trust for grant in grants)

    def copy(self) -> "DeviceCapacity":
        """An independent copy to try placements on."""
        return DeviceCapacity(
            self.device, self.node_id, self.kind, self.present, self.offered, self.cause,
            self.holds, dict(self.granted), self.free_share_pct, self.free_memory_mib,
            self.whole, self.sole_uid, self.trusted,
        )  # fmt: skip


@dataclass(slots=True)
class NodeCapacity:
    """One node. ``number`` is its bit in the index; devices are in index order.

    ``overdrawn`` names the node and devices that have less than was granted on
    them before their inventory shrank.
    """

    node_id: NodeId
    number: int
    inventory: NodeInventory
    offered: bool = False
    holds: frozenset[HoldId] = frozenset()
    devices: dict[DeviceUuid, DeviceCapacity] = field(
        default_factory=dict[DeviceUuid, DeviceCapacity]
    )
    bookings: dict[BookingKey, Booking] = field(default_factory=dict[BookingKey, Booking])
    free_cpu_milli: int = 0
    free_host_memory_mib: int = 0
    overdrawn: frozenset[str] = frozenset()

    def recount(self) -> None:
        """Derives free CPU and host memory from the inventory and the bookings."""
        if not self.bookings:
            # Nearly all nodes at a restart, which waits for this.
            self.free_cpu_milli = self.inventory.cpu_milli
            self.free_host_memory_mib = self.inventory.host_memory_mib
            self.overdrawn = frozenset()
            return
        places = [booking.place for booking in self.bookings.values()]
        cpu = self.inventory.cpu_milli - sum(place.cpu_milli for place in places)
        memory = self.inventory.host_memory_mib - sum(place.host_memory_mib for place in places)
        self.free_cpu_milli, self.free_host_memory_mib = max(0, cpu), max(0, memory)
        short = {str(self.node_id)} if cpu < 0 or memory < 0 else set[str]()
        for uuid, device in self.devices.items():
            if not device.granted:
                continue
            usable = device.device.memory_mib
            granted = sum(g.memory_mib for g in device.granted.values() if not g.whole)
            if usable is not None and granted > usable:
                short.add(str(uuid))
        self.overdrawn = frozenset(short)

    def take(self, key: BookingKey, booking: Booking) -> None:
        """Adds a booking, unchecked."""
        place = booking.place
        self.bookings[key] = booking
        for share in place.devices:
            device = self.devices[share.device_uuid]
            device.granted[key] = Grant(
                share.share_pct, share.memory_mib, share.whole, booking.uid, booking.shared_trust
            )
            device.recount()
        self.free_cpu_milli -= place.cpu_milli
        self.free_host_memory_mib -= place.host_memory_mib

    def give(self, key: BookingKey) -> Booking:
        """Removes a booking; KeyError where there is none."""
        booking = self.bookings.pop(key)
        for share in booking.place.devices:
            device = self.devices[share.device_uuid]
            del device.granted[key]
            device.recount()
        if self.overdrawn:
            self.recount()
        else:
            self.free_cpu_milli += booking.place.cpu_milli
            self.free_host_memory_mib += booking.place.host_memory_mib
        return booking

    def copy(self) -> "NodeCapacity":
        """An independent copy to try placements on."""
        devices = {uuid: device.copy() for uuid, device in self.devices.items()}
        return NodeCapacity(
            self.node_id, self.number, self.inventory, self.offered, self.holds, devices,
            dict(self.bookings), self.free_cpu_milli, self.free_host_memory_mib, self.overdrawn,
        )  # fmt: skip
