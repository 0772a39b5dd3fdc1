"""Operators' holds: on nodes and GPUs, for some tenants, for a time."""

from tests.core_world import World, whole

from gpupool.model.hold import HoldScope
from gpupool.model.lease import LeaseState


def test_a_held_node_takes_nothing_new_and_keeps_what_runs() -> None:
    world = World()
    world.add_node("n1")
    lease = world.granted(whole(1))
    hold = world.add_hold("n1")
    refused = world.refused(world.acquire(whole(1)))
    assert refused.explanation is not None
    assert "held" in {cause.code for cause in refused.explanation.causes}
    assert world.now_lease(lease).state is LeaseState.ACTIVE
    waiting = world.acquire(whole(1), wait_s=None)
    world.remove_hold(hold)
    world.settle()
    assert world.lease_of(waiting).state is LeaseState.ACTIVE


def test_a_hold_lets_the_tenants_through_that_it_names() -> None:
    world = World()
    world.add_node("n1", gpus=1)
    world.add_hold("n1", allowed_tenants=("red",))
    assert world.refused(world.acquire(whole(1, tenant="blue")))
    assert world.granted(whole(1, tenant="red")).state is LeaseState.ACTIVE


def test_a_held_gpu_leaves_its_neighbours_alone() -> None:
    world = World()
    world.add_node("n1", gpus=2)
    world.add_hold("GPU-n1-0", scope=HoldScope.DEVICE)
    lease = world.granted(whole(1))
    assert lease.members[0].place.devices[0].device_uuid == "GPU-n1-1"
    assert world.refused(world.acquire(whole(1)))


def test_the_target_of_a_hold_is_compared_whole() -> None:
    """C64: r1 and r10 are two names."""
    world = World()
    world.add_node("r1", gpus=1)
    world.add_node("r10", gpus=1)
    world.add_hold("r1")
    assert world.granted(whole(1)).members[0].place.node_id == "r10"


def test_a_hold_ends_by_itself_when_its_time_has_come() -> None:
    world = World()
    world.add_node("n1", gpus=1)
    world.add_hold("n1", expire_unix_s=world.unix_s + 60)
    waiting = world.acquire(whole(1), wait_s=None)
    world.advance(59)
    assert world.lease_of(waiting).state is LeaseState.PENDING
    world.advance(2)
    world.settle()
    assert world.lease_of(waiting).state is LeaseState.ACTIVE


def test_holds_live_through_a_restart() -> None:
    world = World()
    node = world.add_node("n1", gpus=1)
    world.add_hold("n1")
    world.restart()
    world.connect(node)
    assert world.refused(world.acquire(whole(1)))
    assert [hold.target for hold in world.pool.holds()] == ["n1"]


def test_only_what_the_pool_has_can_be_held() -> None:
    world = World()
    world.add_node("n1")
    world.add_hold("n2")
    assert world.pool.holds() == []
