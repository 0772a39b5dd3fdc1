"""Release, expiry, lost holders: nothing is free before its node confirmed it."""

import pytest
from tests.core_world import World, part, whole

from gpupool.model.caller import Caller, ProcessRef, Role
from gpupool.model.errors import ErrorKind
from gpupool.model.ids import NodeId
from gpupool.model.lease import LeaseState
from gpupool.model.request import OnFailure
from gpupool_allocator.core.settings import PoolSettings


def test_a_released_gpu_is_offered_only_after_its_node_confirmed_it_clean() -> None:
    world = World()
    world.add_node("n1", gpus=1)
    lease = world.granted(whole(1))
    world.release(lease)
    assert world.now_lease(lease).state is LeaseState.RELEASING
    assert "GPU" in world.refused(world.acquire(whole(1))).message
    world.settle()
    assert world.now_lease(lease).state is LeaseState.RELEASED
    assert world.granted(whole(1)).state is LeaseState.ACTIVE


def test_a_gpu_with_a_stray_process_stays_out_until_it_is_clean() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    lease = world.granted(whole(1))
    world.release(lease)
    uuid = node.inventory.devices[0].uuid
    node.dirty[uuid] = "process 4711 holds 100 MiB"
    world.settle()
    assert world.now_lease(lease).state is LeaseState.RELEASED
    refused = world.refused(world.acquire(whole(1)))
    assert refused.explanation is not None
    assert "unclean" in {cause.code for cause in refused.explanation.causes}
    waiting = world.acquire(whole(1), wait_s=None)
    node.dirty.clear()
    world.report_devices(node)
    world.settle()
    assert world.lease_of(waiting).state is LeaseState.ACTIVE


def test_a_lease_ends_when_it_is_not_renewed() -> None:
    world = World()
    world.add_node("n1")
    lease = world.granted(whole(1), ttl_s=30.0)
    world.advance(29)
    world.keep_alive(lease)
    world.advance(29)
    assert world.now_lease(lease).state is LeaseState.ACTIVE
    world.advance(2)
    world.settle()
    assert world.now_lease(lease).state is LeaseState.EXPIRED


def test_max_duration_ends_a_lease_however_often_it_is_renewed() -> None:
    world = World()
    world.add_node("n1")
    lease = world.granted(whole(1, max_duration_s=100.0))
    for _ in range(9):
        world.advance(10)
        world.keep_alive(lease)
    assert world.now_lease(lease).state is LeaseState.ACTIVE
    world.advance(11)
    world.settle()
    assert world.now_lease(lease).state is LeaseState.EXPIRED


def test_renewing_an_ended_lease_says_that_it_is_gone() -> None:
    world = World()
    world.add_node("n1")
    lease = world.granted(whole(1))
    world.release(lease)
    answer = world.answers[world.keep_alive(lease)][-1]
    assert getattr(answer, "gone", None) == (lease.lease_id,)


def test_ending_a_lease_twice_is_no_error() -> None:
    world = World()
    world.add_node("n1")
    lease = world.granted(whole(1))
    for _ in range(2):
        command = world.release(lease)
        world.settle()
        assert world.lease_of(command).lease_id == lease.lease_id
    kinds = [event.kind for event in world.history if event.subject == lease.lease_id]
    assert kinds.count("lease.released") == 1


def test_a_user_on_a_node_ends_only_own_leases() -> None:
    world = World()
    world.add_node("n1")
    lease = world.granted(whole(1, uid=1000))
    for state in (LeaseState.ACTIVE, LeaseState.RELEASED):
        refused = world.refused(world.release(lease, caller=Caller(user="eve", uid=1001)))
        assert (refused.kind, refused.field) == (ErrorKind.FORBIDDEN, "lease_id")
        assert world.now_lease(lease).state is state
        world.release(lease, caller=Caller(user="ada", uid=1000))
        world.settle()


def test_a_user_on_a_node_renews_only_own_leases() -> None:
    world = World()
    world.add_node("n1", gpus=2)
    ada, eve = Caller(user="ada", uid=1000), Caller(user="eve", uid=1001)
    lease = world.granted(whole(1, uid=1000), ttl_s=30.0)
    own = world.granted(whole(1, uid=1001), ttl_s=30.0)
    world.advance(20)
    # One that is somebody else's refuses the call: a bad call changes nothing.
    refused = world.refused(world.keep_alive(own, lease, caller=eve))
    assert (refused.kind, refused.field) == (ErrorKind.FORBIDDEN, "lease_ids")
    assert f"{lease.lease_id} is held by uid 1000, not by 1001" in refused.message
    world.advance(11)
    world.settle()
    for each in (lease, own):
        assert world.now_lease(each).state is LeaseState.EXPIRED
    refused = world.refused(world.keep_alive(lease, caller=eve))
    assert refused.kind is ErrorKind.FORBIDDEN
    answer = world.answers[world.keep_alive(lease, caller=ada)][-1]
    assert getattr(answer, "gone", None) == (lease.lease_id,)


@pytest.mark.parametrize(
    "caller",
    [
        Caller(user="root", uid=0, role=Role.OPERATOR),
        Caller(role=Role.OPERATOR),
        Caller(tenant="default", uid=1000),
        Caller(tenant="default"),
    ],
)
def test_an_operator_and_its_holder_renew_a_lease(caller: Caller) -> None:
    world = World()
    world.add_node("n1")
    lease = world.granted(whole(1, uid=1000), ttl_s=30.0)
    for _ in range(3):
        world.advance(20)
        world.keep_alive(lease, caller=caller)
    assert world.now_lease(lease).state is LeaseState.ACTIVE


