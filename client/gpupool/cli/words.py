"""Short words for what the pool shows: ages, amounts, places."""

import time

from gpupool.model.lease import Cause, DeviceShare, Lease, Member
from gpupool.model.request import GpuSlice, Group, WholeGpus
from gpupool.model.views import UnclaimedAssignment

_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def ago(unix_s: float) -> str:
    """Time since a moment, in its largest unit; empty for never."""
    return duration(max(0.0, time.time() - unix_s)) if unix_s else ""


def duration(seconds: float) -> str:
    """A time in its largest unit."""
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return "0s"


def utc(unix_s: float) -> str:
    """A moment for people."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(unix_s))


def asked_gpus(lease: Lease) -> str:
    """What a lease asked for, as "8", "0.1" or "2 x 4"."""
    return " + ".join(_asked(group) for group in lease.spec.groups)


def nodes_of(lease: Lease) -> list[str]:
    """Nodes of a lease by the rank of their first member."""
    return list(dict.fromkeys(member.place.node_id for member in lease.members))


def few(names: list[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    shown = ",".join(names[:most])
    return f"{shown},+{len(names) - most}" if len(names) > most else shown


def devices_of(member: Member | UnclaimedAssignment) -> str:
    """Devices of a member with their shares."""
    return " ".join(_share(share) for share in member.place.devices)


def state_of(lease: Lease) -> str:
    """A lease's state, with "degraded" for an active one that does not run as it should."""
    return "degraded" if lease.degraded else lease.state


def given_of(member: Member) -> str:
    """What the slices of a member really get, as "13 SMs (9.848 %)"."""
    return " ".join(
        f"{share.sm_count} SMs ({share.share_milli_pct / 1000:.3f} %)" for share in member.given
    )


def cause_line(cause: Cause) -> str:
    """A counted cause, as "3 devices: gpu_busy (granted to others)"."""
    plural = "" if cause.count == 1 else "s"
    line = f"{cause.count} {cause.unit}{plural}: {cause.code}"
    return f"{line} ({cause.message})" if cause.message else line


def _asked(group: Group) -> str:
    match group.accelerator:
        case WholeGpus(count=count):
            each = str(count)
        case GpuSlice(share_pct=0, memory_mib=mib):
            each = f"{mib} MiB"
        case GpuSlice(share_pct=share):
            each = f"{share / 100:g}"
        case None:
            each = "0"
    return each if group.replicas == 1 else f"{group.replicas} x {each}"


def _share(share: DeviceShare) -> str:
    return share.device_uuid if share.whole else f"{share.device_uuid}:{share.share_pct}%"
