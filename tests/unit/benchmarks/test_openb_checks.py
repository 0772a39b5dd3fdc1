"""The openb checks see what is wrong: each is shown a pool that breaks one promise."""

from dataclasses import replace

import pytest
from tests.benchmarks.openb_replay.checks import (
    LIFE,
    tokens_by_device,
    wrong_history,
    wrong_tokens,
    wrong_when_empty,
    wrong_when_loaded,
)
from tests.benchmarks.openb_replay.picture import Picture, on_node
from tests.benchmarks.openb_replay.trace import TraceNode, TracePod

from gpupool.model.caller import Caller
from gpupool.model.event import Event
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId, RequestId
from gpupool.model.lease import DeviceShare, Lease, LeaseState, Member, MemberState, Place
from gpupool.model.views import DeviceState, DeviceView, NodeState, NodeView, PoolSummary

NODE = NodeId("host")
HOST = TraceNode(name="host", cpu_milli=64_000, memory_mib=131_072, gpus=2, model="T4")
WHOLE = TracePod("whole", 4_000, 8_192, 1, 1000, ())
SLICE = TracePod("slice", 2_000, 4_096, 1, 300, ("t4",))
TOO_BIG = TracePod("too-big", 1_000, 1_024, 2, 1000, ())
GPUS = tuple(device.uuid for device in HOST.inventory().devices)
HELD = {LeaseId("lease-1"): WHOLE, LeaseId("lease-2"): SLICE}


def lease(lease_id: str, pod: TracePod, uuid: DeviceUuid, token: int) -> Lease:
    spec = pod.spec()
    share_pct = pod.gpu_milli // 10
    share = DeviceShare(device_uuid=uuid, share_pct=share_pct, memory_mib=0, whole=share_pct == 100)
    member = Member(
        group="main",
        index=0,
        rank=0,
        state=MemberState.READY,
        token=token,
        place=Place(
            node_id=NODE,
            devices=(share,),
            cpu_milli=pod.cpu_milli,
            host_memory_mib=pod.memory_mib,
        ),
    )
    return Lease(
        lease_id=LeaseId(lease_id),
        request_id=RequestId(f"request of {lease_id}"),
        caller=Caller(),
        spec=spec,
        state=LeaseState.ACTIVE,
        members=(member,),
    )


def picture(*leases: Lease) -> Picture:
    """A pool of one host in which these leases are held and everything is right."""
    inventory = HOST.inventory()
    places = [member.place for each in leases for member in each.members]
    views: list[DeviceView] = []
    for device in inventory.devices:
        own = [
            (each.lease_id, share)
            for each in leases
            for share in each.members[0].place.devices
            if share.device_uuid == device.uuid
        ]
        whole = any(share.whole for _, share in own)
        state = DeviceState.WHOLE if whole else DeviceState.SLICED
        views.append(
            DeviceView(
                device=device,
                node_id=NODE,
                state=state if own else DeviceState.FREE,
                reasons=(),
                free_share_pct=100 - sum(share.share_pct for _, share in own),
                free_memory_mib=None,
                lease_ids=tuple(sorted(lease_id for lease_id, _ in own)),
                uid=None,
                strays=(),
            )
        )
    node = NodeView(
        node_id=NODE,
        state=NodeState.CONNECTED,
        boot_id="boot",
        agent_version="0.1.0",
        inventory=inventory,
        last_seen_unix_s=0.0,
        free_cpu_milli=HOST.cpu_milli - sum(place.cpu_milli for place in places),
        free_host_memory_mib=HOST.memory_mib - sum(place.host_memory_mib for place in places),
    )
    used = sum(view.state is not DeviceState.FREE for view in views)
    summary = PoolSummary(
        epoch=1,
        version="0.1.0",
        nodes=1,
        nodes_connected=1,
        devices=len(views),
        devices_free=len(views) - used,
        devices_used=used,
        devices_unavailable=0,
        granted_share_pct=sum(100 - view.free_share_pct for view in views),
        leases=len(leases),
        waiting=0,
        grain_pct=1,
        read_only_reason="",
    )
    runs = frozenset(run for each in leases for run in on_node(each)[NODE])
    return Picture(leases=leases, devices=views, nodes=[node], summary=summary, agents={NODE: runs})


FIRST = lease("lease-1", WHOLE, GPUS[0], 1)
SECOND = lease("lease-2", SLICE, GPUS[1], 2)
GOOD = picture(FIRST, SECOND)


