"""From request to active lease, and every way in which a request is refused."""

from dataclasses import replace

from tests.core_world import World, part, whole

from gpupool.model.errors import ErrorKind
from gpupool.model.lease import NO_EXPLANATION, LeaseState, MemberState
from gpupool.model.request import GpuSlice, Level, OnFailure, TopologyConstraint
from gpupool.model.views import DryRunResult
from gpupool_allocator.core.pool import Pool


def test_a_lease_is_active_once_its_node_has_prepared_it() -> None:
    world = World()
    world.add_node("n1")
    command = world.acquire(whole(2))
    assert world.lease_of(command).state is LeaseState.GRANTED
    world.settle()
    lease = world.lease_of(command)
    assert lease.state is LeaseState.ACTIVE
    assert command in world.finished
    (member,) = lease.members
    assert member.state is MemberState.READY
    assert member.environment is not None
    assert member.environment["CUDA_VISIBLE_DEVICES"].count("GPU-n1-") == 2


def test_a_grant_is_stored_before_anybody_hears_of_it() -> None:
    world = World()
    world.add_node("n1")
    command = world.acquire(whole(1))
    stored = world.store["lease", world.lease_of(command).lease_id]
    assert getattr(stored, "state", None) is LeaseState.GRANTED


def test_a_gang_is_granted_whole_or_not_at_all() -> None:
    world = World()
    world.add_node("n1")
    world.add_node("n2", gpus=4)
    refused = world.refused(world.acquire(whole(8, replicas=2)))
    assert refused.kind is ErrorKind.NO_CAPACITY
    assert world.pool.summary().devices_used == 0
    world.add_node("n3")
    lease = world.granted(whole(8, replicas=2))
    assert {member.place.node_id for member in lease.members} == {"n1", "n3"}
    assert [member.rank for member in lease.members] == [0, 1]


def test_a_retry_with_the_same_request_id_finds_its_lease() -> None:
    world = World()
    world.add_node("n1")
    first = world.granted(whole(1), request_id="once")
    again = world.granted(whole(1), request_id="once")
    assert again.lease_id == first.lease_id
    assert world.pool.summary().devices_used == 1


def test_a_request_id_used_for_something_else_is_a_conflict() -> None:
    world = World()
    world.add_node("n1")
    world.granted(whole(1), request_id="once")
    refused = world.refused(world.acquire(whole(2), request_id="once"))
    assert refused.kind is ErrorKind.CONFLICT
    assert refused.field == "request_id"


def test_tenants_may_use_the_same_request_id() -> None:
    world = World()
    world.add_node("n1")
    mine = world.granted(whole(1, tenant="a"), request_id="once")
    yours = world.granted(whole(1, tenant="b"), request_id="once")
    assert mine.lease_id != yours.lease_id


def test_tokens_grow_with_every_assignment() -> None:
    world = World()
    world.add_node("n1", gpus=1)
    tokens = []
    for _ in range(3):
        lease = world.granted(whole(1))
        tokens.append(lease.members[0].token)
        world.release(lease)
        world.settle()
    assert tokens == sorted(set(tokens))


def test_slices_of_one_gpu_share_a_user() -> None:
    world = World()
    world.add_node("n1", gpus=1)
    world.granted(part(50, uid=1001))
    refused = world.refused(world.acquire(part(50, uid=1002)))
    assert refused.kind is ErrorKind.NO_CAPACITY
    assert refused.explanation is not None
    assert "uid" in {cause.code for cause in refused.explanation.causes}


def test_a_share_off_the_grain_is_refused_by_name() -> None:
    world = World()
    world.add_node("n1")
    refused = world.refused(world.acquire(part(15)))
    assert refused.kind is ErrorKind.INVALID
    assert refused.field == "spec.groups[0].slice.share_pct"
    assert "15" in refused.message
    assert "10" in refused.message


def test_valid_fields_that_are_not_built_are_named() -> None:
    world = World()
    world.add_node("n1")
    cases = {
        "spec.isolated": replace(whole(1), isolated=True),
        "spec.movable": replace(whole(1), movable=True),
        "spec.shared_trust": replace(whole(1), shared_trust=True),
        "spec.spares": replace(whole(1), spares=1),
        "spec.on_failure": replace(whole(1), on_failure=OnFailure.REPLACE),
        "spec.topology.required": replace(
            whole(1), topology=TopologyConstraint(required=Level.BLOCK)
        ),
        "spec.groups[0].slice.max_share_pct": replace(
            part(10),
            groups=(
                replace(part(10).groups[0], accelerator=GpuSlice(share_pct=10, max_share_pct=50)),
            ),
        ),
    }
    for field, wanted in cases.items():
        refused = world.refused(world.acquire(wanted))
        assert (refused.kind, refused.field) == (ErrorKind.UNIMPLEMENTED, field)
    assert world.pool.summary().leases == 0


