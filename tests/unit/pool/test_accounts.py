"""A node's full account against the book: at each connection, and while one lasts."""

from dataclasses import replace

import pytest
from tests.core_world import World, part, whole
from tests.played_node import PlayedNode

from gpupool.model.assignment import (
    Assignment,
    AssignmentKey,
    AssignmentReport,
    AssignmentState,
    FaultReport,
    HolderEnd,
    Report,
)
from gpupool.model.caller import Caller, ProcessRef, Role
from gpupool.model.event import Event
from gpupool.model.ids import CommandId, DeviceUuid, LeaseId, NodeId
from gpupool.model.lease import DeviceShare, Lease, LeaseState, MemberState, Place
from gpupool.model.request import OnFailure
from gpupool_allocator.core.events import EndUnclaimed
from gpupool_allocator.core.settings import PoolSettings

HOWS = ("hello", "account")


def speak(world: World, node: PlayedNode, how: str) -> None:
    """The node says all that it has, on a new connection or on the present one."""
    if how == "hello":
        world.disconnect(node)
        world.connect(node)
    else:
        world.account(node)


def events(world: World, kind: str) -> list[Event]:
    return [event for event in world.history if event.kind == kind]


def key(lease: Lease, rank: int = 0) -> AssignmentKey:
    return AssignmentKey(lease_id=lease.lease_id, rank=rank)


def foreign(node: PlayedNode, gpu: int, *, token: int = 7) -> Assignment:
    """Work on a GPU that the pool has never heard of."""
    share = DeviceShare(
        device_uuid=node.inventory.devices[gpu].uuid, share_pct=100, memory_mib=80_000, whole=True
    )
    return Assignment(
        key=AssignmentKey(lease_id=LeaseId("l-foreign"), rank=0),
        group="main",
        token=token,
        place=Place(node_id=node.node_id, devices=(share,)),
        uid=0,
        disconnect_s=60.0,
        world_size=1,
    )


def test_an_account_of_a_node_that_has_lost_nothing_changes_nothing() -> None:
    world = World()
    node = world.add_node("n1")
    lease = world.granted(whole(2), follow=True)
    seen = world.store.copy(), len(world.history)
    for _ in range(3):
        assert world.account(node) == []
        assert node.desired is None
    assert (world.store, len(world.history)) == seen
    assert world.now_lease(lease) == lease


@pytest.mark.parametrize("how", HOWS)
def test_what_a_node_has_lost_is_prepared_again_and_told(how: str) -> None:
    """C73: within a living connection as well as at the next one."""
    world = World()
    node = world.add_node("n1")
    lease = world.granted(whole(1), follow=True)
    node.forget(key(lease))
    speak(world, node, how)
    waits = world.now_lease(lease)
    assert waits.members[0].state is MemberState.PREPARING
    assert waits.members[0].environment is None
    (correction,) = events(world, "member.preparing")
    assert correction.subject == lease.lease_id
    assert correction.cause == "node n1 does not run it any more"
    world.settle()
    after = world.now_lease(lease)
    assert after.state is LeaseState.ACTIVE
    assert after.members[0].state is MemberState.READY
    assert after.members[0].token > lease.members[0].token
    assert after.generation > lease.generation
    assert key(lease) in node.running


@pytest.mark.parametrize("how", HOWS)
def test_a_lost_slice_comes_again_though_a_later_one_was_accepted_on_its_gpu(how: str) -> None:
    """The node refuses every token below the highest that it has accepted on a device."""
    world = World()
    node = world.add_node("n1", gpus=1)
    earlier, later = (world.granted(part(10)) for _ in range(2))
    node.forget(key(earlier))
    speak(world, node, how)
    world.settle()
    after = world.now_lease(earlier)
    assert after.state is LeaseState.ACTIVE
    assert after.members[0].token > later.members[0].token
    assert node.running[key(earlier)].token == after.members[0].token
    assert world.now_lease(later) == later


def test_an_assignment_on_its_way_is_never_taken_for_lost() -> None:
    world = World()
    node = world.add_node("n1")
    first = world.granted(part(10))
    command = world.acquire(part(10))
    # Made before what names the second lease has arrived, and read after it was sent.
    for _ in range(5):
        assert world.account(node) == []
    lease = world.lease_of(command)
    assert lease.state is LeaseState.GRANTED
    world.settle()
    assert world.lease_of(command).state is LeaseState.ACTIVE
    assert world.lease_of(command).members[0].token == lease.members[0].token
    assert world.now_lease(first) == first
    assert world.account(node) == []


