"""Agents come, go, reboot, disagree; hardware appears, vanishes and is renamed."""

from dataclasses import replace

from tests.core_world import World, inventory, whole
from tests.played_node import PlayedNode

from gpupool.model.assignment import AssignmentKey, Report
from gpupool.model.caller import Caller, ProcessRef, Role
from gpupool.model.errors import ErrorKind
from gpupool.model.ids import CommandId, ConnectionId, LeaseId, NodeId
from gpupool.model.lease import LeaseState, MemberState
from gpupool_allocator.core.effects import RaiseEpoch, SendWelcome
from gpupool_allocator.core.events import (
    EndUnclaimed,
    NodeConnected,
    NodeDisconnected,
    NodeSpoke,
)
from gpupool_allocator.core.settings import PoolSettings


def test_an_agent_restart_changes_nothing_that_anybody_sees() -> None:
    world = World()
    node = world.add_node("n1")
    lease = world.granted(whole(2), follow=True)
    seen = len(world.history)
    for round_number in range(10):
        world.disconnect(node)
        node.instance = f"instance-{round_number + 2}"
        world.connect(node)
        world.settle()
    assert world.now_lease(lease) == lease
    kinds = {event.kind for event in world.history[seen:]}
    assert kinds == {"node.unreachable", "node.connected"}


def test_agents_are_told_to_spread_their_return_by_the_size_of_the_pool() -> None:
    world = World(PoolSettings(reconnects_per_s=2))
    for number in range(9):
        world.add_node(f"n{number}")
    world.restart()
    node = PlayedNode(NodeId("n3"), inventory("n3", 8))
    connected = NodeConnected(connection=ConnectionId(1), hello=node.hello(), unix_s=0.0)
    told = [each for each in world.handle(connected) if isinstance(each, SendWelcome)]
    # Also before the others are back, since they are what it must be spared from.
    assert [each.welcome.reconnect_spread_s for each in told] == [4.5]


def test_measurements_show_that_a_node_is_there() -> None:
    """They come more often than reports, of which there are none while nothing changes."""
    world = World()
    node = world.add_node("n1")
    assert node.connection is not None
    spoke = NodeSpoke(connection=node.connection, node_id=node.node_id, unix_s=5e9)
    world.handle(spoke)
    (view,) = world.pool.nodes(after="", limit=10)
    assert view.last_seen_unix_s == 5e9
    world.disconnect(node)
    world.handle(replace(spoke, unix_s=6e9))
    (view,) = world.pool.nodes(after="", limit=10)
    assert view.last_seen_unix_s == 5e9, "a stream that has ended says nothing any more"


def test_a_cut_off_node_is_offered_to_nobody_and_its_leases_stay() -> None:
    world = World()
    node = world.add_node("n1")
    lease = world.granted(whole(1), follow=True)
    world.disconnect(node)
    assert world.now_lease(lease).members[0].state is MemberState.UNREACHABLE
    refused = world.refused(world.acquire(whole(1)))
    assert refused.explanation is not None
    assert "unreachable" in {cause.code for cause in refused.explanation.causes}
    world.connect(node)
    world.settle()
    assert world.now_lease(lease).members[0].state is MemberState.READY


def test_a_reboot_prepares_again_and_tells_the_holder() -> None:
    world = World()
    node = world.add_node("n1")
    lease = world.granted(whole(1), follow=True)
    world.disconnect(node)
    node.boot_id, node.running = "boot-2", {}
    world.connect(node)
    world.settle()
    after = world.now_lease(lease)
    assert after.state is LeaseState.ACTIVE
    assert after.generation > lease.generation
    assert after.members[0].environment is not None


def test_a_reboot_ends_the_leases_of_processes_that_lived_there() -> None:
    world = World()
    node = world.add_node("n1")
    holder = ProcessRef(node_id=NodeId("n1"), pid=77, start_ticks=5)
    lease = world.granted(whole(1), process=holder)
    world.disconnect(node)
    node.boot_id, node.running = "boot-2", {}
    world.connect(node)
    world.settle()
    assert world.now_lease(lease).state is LeaseState.EXPIRED


def test_a_second_live_agent_with_the_same_name_is_refused() -> None:
    world = World()
    world.add_node("n1")
    twin = PlayedNode(NodeId("n1"), inventory("n1"), instance="instance-2")
    stranger = ConnectionId(999)
    world.handle(NodeConnected(connection=stranger, hello=twin.hello()))
    assert world.closed[stranger].kind is ErrorKind.CONFLICT
    assert world.pool.nodes()[0].state == "connected"


