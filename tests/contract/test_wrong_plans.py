"""A planner that is wrong harms nobody (C04): what it proposes is checked twice.

The planner is replaced by one that proposes a given plan. First the validator must
reject it; where even the validator is blind, the books must refuse it, whole.
"""

import pytest
from tests.core_world import MEMORY_MIB, World, part, whole

from gpupool.model.ids import DeviceUuid, NodeId
from gpupool.model.lease import DeviceShare, LeaseState, Place
from gpupool_allocator.core import granting
from gpupool_allocator.core.placement import Plan, PlannedMember


def member(rank: int, *uuids: str, share_pct: int = 100) -> PlannedMember:
    shares = tuple(
        DeviceShare(
            device_uuid=DeviceUuid(uuid),
            share_pct=share_pct,
            memory_mib=MEMORY_MIB if share_pct == 100 else 0,
            whole=share_pct == 100,
        )
        for uuid in uuids
    )
    place = Place(node_id=NodeId("n1"), devices=shares)
    return PlannedMember(group="main", index=rank, rank=rank, place=place)


def propose(monkeypatch: pytest.MonkeyPatch, *members: PlannedMember) -> None:
    wrong = Plan(members=members, nodes_touched=1)
    monkeypatch.setattr(granting, "plan", lambda *_, **__: wrong)


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(granting, "validate", lambda *_, **__: None)


def test_a_device_that_somebody_has_is_not_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.add_node("n1", gpus=2)
    holder = world.granted(whole(1))
    (share,) = holder.members[0].place.devices
    propose(monkeypatch, member(0, share.device_uuid))
    refused = world.refused(world.acquire(whole(1)))
    assert share.device_uuid in refused.message
    assert [alarm.code for alarm in world.alarms] == ["plan_rejected"]
    assert world.now_lease(holder).state is LeaseState.ACTIVE
    assert world.pool.summary().devices_used == 1


def test_a_device_named_for_two_members_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.add_node("n1", gpus=2)
    propose(monkeypatch, member(0, "GPU-n1-0"), member(1, "GPU-n1-0"))
    world.refused(world.acquire(whole(1, replicas=2)))
    assert [alarm.code for alarm in world.alarms] == ["plan_rejected"]
    assert world.pool.summary().devices_used == 0


def test_shares_over_one_hundred_percent_are_refused_by_the_books_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.add_node("n1", gpus=1)
    world.granted(part(60))
    propose(monkeypatch, member(0, "GPU-n1-0", share_pct=50))
    blind(monkeypatch)
    world.refused(world.acquire(part(50)))
    assert [alarm.code for alarm in world.alarms] == ["booking_refused"]
    assert world.pool.summary().granted_share_pct == 60


def test_a_gang_that_the_books_refuse_in_part_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.add_node("n1", gpus=4)
    holder = world.granted(whole(1))
    (taken,) = holder.members[0].place.devices
    free = [f"GPU-n1-{n}" for n in range(4) if f"GPU-n1-{n}" != taken.device_uuid]
    propose(monkeypatch, member(0, free[0]), member(1, free[1]), member(2, taken.device_uuid))
    blind(monkeypatch)
    world.refused(world.acquire(whole(1, replicas=3)))
    assert [alarm.code for alarm in world.alarms] == ["booking_refused"]
    assert world.pool.summary().devices_used == 1
    monkeypatch.undo()
    assert world.granted(whole(3)).state is LeaseState.ACTIVE