def test_a_grant_that_its_node_has_not_heard_of_is_the_same_after_a_reconnect() -> None:
    world = World()
    node = world.add_node("n1")
    command = world.acquire(part(10), follow=True)
    granted = world.lease_of(command)
    speak(world, node, "hello")
    world.account(node)
    assert world.now_lease(granted) == granted
    world.settle()
    assert world.lease_of(command).members[0].token == granted.members[0].token
    assert events(world, "member.preparing") == []


def test_what_a_busy_node_has_lost_is_found_though_something_is_always_on_its_way() -> None:
    world = World()
    node = world.add_node("n1")
    lease = world.granted(part(10))
    account = replace(node.account(world.epoch), assignments=())
    world.acquire(part(10))
    world.report(node, account)
    assert [event.subject for event in events(world, "member.preparing")] == [lease.lease_id]


@pytest.mark.parametrize("how", HOWS)
def test_a_lease_ends_though_the_report_of_its_end_was_lost(how: str) -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    lease = world.granted(whole(1))
    world.release(lease)
    assert node.obey() is not None  # and nobody hears of it
    assert world.now_lease(lease).state is LeaseState.RELEASING
    speak(world, node, how)
    assert world.now_lease(lease).state is LeaseState.RELEASED
    kinds = [event.kind for event in world.history if event.subject == lease.lease_id]
    assert kinds[-3:] == ["lease.releasing", "member.ended", "lease.released"]
    assert world.granted(whole(1)).state is LeaseState.ACTIVE


def test_a_release_on_its_way_is_not_taken_for_carried_out() -> None:
    """What the node lost may be on its way to it once more, so its GPU stays booked."""
    world = World()
    node = world.add_node("n1", gpus=1)
    lease = world.granted(whole(1))
    account = replace(node.account(world.epoch), assignments=())
    world.release(lease)
    world.report(node, account)
    assert world.now_lease(lease).state is LeaseState.RELEASING
    world.settle()
    assert world.now_lease(lease).state is LeaseState.RELEASED


@pytest.mark.parametrize("policy", [OnFailure.STOP, OnFailure.WAIT])
def test_an_end_of_which_the_report_was_lost_is_taken_from_the_account(policy: OnFailure) -> None:
    world = World()
    node = world.add_node("n1")
    lease = world.granted(whole(1, on_failure=policy))
    old = node.running.pop(key(lease))
    ended = AssignmentReport(
        key=old.key, token=old.token, state=AssignmentState.ENDED, reason="out of time"
    )
    world.report(node, replace(node.account(world.epoch), assignments=(ended,)))
    world.settle()
    after = world.now_lease(lease)
    if policy is OnFailure.WAIT:
        assert after.state is LeaseState.ACTIVE
        assert after.members[0].token > lease.members[0].token
    else:
        assert after.state is LeaseState.FAILED
        assert "out of time" in after.explanation.summary
    assert world.account(node) == []


def test_a_member_that_is_lost_while_it_is_prepared_is_tried_again_a_bounded_number_of_times() -> (
    None
):
    world = World(PoolSettings(prepare_attempts=3))
    node = world.add_node("n1", gpus=1)
    command = world.acquire(whole(1), follow=True)
    for attempt in range(3):
        assert world.lease_of(command).state is LeaseState.GRANTED, attempt
        assert node.obey() is not None  # and nobody hears of it
        node.running.clear()
        world.account(node)
        assert node.desired is not None, attempt
    assert len(events(world, "member.preparing")) == 2
    world.settle()
    lease = world.lease_of(command)
    assert lease.state is LeaseState.FAILED
    assert "does not run it any more (attempt 3)" in lease.explanation.summary
    assert world.pool.summary().devices_free == 1


@pytest.mark.parametrize("policy", [OnFailure.STOP, OnFailure.WAIT])
@pytest.mark.parametrize("how", HOWS)
def test_a_ready_member_that_no_account_names_is_prepared_a_bounded_number_of_times(
    how: str, policy: OnFailure
) -> None:
    world = World(PoolSettings(prepare_attempts=3))
    node = world.add_node("n1", gpus=1)
    lease = world.granted(whole(1, on_failure=policy), follow=True)
    for attempt in range(3):
        assert world.now_lease(lease).state is LeaseState.ACTIVE, attempt
        assert world.now_lease(lease).members[0].state is MemberState.READY
        node.forget(key(lease))
        speak(world, node, how)
        world.settle()
    assert len(events(world, "member.preparing")) == 2
    after = world.now_lease(lease)
    assert after.state is LeaseState.FAILED
    cause = "node n1 does not run it any more (prepared and lost 3 times)"
    assert after.explanation.summary == cause
    assert world.pool.summary().devices_free == 1


