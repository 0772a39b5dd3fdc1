"""What the door takes for sure and refuses for sure, against real records."""

import pytest

from gpupool.model.caller import Caller
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId, RequestId
from gpupool.model.lease import DeviceShare, Lease, LeaseState, Member, MemberState, Place
from gpupool.model.limits import NAME_CHARS_MAX
from gpupool.model.request import Group, LeaseSpec, WholeGpus
from gpupool.wire.errors import BadField
from gpupool_allocator.core.granting import STORE_ASKED_FROM
from gpupool_allocator.rpc.sizes import (
    DEVICE_BYTES_MIN,
    MEMBER_BYTES_MIN,
    SPEC_BYTES_MAX,
    check_lease_size,
)
from gpupool_allocator.storage import records
from gpupool_allocator.storage.store import COMMIT_BYTES_MAX


def record_bytes(members: int, *, devices: int = 0, name: str = "n", group: str = "m") -> int:
    """Size of the record of a lease with so many members, all with such names."""
    short = len(name) == 1
    share = DeviceShare(
        device_uuid=DeviceUuid(f"GPU-{name}"[:NAME_CHARS_MAX]),
        share_pct=100 if short else 99,
        memory_mib=0 if short else 2**24,
        whole=short,
    )
    place = Place(
        node_id=NodeId(name),
        devices=(share,) * devices,
        cpu_milli=0 if short else 2**30,
        host_memory_mib=0 if short else 2**30,
    )
    member = Member(
        group=group,
        index=0 if short else 4095,
        rank=0 if short else 16_383,
        state=MemberState.READY if short else MemberState.PREPARING,
        token=1 if short else 2**62,
        place=place,
    )
    lease = Lease(
        lease_id=LeaseId("l"),
        request_id=RequestId("r"),
        caller=Caller(),
        spec=LeaseSpec(groups=(Group(),)),
        state=LeaseState.GRANTED,
        members=(member,) * members,
    )
    return len(records.encode(lease).value or b"")


def test_no_stored_member_is_smaller_than_what_the_door_counts() -> None:
    assert record_bytes(3) - record_bytes(2) >= MEMBER_BYTES_MIN
    ten, nine = record_bytes(1, devices=10), record_bytes(1, devices=9)
    assert ten - nine >= DEVICE_BYTES_MIN


def test_members_that_nobody_measures_fit_beside_the_largest_request() -> None:
    name, group = "n" * NAME_CHARS_MAX, "g" * 63
    member = record_bytes(3, name=name, group=group) - record_bytes(2, name=name, group=group)
    most = record_bytes(1, devices=10, name=name) - record_bytes(1, devices=9, name=name)
    unmeasured = (STORE_ASKED_FROM - 1) * max(member, most)
    assert SPEC_BYTES_MAX + unmeasured + records.GROWTH_BYTES <= COMMIT_BYTES_MAX


def test_what_no_record_holds_is_refused_and_what_one_might_hold_is_not() -> None:
    def spec(replicas: int) -> LeaseSpec:
        return LeaseSpec(groups=(Group(replicas=replicas, accelerator=WholeGpus(count=1)),) * 4)

    check_lease_size(spec(2500), 100)
    with pytest.raises(BadField, match="bytes as a record"):
        check_lease_size(spec(4096), 100, "spec")
