"""The share that the hardware really gives: whole multiprocessors, rounded down."""

from collections.abc import Mapping, Sequence

from gpupool.model.assignment import Assignment
from gpupool.model.ids import DeviceUuid
from gpupool.model.inventory import Device
from gpupool.model.lease import ShareGiven


def shares_given(
    assignment: Assignment, devices: Sequence[Device], sm_counts: Mapping[DeviceUuid, int]
) -> tuple[ShareGiven, ...]:
    """What each slice of an assignment gets; nothing for whole devices.

    ``sm_counts`` is what its probe saw. Where none has, it is what the percentage comes
    to; a device that does not tell its multiprocessors tells no share either.
    """
    totals = {device.uuid: device.sm_count for device in devices}
    found: list[ShareGiven] = []
    for share in assignment.place.devices:
        total = totals.get(share.device_uuid, 0)
        if share.whole or not total:
            continue
        count = sm_counts.get(share.device_uuid, 0) or total * (share.share_pct or 100) // 100
        found.append(
            ShareGiven(
                device_uuid=share.device_uuid,
                sm_count=count,
                share_milli_pct=count * 100_000 // total,
            )
        )
    return tuple(found)