def wrong(shown: Picture) -> str:
    return "\n".join(wrong_when_loaded(shown, [HOST], HELD, [TOO_BIG]))


def test_a_pool_that_is_as_it_should_be_passes_every_check() -> None:
    assert wrong(GOOD) == ""
    assert list(wrong_when_empty(picture(), [HOST])) == []
    assert list(wrong_tokens(GOOD.leases, {})) == []


OVERFULL = lease("lease-2", SLICE, GPUS[0], 2)
OTHER_HOST = replace(GOOD.nodes[0], node_id=NodeId("other"))
EXPIRED = replace(SECOND, state=LeaseState.EXPIRED)
FREE_BUT_HELD = replace(GOOD.devices[1], free_share_pct=100)
WAITING = replace(GOOD.summary, waiting=1)


@pytest.mark.parametrize(
    ("shown", "told"),
    [
        (picture(FIRST), "lease-2 was granted and is not listed"),
        (picture(FIRST, SECOND, lease("lease-3", SLICE, GPUS[1], 3)), "nobody holds it"),
        (replace(GOOD, leases=(FIRST, EXPIRED)), "lease-2 is expired"),
        (picture(FIRST, OVERFULL), "is over 100 %"),
        (picture(FIRST, OVERFULL), "is whole for one and shared by others"),
        (picture(FIRST, lease("lease-2", WHOLE, GPUS[1], 2)), "has [(100, True)], not"),
        (picture(FIRST, lease("lease-2", SLICE, DeviceUuid("GPU-x"), 2)), "not on its node"),
        (replace(GOOD, nodes=[OTHER_HOST]), "node other is"),
        (replace(GOOD, devices=[GOOD.devices[0], FREE_BUT_HELD]), "100 free, 30 granted"),
        (replace(GOOD, summary=WAITING), "the pool's waiting is 1, counted are 0"),
        (replace(GOOD, agents={NODE: frozenset()}), "node host does not run"),
        (replace(GOOD, agents=picture(FIRST, OVERFULL).agents), "which is not granted"),
        (replace(GOOD, unprepared=["node host: lease-2 is failed"]), "lease-2 is failed"),
    ],
)
def test_a_broken_promise_is_told(shown: Picture, told: str) -> None:
    assert told in wrong(shown)


def test_a_pod_that_was_refused_and_fits_is_told() -> None:
    fits = TracePod("fits", 1_000, 1_024, 1, 700, ())
    assert list(wrong_when_loaded(GOOD, [HOST], HELD, [fits])) == [
        "pod fits was refused and fits on node host"
    ]
    elsewhere = replace(fits, models=("v100m16",))
    assert list(wrong_when_loaded(GOOD, [HOST], HELD, [elsewhere])) == []


def test_a_token_that_does_not_grow_is_told() -> None:
    floors = {uuid: used[-1] for uuid, used in tokens_by_device(GOOD.leases).items()}
    assert floors == {GPUS[0]: 1, GPUS[1]: 2}
    assert len(list(wrong_tokens(GOOD.leases, floors))) == 2


def test_anything_left_in_an_empty_pool_is_told() -> None:
    told = "\n".join(wrong_when_empty(GOOD, [HOST]))
    assert "lease lease-1 is active and nobody holds it" in told
    assert f"{GPUS[0]} is whole in an empty pool" in told
    assert "free in an empty pool" in told


def life(lease_id: str, first: int, *changes: str) -> list[Event]:
    return [
        Event(sequence=number, unix_s=0.0, kind=f"lease.{change}", subject=lease_id, cause="why")
        for number, change in enumerate(changes, start=first)
    ]


def test_a_history_that_does_not_tell_each_whole_life_is_told() -> None:
    held = {LeaseId("lease-1")}
    whole = life("lease-1", 8, *LIFE)
    assert list(wrong_history(whole, 7, held)) == []
    assert list(wrong_history(whole[:-1], 7, held)) == [
        f"lease lease-1 went through {list(LIFE[:-1])}"
    ]
    assert "event 9 is missing" in next(wrong_history([whole[0], *whole[2:]], 7, held))
    refused = life("lease-2", 12, "granted")
    assert "lease-2 went through" in next(wrong_history([*whole, *refused], 7, held))
    blank = [replace(whole[0], cause=""), *whole[1:]]
    assert "has no cause" in next(wrong_history(blank, 7, held))
    alarm = replace(whole[-1], sequence=12, kind="alarm.booking_refused")
    assert "raised alarm" in next(wrong_history([*whole, alarm], 7, held))
