"""The pool's whole state, and the few steps that every topic needs.

Topics (granting, ending, node reports, commands, the queue) are modules of free
functions over this state; ``pool.py`` puts them together.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gpupool.model.assignment import AssignmentState, DesiredState, HolderWatch
from gpupool.model.hold import Hold
from gpupool.model.ids import CommandId, DeviceUuid, HoldId, LeaseId, NodeId
from gpupool.model.inventory import NodeInventory
from gpupool.model.lease import Lease, LeaseState
from gpupool.model.request import NODE_LABEL
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.capacity import UnclaimedKey
from gpupool_allocator.core.clocks import ClockKind, Clocks
from gpupool_allocator.core.effects import Answer, Delete, Put, SendDesired, UnclaimedRecord
from gpupool_allocator.core.entries import RUNS_ON_NODE, LeaseEntry, NodeEntry
from gpupool_allocator.core.outbox import Outbox
from gpupool_allocator.core.settings import PoolSettings
from gpupool_allocator.core.waiting import WaitQueue


@dataclass(slots=True, kw_only=True)
class State:
    """Everything the pool knows.

    ``fits_store``: a lease with these members can be stored as one record.
    ``freed``: nodes on which something became available during this event.
    ``heads``: the waiting requests that were asked last whether to keep places for them.
    ``with_strays``: devices with processes that should not be on them, and how many.
    ``changed_nodes``: nodes whose desired state must be sent. ``changed_records``: nodes to
    be stored.
    ``changed_leases``: leases to be stored; those in ``told`` are also shown to
    their listeners.
    """

    settings: PoolSettings
    epoch: int
    fits_store: Callable[[Lease], bool]
    books: Books
    out: Outbox
    queue: WaitQueue
    clocks: Clocks = field(default_factory=Clocks)
    leases: dict[LeaseId, LeaseEntry] = field(default_factory=dict[LeaseId, LeaseEntry])
    requests: dict[tuple[str, str], LeaseId] = field(default_factory=dict[tuple[str, str], LeaseId])
    listeners: dict[CommandId, LeaseId] = field(default_factory=dict[CommandId, LeaseId])
    ended: deque[LeaseId] = field(default_factory=deque[LeaseId])
    nodes: dict[NodeId, NodeEntry] = field(default_factory=dict[NodeId, NodeEntry])
    device_nodes: dict[DeviceUuid, NodeId] = field(default_factory=dict[DeviceUuid, NodeId])
    holds: dict[HoldId, Hold] = field(default_factory=dict[HoldId, Hold])
    reserved: dict[NodeId, None] = field(default_factory=dict[NodeId, None])
    reserved_for: LeaseId | None = None
    heads: tuple[LeaseId, ...] = ()
    reserved_until: float = 0.0
    unclaimed: dict[UnclaimedKey, UnclaimedRecord] = field(
        default_factory=dict[UnclaimedKey, UnclaimedRecord]
    )
    tokens_issued: int = 0
    read_only: str = ""
    freed: dict[NodeId, None] = field(default_factory=dict[NodeId, None])
    queue_changed: bool = False
    with_strays: dict[DeviceUuid, int] = field(default_factory=dict[DeviceUuid, int])
    changed_nodes: dict[NodeId, None] = field(default_factory=dict[NodeId, None])
    changed_records: dict[NodeId, None] = field(default_factory=dict[NodeId, None])
    changed_leases: dict[LeaseId, None] = field(default_factory=dict[LeaseId, None])
    told: dict[LeaseId, None] = field(default_factory=dict[LeaseId, None])

    def next_token(self) -> int:
        """A fencing number above every one issued in this and all earlier terms.

        The epoch is its upper half: a store restored from an old copy raises its
        epoch above all that nodes have heard, and so its tokens above all theirs.
        """
        self.tokens_issued += 1
        return (self.epoch << 32) + self.tokens_issued

    def lease_changed(self, lease: LeaseEntry, *, tell: bool) -> None:
        """Marks a lease to be stored, and shown to its listeners."""
        self.changed_leases[lease.lease_id] = None
        if tell:
            self.told[lease.lease_id] = None

    def node_changed(self, node_id: NodeId) -> None:
        """Marks a node to be sent its desired state."""
        self.changed_nodes[node_id] = None

    def record_changed(self, node_id: NodeId) -> None:
        """Marks a node to be stored."""
        self.changed_records[node_id] = None

    def node_freed(self, node_id: NodeId) -> None:
        """Notes that something may have become available on a node."""
        self.freed[node_id] = None

    def connected(self, node_id: NodeId) -> bool:
        """The node speaks with this allocator now."""
        node = self.nodes.get(node_id)
        return node is not None and node.connection is not None

    def snapshot(self, lease: LeaseEntry) -> Lease:
        """The lease as its holder sees it now."""
        reachable = frozenset(
            member.place.node_id for member in lease.members if self.connected(member.place.node_id)
        )
        position = self.queue.position(lease.lease_id) if lease.state is LeaseState.PENDING else 0
        return lease.frozen(reachable=reachable, position=position)

    def forget_listener(self, command: CommandId) -> LeaseEntry | None:
        """Takes a call off its lease; the lease, where it listened to one."""
        lease_id = self.listeners.pop(command, None)
        lease = self.leases.get(lease_id) if lease_id is not None else None
        if lease is not None:
            lease.listeners.pop(command, None)
        return lease

    def watch_holder(self, lease: LeaseEntry) -> None:
        """Asks the holder's node to watch its process."""
        if lease.process is not None and lease.process.node_id in self.nodes:
            self.nodes[lease.process.node_id].held_leases[lease.lease_id] = None
            self.node_changed(lease.process.node_id)

    def unwatch_holder(self, lease: LeaseEntry) -> None:
        """Ends the watch on the holder's process."""
        if lease.process is not None and lease.process.node_id in self.nodes:
            self.nodes[lease.process.node_id].held_leases.pop(lease.lease_id, None)
            self.node_changed(lease.process.node_id)

    def put_on_books(self, node_id: NodeId, inventory: NodeInventory) -> None:
        """Gives the books a node's inventory, with the label that every node has."""
        labels = {**inventory.labels, NODE_LABEL: str(node_id)}
        self.books.put_node(node_id, replace(inventory, labels=labels))

    def apply_holds(self, node_id: NodeId) -> None:
        """Brings the books' view of the holds on a node and its devices up to date."""
        on_node: set[HoldId] = set()
        on_device: dict[DeviceUuid, set[HoldId]] = {}
        for hold in self.holds.values():
            if hold.target == node_id:
                on_node.add(hold.hold_id)
            elif self.device_nodes.get(DeviceUuid(hold.target)) == node_id:
                on_device.setdefault(DeviceUuid(hold.target), set()).add(hold.hold_id)
        if node_id in self.reserved and self.reserved_for is not None:
            on_node.add(queue_hold_id(self.reserved_for))
        self.books.hold_node(node_id, frozenset(on_node))
        for uuid in self.nodes[node_id].devices:
            self.books.hold_device(uuid, frozenset(on_device.get(uuid, ())))

    def flush(self) -> None:
        """Turns the marks of this event into effects."""
        for node_id in self.changed_records:
            self.out.put("node", node_id, Put(record=self.nodes[node_id].record()))
        for lease_id in self.changed_leases:
            lease = self.leases.get(lease_id)
            if lease is not None:
                self.out.put("lease", lease_id, Put(record=lease.frozen()))
        for lease_id in self.told:
            self._tell(self.leases.get(lease_id))
        for node_id in self.changed_nodes:
            self._send_desired(self.nodes.get(node_id))
        self.changed_records, self.changed_leases = {}, {}
        self.told, self.changed_nodes = {}, {}

    def _tell(self, lease: LeaseEntry | None) -> None:
        if lease is None or not lease.listeners:
            return
        picture = self.snapshot(lease)
        for command, follow in list(lease.listeners.items()):
            final = lease.ended or (lease.state is LeaseState.ACTIVE and not follow)
            self.out.tell(Answer(command=command, result=picture, final=final))
            if final:
                self.forget_listener(command)

    def _send_desired(self, node: NodeEntry | None) -> None:
        if node is None:
            return
        node.revision += 1
        if node.connection is None:
            return
        for member in node.members.values():
            if member.named_at is None and member.state in RUNS_ON_NODE:
                member.named_at = node.revision
        self.out.tell(
            SendDesired(
                connection=node.connection, node_id=node.node_id, desired=self.desired(node)
            )
        )

    def desired(self, node: NodeEntry) -> DesiredState:
        """All that a node shall run."""
        assignments = [
            self.leases[key.lease_id].assignment(member)
            for key, member in node.members.items()
            if member.state in RUNS_ON_NODE
        ]
        holders = [
            HolderWatch(lease_id=lease_id, process=process)
            for lease_id in node.held_leases
            if (process := self.leases[lease_id].process) is not None
        ]
        return DesiredState(
            revision=node.revision,
            epoch=self.epoch,
            assignments=tuple(assignments),
            holders=tuple(holders),
            unclaimed=tuple(
                key
                for key in node.unclaimed
                if self.unclaimed[node.unclaimed_key(key)].report.state
                is not AssignmentState.ENDING
            ),
        )

    def remember_ended(self, lease: LeaseEntry) -> None:
        """Keeps an ended lease for late retries, and forgets the oldest beyond the bound."""
        self.clocks.clear(lease.lease_id, ClockKind.HOLDER, ClockKind.WAIT, ClockKind.END)
        self.ended.append(lease.lease_id)
        while len(self.ended) > self.settings.ended_kept:
            old = self.leases[self.ended.popleft()]
            self._tell(old)  # one event may end more leases than are kept
            del self.leases[old.lease_id]
            self.requests.pop((old.spec.tenant, old.request_id), None)
            self.changed_leases.pop(old.lease_id, None)
            self.out.put("lease", old.lease_id, Delete(record=old.frozen()))


def queue_hold_id(lease_id: LeaseId) -> HoldId:
    """Name of the hold that keeps places for a waiting request."""
    return HoldId(f"queue:{lease_id}")
