"""The exact check: whether one node takes one member, and on which devices.

Everything is decided per device; a node's total says nothing about a GPU.
"""

from dataclasses import dataclass

from gpupool.model.assignment import AssignmentKey
from gpupool.model.ids import HoldId, LeaseId
from gpupool.model.lease import DeviceShare, Place
from gpupool.model.request import GpuSlice, WholeGpus
from gpupool_allocator.core.capacity import Booking, DeviceCapacity, NodeCapacity
from gpupool_allocator.core.placement.need import Need, slice_memory_mib

Rank = tuple[int, int]
"""How tight a fit is, smaller is better: (0, share or GPUs that were free) on what is
in use or exactly right, (1, free GPUs of the node) where a free GPU is cut up."""

TRIAL_LEASE = LeaseId("")
"""Names the bookings of a plan that is still being made."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A place that a member can have, and how tight it is."""

    place: Place
    rank: Rank


@dataclass(frozen=True, slots=True)
class UnitFit:
    """Places on one node for members that go there together, by need."""

    places: tuple[tuple[Need, Place], ...]
    rank: Rank


Parts = tuple[tuple[Need, int], ...]
"""Members that go to one node together: so many of each need."""


def fit(node: NodeCapacity, need: Need, passes: frozenset[HoldId]) -> Fit | None:
    """The tightest place for one member on ``node``; None: there is none.

    Labels and holds of the node are not looked at.
    """
    group = need.group
    if group.cpu_milli > node.free_cpu_milli or group.host_memory_mib > node.free_host_memory_mib:
        return None
    match group.accelerator:
        case WholeGpus() as wanted:
            chosen = _whole(node, need, wanted, passes)
        case GpuSlice() as wanted:
            chosen = _slice(node, need, wanted, passes)
        case None:
            chosen = (), (0, 0)
    if chosen is None:
        return None
    devices, rank = chosen
    place = Place(
        node_id=node.node_id,
        devices=devices,
        cpu_milli=group.cpu_milli,
        host_memory_mib=group.host_memory_mib,
    )
    return Fit(place, rank)


def fit_unit(node: NodeCapacity, parts: Parts, passes: frozenset[HoldId]) -> UnitFit | None:
    """Places for all members of ``parts`` on one node, or None."""
    if len(parts) == 1 and parts[0][1] == 1:
        need = parts[0][0]
        only = fit(node, need, passes)
        return None if only is None else UnitFit(((need, only.place),), only.rank)
    trial = node.copy()
    places: list[tuple[Need, Place]] = []
    rank: Rank | None = None
    for need, count in parts:
        for _ in range(count):
            found = fit(trial, need, passes)
            if found is None:
                return None
            take(trial, need, found.place)
            places.append((need, found.place))
            rank = rank or found.rank
    return UnitFit(tuple(places), rank or (0, 0))


def take(trial: NodeCapacity, need: Need, place: Place) -> None:
    """Books a place on a copy of a node."""
    rank = sum(key.lease_id == TRIAL_LEASE for key in trial.bookings)
    key = AssignmentKey(lease_id=TRIAL_LEASE, rank=rank)
    trial.take(key, Booking(place, need.uid, need.shared_trust))


def _whole(
    node: NodeCapacity, need: Need, wanted: WholeGpus, passes: frozenset[HoldId]
) -> tuple[tuple[DeviceShare, ...], Rank] | None:
    accepted, least_mib = need.accepted, wanted.min_memory_mib
    free: dict[int, list[DeviceCapacity]] = {}
    found = 0
    for device in node.devices.values():
        if device.granted or not device.usable(passes):
            continue
        kind = device.kind.number
        if kind not in accepted or (least_mib and (device.device.memory_mib or 0) < least_mib):
            continue
        free.setdefault(kind, []).append(device)
        found += 1
    if found < wanted.count:
        return None
    enough = [devices for devices in free.values() if len(devices) >= wanted.count]
    if enough:
        chosen = min(enough, key=lambda devices: (len(devices), devices[0].kind.number))
        rank = (0, len(chosen))
    else:  # no kind has enough: as few kinds as possible
        order = sorted(free.values(), key=lambda devices: (-len(devices), devices[0].kind.number))
        chosen = [device for devices in order for device in devices]
        rank = (2, 0)
    shares = tuple(
        DeviceShare(
            device_uuid=each.device.uuid,
            share_pct=100,
            memory_mib=each.device.memory_mib or 0,
            whole=True,
        )
        for each in chosen[: wanted.count]
    )
    return shares, rank


def _slice(
    node: NodeCapacity, need: Need, wanted: GpuSlice, passes: frozenset[HoldId]
) -> tuple[tuple[DeviceShare, ...], Rank] | None:
    best: DeviceCapacity | None = None
    best_key = (0, 0, 0)
    fresh: dict[int, int] = {}
    for device in node.devices.values():
        kind = device.kind.number
        if (
            kind not in need.accepted
            or wanted.share_pct > device.free_share_pct
            or not device.usable(passes)
            or not device.admits(need.uid, need.shared_trust)
        ):
            continue
        free_mib = device.free_memory_mib or 0
        if slice_memory_mib(device.device, wanted) > free_mib:
            continue
        if not device.granted:
            fresh[kind] = fresh.get(kind, 0) + 1
        key = (0 if device.granted else 1, device.free_share_pct, free_mib)
        if best is None or key < best_key:
            best, best_key = device, key
    if best is None:
        return None
    rank = (0, best.free_share_pct) if best.granted else (1, fresh[best.kind.number])
    share = DeviceShare(
        device_uuid=best.device.uuid,
        share_pct=wanted.share_pct,
        memory_mib=slice_memory_mib(best.device, wanted),
        whole=False,
    )
    return (share,), rank
