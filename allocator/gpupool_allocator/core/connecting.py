"""Agents come and go: Hello, second agents, reboots, silence, inventory changes."""

from gpupool.model.assignment import Hello, Welcome
from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.ids import ConnectionId, DeviceUuid, NodeId
from gpupool.model.inventory import NodeInventory
from gpupool.model.lease import LeaseState
from gpupool.model.limits import DEVICES_PER_NODE_MAX
from gpupool_allocator.core.capacity import UnclaimedKey
from gpupool_allocator.core.clocks import ClockKind
from gpupool_allocator.core.effects import CloseConnection, RaiseEpoch, SendWelcome
from gpupool_allocator.core.ending import begin_end, member_ended
from gpupool_allocator.core.entries import DeviceEntry, NodeEntry
from gpupool_allocator.core.events import NodeConnected, NodeDisconnected
from gpupool_allocator.core.reporting import device_lost, take_device_reports
from gpupool_allocator.core.settling import settle_assignments
from gpupool_allocator.core.state import State
from gpupool_allocator.core.unclaimed import forget_unclaimed

SPREAD_S_MAX = 600.0
"""Longest time over which agents are told to spread their return."""

PROTOCOL_REVISION = 1
"""The node protocol that this allocator speaks."""


def connect(state: State, event: NodeConnected, now: float) -> None:
    """Takes in a node, or refuses its stream."""
    hello = event.hello
    node_id = NodeId(hello.node_id)
    node = state.nodes.get(node_id)
    refused = _stream_refusal(node, hello)
    if refused is not None:
        state.out.tell(CloseConnection(connection=event.connection, refused=refused))
        return
    if _has_heard_of_another_term(state, node, hello):
        state.out.tell(RaiseEpoch(above=hello.highest_epoch))
        return
    if node is None:
        node = _new_node(state, hello)
    elif node.connection is not None:
        _replace_stream(state, node)
    node.welcomed = True
    rebooted = bool(node.boot_id) and node.boot_id != hello.boot_id
    node.connection = event.connection
    node.accepted_revision = 0
    node.behind = None
    node.heard(event.unix_s)
    node.agent_instance_id = hello.agent_instance_id
    _settle_identity(state, node, hello, rebooted=rebooted)
    state.out.record("node.connected", node_id, "agent said hello", {"boot_id": hello.boot_id})
    state.out.tell(
        SendWelcome(
            connection=event.connection,
            welcome=Welcome(
                epoch=state.epoch,
                protocol_revision=PROTOCOL_REVISION,
                allocator_version=state.settings.version,
                heartbeat_timeout_s=state.settings.heartbeat_timeout_s,
                report_interval_s=state.settings.report_interval_s,
                reconnect_spread_s=min(
                    SPREAD_S_MAX, len(state.nodes) / state.settings.reconnects_per_s
                ),
                forward_key=event.forward_key,
            ),
        )
    )
    take_device_reports(state, node, hello.devices)
    for lease_id in node.held_leases:
        state.clocks.clear(lease_id, ClockKind.HOLDER)
    if rebooted:
        _end_holders_of_last_boot(state, node)
    settle_assignments(state, node, hello.assignments, accepted=None, now=now)
    state.books.offer_node(node_id, True)
    state.node_freed(node_id)
    state.node_changed(node_id)


def _stream_refusal(node: NodeEntry | None, hello: Hello) -> Refused | None:
    if PROTOCOL_REVISION not in hello.protocol_revisions:
        return Refused(
            kind=ErrorKind.WRONG_STATE,
            field="hello.protocol_revisions",
            message=f"agent speaks node protocol {hello.protocol_revisions}, "
            f"this allocator speaks {PROTOCOL_REVISION}",
        )
    live_elsewhere = (
        node is not None
        and node.connection is not None
        and node.agent_instance_id != hello.agent_instance_id
        and node.boot_id == hello.boot_id
    )
    if live_elsewhere:
        return Refused(
            kind=ErrorKind.CONFLICT,
            field="hello.node_id",
            message=f"another agent is connected as node {hello.node_id}; it must stop, or fall "
            "silent for the heartbeat timeout, before a second one is let in",
        )
    return None


def _has_heard_of_another_term(state: State, node: NodeEntry | None, hello: Hello) -> bool:
    """Whether this term's tokens and revisions may have been used by another one.

    A store that was restored from a copy may come to an epoch for the second time: a node
    knows it then without ever having been welcomed in it by us.
    """
    if hello.highest_epoch == state.epoch:
        return node is None or not node.welcomed
    return hello.highest_epoch > state.epoch


def _new_node(state: State, hello: Hello) -> NodeEntry:
    node = NodeEntry(
        node_id=NodeId(hello.node_id),
        boot_id="",
        agent_version="",
        agent_instance_id="",
        inventory=NodeInventory(),
    )
    state.nodes[node.node_id] = node
    return node


def _replace_stream(state: State, node: NodeEntry) -> None:
    assert node.connection is not None
    state.out.tell(
        CloseConnection(
            connection=node.connection,
            refused=Refused(
                kind=ErrorKind.SUPERSEDED,
                message=f"node {node.node_id} opened a newer stream",
            ),
        )
    )