@pytest.mark.parametrize(
    "caller",
    [
        Caller(user="root", uid=0, role=Role.OPERATOR),
        Caller(role=Role.OPERATOR),
        Caller(tenant="default", uid=1000),
    ],
)
def test_an_operator_and_its_holder_end_a_lease(caller: Caller) -> None:
    world = World()
    world.add_node("n1")
    lease = world.granted(whole(1, uid=1000))
    world.release(lease, caller=caller)
    world.settle()
    assert world.now_lease(lease).state is LeaseState.RELEASED


def test_a_lease_released_before_its_node_heard_of_it_leaves_nothing() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    world.settle()
    command = world.acquire(whole(1))
    world.release(world.lease_of(command))
    world.settle()
    assert node.running == {}
    assert world.pool.summary().devices_free == 1


def test_a_process_bound_lease_ends_with_its_process() -> None:
    world = World()
    node = world.add_node("n1")
    holder = ProcessRef(node_id=NodeId("n1"), pid=77, start_ticks=5)
    lease = world.granted(whole(1), process=holder)
    assert lease.state is LeaseState.ACTIVE
    world.advance(10_000)
    assert world.now_lease(lease).state is LeaseState.ACTIVE
    world.holder_ended(node, lease)
    world.settle()
    assert world.now_lease(lease).state is LeaseState.RELEASED


def test_the_agent_is_asked_to_watch_the_holder_and_no_longer_than_needed() -> None:
    world = World()
    node = world.add_node("n1")
    world.settle()
    holder = ProcessRef(node_id=NodeId("n1"), pid=77, start_ticks=5)
    command = world.acquire(whole(1), process=holder)
    assert node.desired is not None
    assert [watch.process for watch in node.desired.holders] == [holder]
    world.settle()
    world.release(world.lease_of(command))
    assert node.desired is not None
    assert node.desired.holders == ()


def test_a_cut_off_holder_keeps_its_lease_until_its_own_limit() -> None:
    world = World()
    home = world.add_node("home", gpus=0)
    world.add_node("n1")
    holder = ProcessRef(node_id=NodeId("home"), pid=77, start_ticks=5)
    lease = world.granted(whole(1, disconnect_s=3600.0), process=holder)
    world.disconnect(home)
    world.advance(3500)
    assert world.now_lease(lease).state is LeaseState.ACTIVE
    world.advance(200)
    world.settle()
    assert world.now_lease(lease).state is LeaseState.EXPIRED


def test_a_holder_that_comes_back_in_time_keeps_its_lease_for_good() -> None:
    world = World()
    home = world.add_node("home", gpus=0)
    world.add_node("n1")
    holder = ProcessRef(node_id=NodeId("home"), pid=77, start_ticks=5)
    lease = world.granted(whole(1, disconnect_s=3600.0), process=holder)
    world.disconnect(home)
    world.advance(3500)
    world.connect(home)
    world.advance(10_000)
    assert world.now_lease(lease).state is LeaseState.ACTIVE


def test_a_lost_gpu_ends_the_lease_under_the_default_policy() -> None:
    world = World()
    node = world.add_node("n1", gpus=2)
    lease = world.granted(whole(1), follow=True)
    uuid = lease.members[0].place.devices[0].device_uuid
    node.failed.add(uuid)
    world.report_devices(node)
    world.settle()
    ended = world.now_lease(lease)
    assert ended.state is LeaseState.FAILED
    assert uuid in ended.explanation.summary
    # The other GPU goes on; the lost one is offered to nobody.
    assert world.granted(whole(1)).members[0].place.devices[0].device_uuid != uuid
    assert world.refused(world.acquire(whole(1))).message


def test_a_lost_gpu_is_told_and_kept_under_the_policy_wait() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    lease = world.granted(whole(1, on_failure=OnFailure.WAIT), follow=True)
    node.failed.add(node.inventory.devices[0].uuid)
    world.report_devices(node)
    told = world.now_lease(lease)
    assert told.state is LeaseState.ACTIVE
    assert told.generation == lease.generation + 1
    assert node.inventory.devices[0].uuid in told.explanation.summary


def test_slices_of_an_ended_lease_leave_the_others_alone() -> None:
    world = World()
    world.add_node("n1", gpus=1)
    first, second = world.granted(part(40)), world.granted(part(60))
    world.release(first)
    world.settle()
    assert world.now_lease(second).state is LeaseState.ACTIVE
    assert world.granted(part(40)).state is LeaseState.ACTIVE


def test_listeners_hear_of_every_end_though_one_event_ends_more_leases_than_are_kept() -> None:
    world = World(PoolSettings(ended_kept=1))
    node = world.add_node("n1", gpus=4)
    commands = [world.acquire(whole(1), follow=True) for _ in range(4)]
    world.settle()
    for command in commands:
        world.release(world.lease_of(command))
    report = node.obey()
    assert report is not None
    world.report(node, report)
    assert {world.lease_of(command).state for command in commands} == {LeaseState.RELEASED}
    assert world.finished >= set(commands)