def test_a_long_lease_lives_through_any_number_of_reboots_of_its_node() -> None:
    world = World(PoolSettings(prepare_attempts=3))
    node = world.add_node("n1", gpus=1)
    lease = world.granted(whole(1), follow=True)
    for number in range(10):
        node.forget(key(lease))
        node.boot_id = f"boot-{number + 2}"
        speak(world, node, "hello")
        world.settle()
        assert world.account(node) == []
        assert world.now_lease(lease).state is LeaseState.ACTIVE


@pytest.mark.parametrize("how", HOWS)
def test_work_that_the_book_has_lost_is_kept_and_ended_by_an_operator_only(how: str) -> None:
    world = World()
    node = world.add_node("n1", gpus=2)
    world.granted(part(10))
    work = foreign(node, 1)
    node.running[work.key] = work
    speak(world, node, how)
    (found,) = events(world, "assignment.unclaimed")
    assert found.details["lease_id"] == "l-foreign"
    assert [each.lease_id for each in world.pool.unclaimed()] == ["l-foreign"]
    # No later desired state ends it, and its GPU is granted to nobody else.
    world.granted(part(10))
    waiting = world.acquire(whole(1), wait_s=None)
    assert world.lease_of(waiting).state is LeaseState.PENDING
    assert work.key in node.running
    assert world.account(node) == []
    world.handle(
        EndUnclaimed(
            command=CommandId(world.next_id()),
            caller=Caller(role=Role.OPERATOR),
            node_id=NodeId("n1"),
            lease_id=LeaseId("l-foreign"),
        )
    )
    world.settle()
    assert work.key not in node.running
    assert world.pool.unclaimed() == []
    assert world.lease_of(waiting).state is LeaseState.ACTIVE


def test_lost_work_that_ends_already_keeps_its_gpu_until_it_has_ended() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    work = foreign(node, 0)
    ending = AssignmentReport(
        key=work.key, token=work.token, state=AssignmentState.ENDING, place=work.place
    )
    world.settle()
    world.report(node, replace(node.account(world.epoch), assignments=(ending,)))
    assert [each.ending for each in world.pool.unclaimed()] == [True]
    waiting = world.acquire(whole(1), wait_s=None)
    assert world.lease_of(waiting).state is LeaseState.PENDING
    world.report(node, Report(assignments=(replace(ending, state=AssignmentState.ENDED),)))
    assert world.lease_of(waiting).state is LeaseState.GRANTED


def test_unclaimed_work_that_is_gone_from_an_account_makes_room() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    world.settle()
    work = foreign(node, 0)
    node.running[work.key] = work
    assert world.account(node) == ["assignment.unclaimed"]
    node.running.clear()
    assert world.account(node) == ["assignment.gone"]
    assert world.granted(whole(1)).state is LeaseState.ACTIVE


def test_nothing_is_unclaimed_while_its_end_may_be_on_its_way() -> None:
    world = World()
    node = world.add_node("n1")
    world.granted(part(10))
    work = foreign(node, 1)
    node.running[work.key] = work
    world.acquire(part(10))
    assert world.account(node) == []
    world.settle()
    assert work.key not in node.running
    assert events(world, "assignment.unclaimed") == []


@pytest.mark.parametrize("how", HOWS)
def test_a_node_that_keeps_what_it_should_have_ended_is_told_again(how: str) -> None:
    world = World()
    node = world.add_node("n1")
    lease = world.granted(whole(1))
    old = node.running[key(lease)]
    world.release(lease)
    world.settle()
    node.running[old.key] = old
    speak(world, node, how)
    (found,) = events(world, "assignment.unwanted")
    assert (found.subject, found.details["lease_id"]) == ("n1", lease.lease_id)
    world.settle()
    assert node.running == {}
    assert world.account(node) == []


def test_a_release_that_was_accepted_and_not_begun_is_told_again() -> None:
    world = World()
    node = world.add_node("n1")
    lease = world.granted(whole(1))
    old = node.running[key(lease)]
    world.release(lease)
    assert node.obey() is not None
    node.running[old.key] = old
    assert world.account(node) == ["assignment.unwanted"]
    assert world.now_lease(lease).state is LeaseState.RELEASING
    world.settle()
    assert world.now_lease(lease).state is LeaseState.RELEASED


def test_an_account_of_the_release_before_changes_nothing() -> None:
    """Its agent names no places, gives no accounts later, and repeats its inventory."""
    world = World()
    node = world.add_node("n1", gpus=3)
    lease = world.granted(whole(1))
    work = foreign(node, 2)
    node.running[work.key] = work
    world.disconnect(node)
    world.connect(node)
    account = node.account(world.epoch)
    world.report(
        node,
        replace(
            account,
            inventory=node.inventory,
            assignments=tuple(replace(each, place=None, uid=0) for each in account.assignments),
        ),
    )
    world.settle()
    assert set(node.running) == {key(lease), work.key}
    assert world.now_lease(lease).state is LeaseState.ACTIVE
    assert events(world, "assignment.unwanted") == []


