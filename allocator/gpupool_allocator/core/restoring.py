"""From the store's records to a running pool: holders get their full TTL anew."""

from dataclasses import dataclass, field, replace

from gpupool.model.hold import Hold
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId
from gpupool.model.inventory import NodeInventory, NodeRecord
from gpupool.model.lease import ENDED, Lease, LeaseState, MemberState
from gpupool_allocator.core.books import BookingError
from gpupool_allocator.core.clocks import ClockKind
from gpupool_allocator.core.connecting import wait_for_holders
from gpupool_allocator.core.effects import Stored, UnclaimedRecord
from gpupool_allocator.core.entries import DeviceEntry, LeaseEntry, MemberEntry, NodeEntry
from gpupool_allocator.core.state import State
from gpupool_allocator.core.unclaimed import book_unclaimed


@dataclass(slots=True)
class Restored:
    """Records as they stream in, in any order, sorted by kind."""

    nodes: list[NodeRecord] = field(default_factory=list[NodeRecord])
    leases: list[Lease] = field(default_factory=list[Lease])
    holds: list[Hold] = field(default_factory=list[Hold])
    unclaimed: list[UnclaimedRecord] = field(default_factory=list[UnclaimedRecord])

    def add(self, record: Stored) -> None:
        """Takes in one record."""
        match record:
            case NodeRecord():
                self.nodes.append(record)
            case Lease():
                self.leases.append(record)
            case Hold():
                self.holds.append(record)
            case UnclaimedRecord():
                self.unclaimed.append(record)


def rebuild(state: State, restored: Restored, now: float, unix_s: float) -> None:
    """Builds the pool from its records; no node is offered until it has spoken."""
    moved = _moved(restored)
    for node in restored.nodes:
        _add_node(state, node.node_id, _without(node, moved) if moved else node)
    for lease in sorted(restored.leases, key=_age):
        _add_lease(state, lease, now, unix_s)
    held = set[NodeId]()
    for hold in restored.holds:
        state.holds[hold.hold_id] = hold
        held.add(state.device_nodes.get(DeviceUuid(hold.target), NodeId(hold.target)))
        if hold.expire_unix_s is not None:
            at = now + max(0.0, hold.expire_unix_s - unix_s)
            state.clocks.set(hold.hold_id, ClockKind.HOLD, at)
    for record in restored.unclaimed:
        _add_unclaimed(state, record)
    for node_id, entry in state.nodes.items():
        if node_id in held:
            state.apply_holds(node_id)
        book_unclaimed(state, node_id)
        wait_for_holders(state, entry, now)


def _age(lease: Lease) -> tuple[float, LeaseId]:
    """Waiting leases queue in the order they came, ended ones are forgotten as they ended."""
    if lease.state in ENDED and lease.end_unix_s is not None:
        return lease.end_unix_s, lease.lease_id
    return lease.create_unix_s, lease.lease_id


def _add_node(state: State, node_id: NodeId, record: NodeRecord | None) -> None:
    record = record or NodeRecord(
        node_id=node_id, boot_id="", agent_version="", inventory=NodeInventory()
    )
    node = NodeEntry(
        node_id=node_id,
        boot_id=record.boot_id,
        agent_version=record.agent_version,
        agent_instance_id="",
        inventory=record.inventory,
        faults=dict.fromkeys(record.faults),
    )
    state.nodes[node_id] = node
    missing, failed = set(record.missing), set(record.failed)
    for device in node.inventory.devices:
        node.devices[device.uuid] = DeviceEntry(
            device=device, present=device.uuid not in missing, failed=device.uuid in failed
        )
        state.device_nodes[device.uuid] = node_id
    state.put_on_books(node_id, node.inventory)
    if missing:
        # Known to the books first: leases may be on them.
        present = tuple(each.device for each in node.devices.values() if each.present)
        node.inventory = replace(node.inventory, devices=present)
        state.put_on_books(node_id, node.inventory)