def test_the_same_agent_may_open_a_newer_stream_and_the_old_one_is_closed() -> None:
    world = World()
    node = world.add_node("n1")
    lease = world.granted(whole(1))
    old = node.connection
    assert old is not None
    world.connect(node)
    assert world.closed[old].kind is ErrorKind.SUPERSEDED
    # The old stream's end arrives late and means nothing any more.
    world.handle(NodeDisconnected(connection=old, node_id=node.node_id))
    assert world.pool.nodes()[0].state == "connected"
    assert world.now_lease(lease).state is LeaseState.ACTIVE


def test_an_agent_of_an_unknown_protocol_is_refused_by_number() -> None:
    world = World()
    hello = replace(PlayedNode(NodeId("n1"), inventory("n1")).hello(), protocol_revisions=(7, 8))
    world.handle(NodeConnected(connection=ConnectionId(5), hello=hello))
    assert world.closed[ConnectionId(5)].field == "hello.protocol_revisions"
    assert world.pool.summary().nodes == 0


def test_names_that_disagree_are_a_warning_and_cost_no_capacity() -> None:
    """C31: a take-over alone never removes capacity; devices are merged by UUID."""
    world = World()
    node = world.add_node("n1", model="gpu")
    world.settle()
    world.restart()
    node.inventory = inventory("n1", model="NVIDIA H200")
    world.connect(node)
    assert world.pool.summary().devices_free == 8
    renamed = [event for event in world.history if event.kind == "device.renamed"]
    assert len(renamed) == 8
    assert renamed[0].details == {"from": "gpu", "to": "NVIDIA H200"}
    assert world.granted(whole(8)).state is LeaseState.ACTIVE


def test_a_missing_gpu_is_missed_and_not_forgotten() -> None:
    world = World()
    node = world.add_node("n1", gpus=3)
    world.settle()
    world.disconnect(node)
    node.inventory = replace(
        node.inventory, devices=(node.inventory.devices[0], node.inventory.devices[2])
    )
    world.connect(node)
    views = {view.device.uuid: view for view in world.pool.devices()}
    assert views["GPU-n1-1"].state == "unavailable"  # type: ignore[index]
    assert "missing" in views["GPU-n1-1"].reasons[0]  # type: ignore[index]
    assert world.pool.summary().devices_free == 2
    node.inventory = inventory("n1", 3)
    world.disconnect(node)
    world.connect(node)
    assert world.pool.summary().devices_free == 3


def test_a_hot_added_gpu_starts_a_waiting_request() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    command = world.acquire(whole(2), wait_s=None)
    node.inventory = inventory("n1", 2)
    world.disconnect(node)
    world.connect(node)
    world.settle()
    assert world.lease_of(command).state is LeaseState.ACTIVE


def test_a_node_that_heard_a_later_term_raises_the_epoch() -> None:
    world = World()
    node = PlayedNode(NodeId("n1"), inventory("n1"), highest_epoch=41)
    world.nodes[node.node_id] = node
    effects = world.pool.handle(
        NodeConnected(connection=ConnectionId(5), hello=node.hello()), world.now
    )
    assert effects == [RaiseEpoch(above=41)]


def test_a_term_that_comes_a_second_time_with_a_restored_store_is_given_up() -> None:
    world = World()
    node = PlayedNode(NodeId("n1"), inventory("n1"), highest_epoch=world.epoch)
    world.nodes[node.node_id] = node
    effects = world.pool.handle(
        NodeConnected(connection=ConnectionId(5), hello=node.hello()), world.now
    )
    assert effects == [RaiseEpoch(above=world.epoch)]


def test_a_node_that_comes_back_in_its_term_raises_nothing() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    epoch = world.epoch
    world.granted(whole(1))
    assert node.highest_epoch == epoch
    world.disconnect(node)
    world.connect(node)
    assert (world.epoch, node.highest_epoch) == (epoch, epoch)


def test_work_that_a_restored_store_does_not_know_is_kept_until_an_operator_ends_it() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    lease = world.granted(whole(1))
    world.store.pop(("lease", lease.lease_id))
    world.restart()
    world.connect(node)
    world.settle()
    key = AssignmentKey(lease_id=lease.lease_id, rank=0)
    assert key in node.running
    assert world.refused(world.acquire(whole(1))).kind is ErrorKind.NO_CAPACITY
    world.restart()
    world.connect(node)
    world.settle()
    assert key in node.running
    world.handle(
        EndUnclaimed(
            command=CommandId(world.next_id()),
            caller=Caller(role=Role.OPERATOR),
            node_id=NodeId("n1"),
            lease_id=LeaseId(lease.lease_id),
        )
    )
    world.settle()
    assert node.running == {}
    assert world.granted(whole(1)).state is LeaseState.ACTIVE