def test_a_device_that_an_account_leaves_out_is_not_offered_until_it_is_named() -> None:
    world = World()
    node = world.add_node("n1", gpus=2)
    account = node.account(world.epoch)
    world.report(node, replace(account, devices=account.devices[:1]))
    (found,) = events(world, "device.unconfirmed")
    assert found.subject == node.inventory.devices[1].uuid
    assert world.pool.summary().devices_free == 1
    world.report(node, replace(account, devices=account.devices[:1]))
    assert len(events(world, "device.unconfirmed")) == 1
    world.account(node)
    assert world.pool.summary().devices_free == 2


def test_a_fault_is_history_once_when_it_opens_and_once_when_no_account_names_it() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    uuid = DeviceUuid("GPU-n1-0")
    fault = FaultReport(code="gpu_lost", evidence="off the bus", open=True, device_uuid=uuid)
    account = replace(node.account(world.epoch), faults=(fault,))
    world.report(node, Report(faults=(fault,)))
    world.report(node, account)
    world.disconnect(node)
    world.connect(node)
    world.report(node, account)
    assert [event.subject for event in events(world, "fault.opened")] == [uuid]
    world.account(node)
    world.account(node)
    (closed,) = events(world, "fault.closed")
    assert closed.details == {"code": "gpu_lost", "node_id": "n1"}
    assert closed.cause == "node n1 does not name it any more"
    world.report(node, account)
    assert len(events(world, "fault.opened")) == 2


def bound(world: World) -> tuple[PlayedNode, Lease]:
    """A lease whose holder is a process on its own node."""
    node = world.add_node("n1")
    holder = ProcessRef(node_id=NodeId("n1"), pid=77, start_ticks=5)
    lease = world.granted(whole(1), process=holder)
    assert node.watched == {lease.lease_id}
    return node, lease


def test_a_watch_that_a_node_has_lost_is_asked_for_again() -> None:
    world = World()
    node, lease = bound(world)
    node.watched.clear()
    world.acquire(whole(1))
    assert world.account(node) == []  # something is on its way: it may be the watch
    world.settle()
    node.watched.clear()
    assert world.account(node) == ["holder.unwatched"]
    world.settle()
    assert node.watched == {lease.lease_id}
    assert world.account(node) == []


def test_the_end_of_a_holder_is_taken_from_the_account_where_its_report_was_lost() -> None:
    world = World()
    node, lease = bound(world)
    node.watched.clear()
    end = HolderEnd(lease_id=lease.lease_id, pid=77, reason="exited")
    world.report(node, replace(node.account(world.epoch), ended_holders=(end,)))
    assert events(world, "holder.unwatched") == []
    world.settle()
    assert world.now_lease(lease).state is LeaseState.RELEASED


def test_a_watch_that_nobody_asks_for_is_ended_by_the_next_desired_state() -> None:
    world = World()
    node, lease = bound(world)
    node.watched.add(LeaseId("l-other"))
    assert world.account(node) == ["holder.unwanted"]
    world.settle()
    assert node.watched == {lease.lease_id}


def test_a_node_that_speaks_and_accepts_nothing_gets_its_desired_state_again() -> None:
    """Heartbeats are enough: agents of the release before give no accounts."""
    world = World(PoolSettings(heartbeat_timeout_s=10.0))
    node = world.add_node("n1")
    world.settle()
    heartbeat = Report(accepted_revision=node.accepted[1])
    command = world.acquire(whole(1))
    for _ in range(3):
        node.desired = None  # lost
        world.report(node, heartbeat)
        assert node.desired is None
        world.advance(4.0)
    world.report(node, heartbeat)
    (told,) = events(world, "node.told_again")
    assert (told.subject, told.cause) == (
        "n1",
        "it has not accepted what it shall run for 12 s",
    )
    world.settle()
    assert world.lease_of(command).state is LeaseState.ACTIVE
    for _ in range(5):
        world.advance(10.0)
        world.account(node)
    assert len(events(world, "node.told_again")) == 1


def test_a_node_that_accepts_what_comes_is_not_told_again_though_more_always_comes() -> None:
    world = World(PoolSettings(heartbeat_timeout_s=10.0))
    node = world.add_node("n1")
    for _ in range(20):
        world.settle()
        lagging = node.account(world.epoch)
        world.acquire(part(10), ttl_s=1000.0)
        world.report(node, lagging)
        world.advance(4.0)
    assert events(world, "node.told_again") == []
    assert events(world, "member.preparing") == []