def _settle_identity(state: State, node: NodeEntry, hello: Hello, *, rebooted: bool) -> None:
    """Takes in boot id, version and inventory; stores them where they changed."""
    changed = (
        node.boot_id != hello.boot_id
        or node.agent_version != hello.agent_version
        or node.inventory != hello.inventory
    )
    if rebooted:
        state.out.record("node.rebooted", node.node_id, "boot id changed")
    node.boot_id = hello.boot_id
    node.agent_version = hello.agent_version
    for uuid, entry in node.devices.items():
        entry.confirmed = False
        state.books.offer_device(uuid, False)
    # Nearly always the same again: after a restart a whole pool says hello at once.
    if node.inventory != hello.inventory or any(
        device.uuid not in node.devices for device in hello.inventory.devices
    ):
        take_inventory(state, node, hello.inventory)
    if changed:
        state.record_changed(node.node_id)


def take_inventory(state: State, node: NodeEntry, inventory: NodeInventory) -> None:
    """Merges what a node has by UUID: appeared, missing, returned, renamed, moved."""
    before = {device.uuid: device for device in node.inventory.devices}
    now_there = {device.uuid: device for device in inventory.devices}
    for uuid, device in now_there.items():
        owner = state.device_nodes.get(uuid)
        if owner is not None and owner != node.node_id:
            _move_device(state, uuid, owner, node.node_id)
        state.device_nodes[uuid] = node.node_id
        entry = node.devices.get(uuid)
        if entry is None:
            node.devices[uuid] = DeviceEntry(device=device)
            state.out.record("device.appeared", uuid, f"reported by node {node.node_id}")
        elif not entry.present:
            entry.present = True
            entry.lost_unix_s = 0.0
            state.out.record("device.returned", uuid, f"reported by node {node.node_id}")
        node.devices[uuid].device = device
        old = before.get(uuid)
        if old is not None and old.model != device.model:
            # Identity is the UUID: a name that disagrees is worth a warning, no more.
            state.out.record(
                "device.renamed",
                uuid,
                "reported model differs from the one on record",
                {"from": old.model, "to": device.model},
            )
    node.inventory = inventory
    state.put_on_books(node.node_id, inventory)
    state.apply_holds(node.node_id)
    for uuid, entry in node.devices.items():
        if uuid not in now_there and entry.present:
            entry.present = False
            entry.lost_unix_s = entry.lost_unix_s or node.seen_before_unix_s
            state.out.record("device.missing", uuid, f"node {node.node_id} no longer reports it")
            state.books.offer_device(uuid, False)
            device_lost(state, uuid, "the node no longer reports it")
    _forget_oldest_missing(state, node)


def _forget_oldest_missing(state: State, node: NodeEntry) -> None:
    """Keeps the number of missed devices within the bound of a node."""
    missing = [
        uuid
        for uuid, entry in node.devices.items()
        if not entry.present and not state.books.keys_on(uuid)
    ]
    for uuid in missing[: max(0, len(node.devices) - DEVICES_PER_NODE_MAX)]:
        del node.devices[uuid], state.device_nodes[uuid]
        state.with_strays.pop(uuid, None)
        state.books.forget_device(uuid)
        state.out.record("device.forgotten", uuid, f"node {node.node_id} has had too many others")


def _move_device(state: State, uuid: DeviceUuid, old_id: NodeId, new_id: NodeId) -> None:
    """A device turned up in another host: whoever was on it there has lost it."""
    state.out.record("device.moved", uuid, f"from node {old_id} to node {new_id}")
    old = state.nodes[old_id]
    for key in state.books.keys_on(uuid):
        cause = f"device {uuid} left {old_id}"
        if isinstance(key, UnclaimedKey):
            forget_unclaimed(state, state.unclaimed[key], cause)
        elif (member := old.members.get(key)) is not None:
            begin_end(state, state.leases[key.lease_id], LeaseState.FAILED, cause)
            member_ended(state, state.leases[key.lease_id], member)
    old.devices.pop(uuid, None)
    state.with_strays.pop(uuid, None)
    state.books.forget_device(uuid)
    state.record_changed(old_id)


def _end_holders_of_last_boot(state: State, node: NodeEntry) -> None:
    for lease_id in list(node.held_leases):
        begin_end(
            state,
            state.leases[lease_id],
            LeaseState.EXPIRED,
            f"its holder's node {node.node_id} has rebooted",
        )


def disconnect(state: State, event: NodeDisconnected, now: float) -> None:
    """A stream ended: the node's GPUs are offered to nobody until it confirms them again."""
    node = state.nodes.get(event.node_id)
    if node is None or node.connection != event.connection:
        return
    node.connection = None
    state.books.offer_node(node.node_id, False)
    for uuid, entry in node.devices.items():
        entry.confirmed = False
        state.books.offer_device(uuid, False)
    state.out.record("node.unreachable", node.node_id, event.reason or "stream ended")
    for key in node.members:
        state.told[key.lease_id] = None
    wait_for_holders(state, node, now)


def wait_for_holders(state: State, node: NodeEntry, now: float) -> None:
    """Starts the clocks of process-bound leases whose holders' node is cut off.

    Only the node can say that a process is gone, so its silence alone ends nothing
    before the lease's own ``disconnect_s``.
    """
    for lease_id in node.held_leases:
        lease = state.leases[lease_id]
        state.clocks.set(lease_id, ClockKind.HOLDER, now + lease.spec.disconnect_s)


def known_connection(state: State, node_id: NodeId, connection: ConnectionId) -> NodeEntry | None:
    """The node, where the message came over its present stream."""
    node = state.nodes.get(node_id)
    return node if node is not None and node.connection == connection else None