def unclaimed_on_n1(world: World) -> AssignmentKey:
    """Work on all of n1 that the store has forgotten."""
    node = world.add_node("n1", gpus=1)
    lease = world.granted(whole(1))
    world.store.pop(("lease", lease.lease_id))
    world.restart()
    world.connect(node)
    world.settle()
    return AssignmentKey(lease_id=lease.lease_id, rank=0)


def end_unclaimed(world: World, key: AssignmentKey, *, role: Role = Role.OPERATOR) -> CommandId:
    command = CommandId(world.next_id())
    world.handle(
        EndUnclaimed(
            command=command,
            caller=Caller(role=role),
            node_id=NodeId("n1"),
            lease_id=key.lease_id,
        )
    )
    return command


def test_unclaimed_work_that_ends_keeps_its_gpu_until_its_node_says_that_it_is_gone() -> None:
    world = World()
    key = unclaimed_on_n1(world)
    node = world.nodes[NodeId("n1")]
    world.disconnect(node)
    end_unclaimed(world, key)
    assert world.pool.unclaimed()[0].ending
    world.restart()
    world.connect(node)
    assert node.desired is not None
    assert node.desired.unclaimed == ()
    assert key in node.running
    waiting = world.acquire(whole(1), wait_s=None)
    assert world.lease_of(waiting).state is LeaseState.PENDING
    end_unclaimed(world, key)  # a retry changes nothing
    world.settle()
    assert key not in node.running
    assert world.lease_of(waiting).state is LeaseState.ACTIVE
    assert world.pool.unclaimed() == []


def test_only_operators_end_unclaimed_work_and_only_what_is_there() -> None:
    world = World()
    key = unclaimed_on_n1(world)
    assert world.refused(end_unclaimed(world, key, role=Role.USER)).kind is ErrorKind.FORBIDDEN
    other = AssignmentKey(lease_id=LeaseId("l-other"), rank=0)
    assert world.refused(end_unclaimed(world, other)).kind is ErrorKind.NOT_FOUND
    assert not world.pool.unclaimed()[0].ending


def test_unclaimed_work_is_listed_by_node_lease_and_rank() -> None:
    world = World()
    nodes = [world.add_node(name, gpus=2) for name in ("n2", "n1")]
    for _ in range(2):
        lease = world.granted(whole(1, replicas=2))
        world.store.pop(("lease", lease.lease_id))
    world.restart()
    for node in nodes:
        world.connect(node)
    everything = world.pool.unclaimed()
    places = [(each.node_id, each.lease_id, each.rank) for each in everything]
    assert len(places) == 4
    assert places == sorted(places)
    assert everything[0].place.node_id == everything[0].node_id
    assert everything[0].token > 0
    after: tuple[str, str, int] = ("", "", -1)
    paged = []
    while page := world.pool.unclaimed(after=after, limit=1):
        paged += page
        after = (page[0].node_id, page[0].lease_id, page[0].rank)
    assert paged == everything


def test_a_gpu_that_moved_to_another_host_is_offered_there() -> None:
    world = World()
    old = world.add_node("n1", gpus=1)
    world.settle()
    world.disconnect(old)
    other = PlayedNode(NodeId("n2"), inventory("n1", 1))
    world.nodes[other.node_id] = other
    world.connect(other)
    lease = world.granted(whole(1))
    assert lease.members[0].place.node_id == "n2"
    assert [event.subject for event in world.history if event.kind == "device.moved"]


def test_a_gpu_that_its_driver_has_lost_is_the_reason_by_that_name() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    lost = replace(node.device_reports()[0], clean=False, failed=True, reason="off the bus")
    world.report(node, Report(devices=(lost,)))
    explanation = world.refused(world.acquire(whole(1))).explanation
    assert explanation is not None
    assert [cause.code for cause in explanation.causes] == ["faulty"]
    unclean = replace(lost, failed=False, reason="memory is held")
    world.report(node, Report(devices=(unclean,)))
    explanation = world.refused(world.acquire(whole(1))).explanation
    assert explanation is not None
    assert [cause.code for cause in explanation.causes] == ["unclean"]