def test_a_dry_run_answers_as_the_real_thing_and_changes_nothing() -> None:
    world = World()
    world.add_node("n1", gpus=2)
    fits, too_big = whole(2), whole(3)
    for _ in range(2):
        answer = world.pool.dry_run(fits, world.now)
        assert getattr(answer, "granted", None) is True
    lease = world.granted(fits)
    assert [m.place for m in lease.members] == [m.place for m in answer.members]  # type: ignore[union-attr]
    no = world.pool.dry_run(too_big, world.now)
    refused = world.refused(world.acquire(too_big))
    assert getattr(no, "explanation", None) == refused.explanation


def test_a_member_that_its_node_refuses_gets_another_place() -> None:
    world = World()
    first = world.add_node("n1", gpus=1)
    world.add_node("n2", gpus=1)
    first.refuses = "the driver says no"
    lease = world.granted(whole(1), follow=True)
    assert lease.state is LeaseState.ACTIVE
    assert lease.members[0].place.node_id == "n2"
    assert lease.generation == 2
    assert first.running == {}
    assert [event.kind for event in world.history].count("member.replaced") == 1


def test_a_node_that_refuses_for_one_gpu_and_takes_it_out_keeps_its_others() -> None:
    world = World()
    node = world.add_node("n1", gpus=3)
    (broken, *_) = (device.uuid for device in node.inventory.devices)
    node.broken.add(broken)
    leases = [world.granted(whole(1), follow=True) for _ in range(2)]
    assert [lease.state for lease in leases] == [LeaseState.ACTIVE] * 2
    assert [event.kind for event in world.history].count("member.refused") == 1
    assert broken not in {
        share.device_uuid for lease in leases for share in lease.members[0].place.devices
    }


def test_a_member_that_every_node_refuses_fails_with_the_reason() -> None:
    world = World()
    for name in ("n1", "n2", "n3", "n4"):
        world.add_node(name, gpus=1).refuses = "no memory for cgroup"
    lease = world.granted(whole(1), follow=True)
    assert lease.state is LeaseState.FAILED
    assert "no memory for cgroup" in lease.explanation.summary
    refusals = [event for event in world.history if event.kind == "member.refused"]
    assert len(refusals) == world.settings.prepare_attempts
    assert world.pool.summary().devices_used == 0


def test_a_spread_gang_has_its_members_on_nodes_of_their_own() -> None:
    world = World()
    for name in ("n1", "n2", "n3"):
        world.add_node(name)
    lease = world.granted(whole(1, replicas=3, topology=TopologyConstraint(spread=Level.NODE)))
    assert {member.place.node_id for member in lease.members} == {"n1", "n2", "n3"}


def test_a_gang_bound_to_one_node_sits_on_one() -> None:
    world = World()
    world.add_node("n1", gpus=4)
    world.add_node("n2", gpus=8)
    lease = world.granted(whole(1, replicas=6, topology=TopologyConstraint(required=Level.NODE)))
    assert {member.place.node_id for member in lease.members} == {"n2"}


def test_a_lease_that_could_not_be_stored_is_refused_and_nothing_is_booked() -> None:
    world = World()
    world.pool = Pool(
        world.settings, epoch=1, last_sequence=len(world.history), fits_store=lambda _: False
    )
    world._perform(world.pool.start(world.now, world.unix_s))
    for number in range(16):
        world.add_node(f"n{number}", gpus=64)
    wanted = whole(64, replicas=16)
    refused = world.refused(world.acquire(wanted, wait_s=None))
    assert "split the request" in getattr(refused.explanation, "nearest_change", "")
    assert world.pool.dry_run(wanted, world.now) == DryRunResult(
        granted=False, members=(), explanation=refused.explanation or NO_EXPLANATION
    )
    assert world.pool.summary().devices_used == 0
    assert world.granted(whole(8)).state is LeaseState.ACTIVE


def test_a_request_that_waits_and_could_not_be_stored_ends_when_it_has_its_places() -> None:
    world = World()
    world.pool = Pool(
        world.settings, epoch=1, last_sequence=len(world.history), fits_store=lambda _: False
    )
    world._perform(world.pool.start(world.now, world.unix_s))
    for number in range(16):
        world.add_node(f"n{number}", gpus=64)
    before = world.granted(whole(1))
    large = world.acquire(whole(64, replicas=16), wait_s=None)
    after = world.acquire(whole(64), wait_s=None, request_id="after")
    assert world.lease_of(large).state is LeaseState.PENDING
    world.release(before)
    world.settle()
    ended = world.lease_of(large)
    assert ended.state is LeaseState.CANCELLED
    assert "larger than one stored record" in ended.explanation.summary
    assert world.lease_of(after).state is LeaseState.ACTIVE
    assert world.pool.holds() == []