def _moved(restored: Restored) -> dict[DeviceUuid, NodeId]:
    """Devices in the records of two nodes, where release 0.1.0 left them, by the node to trust.

    That is the one on which a lease has it, else the first; its node says where it is.
    """
    homes: dict[DeviceUuid, NodeId] = {}
    moved: dict[DeviceUuid, NodeId] = {}
    for node in restored.nodes:
        for device in node.inventory.devices:
            home = homes.setdefault(device.uuid, node.node_id)
            if home != node.node_id:
                moved[device.uuid] = home
    if moved:
        for lease in restored.leases:
            for member in lease.members if lease.state not in ENDED else ():
                for share in member.place.devices:
                    if share.device_uuid in moved and member.state is not MemberState.ENDED:
                        moved[share.device_uuid] = member.place.node_id
    return moved


def _without(record: NodeRecord, moved: dict[DeviceUuid, NodeId]) -> NodeRecord:
    own = tuple(
        device
        for device in record.inventory.devices
        if moved.get(device.uuid, record.node_id) == record.node_id
    )
    return replace(record, inventory=replace(record.inventory, devices=own))


def _add_unclaimed(state: State, record: UnclaimedRecord) -> None:
    if record.node_id not in state.nodes:
        _add_node(state, record.node_id, None)
    state.unclaimed[record.key] = record
    state.nodes[record.node_id].unclaimed[record.report.key] = False


def _add_lease(state: State, record: Lease, now: float, unix_s: float) -> None:
    lease = LeaseEntry(
        lease_id=record.lease_id,
        request_id=record.request_id,
        caller=record.caller,
        spec=record.spec,
        state=record.state,
        ttl_s=record.ttl_s,
        process=record.process,
        wait_s=record.wait_s,
        create_unix_s=record.create_unix_s,
        generation=record.generation,
        grant_unix_s=record.grant_unix_s,
        end_unix_s=record.end_unix_s,
        explanation=record.explanation,
        ending_as=record.ending_as,
        members=[
            MemberEntry(
                group=member.group,
                index=member.index,
                rank=member.rank,
                token=member.token,
                place=member.place,
                stored_token=member.token,
                state=member.state,
                dropped_at=0 if member.state is MemberState.ENDING else None,
            )
            for member in record.members
        ],
    )
    state.leases[lease.lease_id] = lease
    state.requests[lease.spec.tenant, lease.request_id] = lease.lease_id
    if lease.ended:
        state.remember_ended(lease)
        return
    _add_members(state, lease)
    _set_clocks(state, lease, now, unix_s)
    if lease.state is not LeaseState.RELEASING:
        state.watch_holder(lease)


def _add_members(state: State, lease: LeaseEntry) -> None:
    for member in lease.members:
        if member.state is MemberState.ENDED:
            continue
        if member.place.node_id not in state.nodes:
            _add_node(state, member.place.node_id, None)
        state.nodes[member.place.node_id].members[lease.key(member)] = member
        try:
            state.books.book(
                lease.key(member),
                member.place,
                uid=lease.spec.uid,
                shared_trust=lease.spec.shared_trust,
                restored=True,
            )
        except BookingError as broken:
            state.out.alarm("restore_overlap", f"lease {lease.lease_id}: {broken}")


def _set_clocks(state: State, lease: LeaseEntry, now: float, unix_s: float) -> None:
    waited_s = max(0.0, unix_s - lease.create_unix_s)
    if lease.state is LeaseState.PENDING:
        state.queue.add(lease.lease_id, priority=lease.spec.priority, arrival_s=now - waited_s)
        if lease.wait_s is not None:
            state.clocks.set(
                lease.lease_id, ClockKind.WAIT, now + max(0.0, lease.wait_s - waited_s)
            )
    if lease.state is not LeaseState.RELEASING and lease.ttl_s is not None:
        state.clocks.set(lease.lease_id, ClockKind.HOLDER, now + lease.ttl_s)
    if lease.running and lease.end_unix_s is not None and lease.spec.max_duration_s is not None:
        # Wall time may have jumped; a lease never gets more than it asked for.
        left_s = min(max(0.0, lease.end_unix_s - unix_s), lease.spec.max_duration_s)
        state.clocks.set(lease.lease_id, ClockKind.END, now + left_s)
