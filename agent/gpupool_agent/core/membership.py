"""Whose a process on a device is, and whether it keeps to what its lease was given.

A process belongs to a lease that it was adopted into, that is named in its environment
or by its cgroup, or whose holder or adopted process is among its ancestors. All else on
a device is a stray, and so is a member of a slice that goes past the slice's MPS server
or holds more memory than it was given.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpupool.model.assignment import AssignmentState
from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool.model.inventory import StrayCause, StrayProcess
from gpupool.model.lease import DeviceShare
from gpupool_agent.core.adoptions import Adoption
from gpupool_agent.core.assignments import Kept
from gpupool_agent.core.readings import DeviceProcess
from gpupool_agent.core.texts import sendable_name

CONTEXT_MIB_MAX = 1024
"""More than what the driver keeps for itself in a client, beside what the slice was given."""


@dataclass(frozen=True, slots=True)
class Bonds:
    """What binds processes to leases beside their environment: pids of living processes."""

    holders: Mapping[LeaseId, int] = field(default_factory=dict[LeaseId, int])
    adopted: Mapping[int, Adoption] = field(default_factory=dict[int, Adoption])

    def adoption(self, process: DeviceProcess) -> Adoption | None:
        """How exactly this process was adopted; None: it was not."""
        found = self.adopted.get(process.pid)
        return found if found and found.start_ticks == process.start_ticks else None

    def leases(self, process: DeviceProcess) -> Iterator[LeaseId]:
        """Leases that a process belongs to by its word or its descent."""
        adoption = self.adoption(process)
        if adoption is not None:
            yield adoption.lease_id
            return
        if process.lease_id:
            yield LeaseId(process.lease_id)
        line = (process.pid, *process.ancestors)
        for lease_id, holder in self.holders.items():
            if holder in line:
                yield lease_id
        for pid in line[1:] if self.adopted else ():
            if pid in self.adopted:
                yield self.adopted[pid].lease_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Stray:
    """A process that should not be on a device.

    ``lease_id``: as in StrayProcess. ``held_mib`` of ``given_mib``: for OVER_MEMORY. Not
    ``certain``: nobody can tell yet whose it is, so it is named and left alone.
    """

    process: DeviceProcess
    cause: StrayCause
    lease_id: str = ""
    held_mib: int = 0
    given_mib: int = 0
    certain: bool = True

    def reported(self) -> StrayProcess:
        """As the allocator is told of it."""
        return stray_process(self.process, self.lease_id, self.cause)

    def __str__(self) -> str:
        lease = f"its lease {self.lease_id}"
        match self.cause:
            case StrayCause.OUTLIVED:
                why = f"although {lease} has ended"
            case StrayCause.ELSEWHERE:
                why = f"although {lease} has other GPUs"
            case StrayCause.BESIDE_MPS:
                why = f"beside the MPS server of {lease}"
            case StrayCause.OVER_MEMORY:
                why = f"and {lease} holds {self.held_mib} MiB, but was given {self.given_mib}"
            case StrayCause.NO_LEASE if self.lease_id:
                why = f"and names lease {self.lease_id}, which has nothing here"
            case StrayCause.NO_LEASE:
                why = "and belongs to no lease"
        return f"{describe(self.process)} is on it {why}"


def owner(
    process: DeviceProcess, by_lease: Mapping[LeaseId, Kept], bonds: Bonds
) -> tuple[Kept | None, bool]:
    """The assignment of the device that a process belongs to, and whether that is sure.

    ``by_lease``: what may have something on the device, those with a holder first. Where
    its environment may not be read, an assignment of the same user has to do. None: a
    stray.
    """
    for lease_id in bonds.leases(process) if by_lease else ():
        if lease_id in by_lease:
            return by_lease[lease_id], True
    if process.lease_id is None and bonds.adoption(process) is None:
        for kept in by_lease.values():
            if kept.assignment.uid == process.uid:
                return kept, False
    return None, False


def outside(
    process: DeviceProcess,
    bonds: Bonds,
    *,
    here: Sequence[Kept],
    everywhere: Collection[Kept],
    uuid: DeviceUuid,
    has_ended: Callable[[LeaseId], bool],
) -> Stray:
    """Why a process that has no owner on a device is a stray.

    ``here``: what may have something on the device, ``everywhere``: all of the node.
    ``has_ended``: whether a lease is known to have ended on the node.
    """
    for lease_id in bonds.leases(process):
        mine = [kept for kept in everywhere if kept.assignment.key.lease_id == lease_id]
        active = [kept for kept in mine if kept.active]
        if any(share_of(kept, uuid) for kept in active):
            # Its place here is not prepared, or anew: it is early, or from before.
            return Stray(
                process=process, cause=StrayCause.NO_LEASE, lease_id=lease_id, certain=False
            )
        if active:
            return Stray(process=process, cause=StrayCause.ELSEWHERE, lease_id=lease_id)
        if has_ended(lease_id) or any(
            kept.state in (AssignmentState.ENDING, AssignmentState.ENDED) for kept in mine
        ):
            return Stray(process=process, cause=StrayCause.OUTLIVED, lease_id=lease_id)
    return Stray(
        process=process,
        cause=StrayCause.NO_LEASE,
        lease_id=process.lease_id or "",
        # Whoever cannot be asked might be of a lease that is here.
        certain=process.lease_id is not None or not here,
    )


def past_limits(
    of_lease: Sequence[Kept], uuid: DeviceUuid, members: Sequence[DeviceProcess]
) -> list[Stray]:
    """Processes of a lease on a device that are outside the limits of its slices there.

    ``of_lease``: all that the lease has on the device; what is whose of it cannot be told
    apart. ``members`` are those that are its for sure. Where they hold too much memory
    the youngest are outside, as many as it takes for the rest to keep to it.
    """
    shares = [share for kept in of_lease if (share := share_of(kept, uuid)) is not None]
    if any(share.whole for share in shares):
        return []
    lease_id = of_lease[0].assignment.key.lease_id
    given_mib = sum(share.memory_mib for share in shares)
    unlimited = not all(share.memory_mib for share in shares)
    found = [
        Stray(process=each, cause=StrayCause.BESIDE_MPS, lease_id=lease_id)
        for each in members
        if each.through_mps is False
    ]
    inside = [each for each in members if each.through_mps is not False and each.memory_mib]
    held_mib = sum(each.memory_mib for each in inside)
    total_mib, allowed_mib = held_mib, given_mib + CONTEXT_MIB_MAX * len(inside)
    for each in sorted(inside, key=lambda one: (one.start_ticks, one.pid), reverse=True):
        if unlimited or total_mib <= allowed_mib:
            break
        found.append(
            Stray(
                process=each,
                cause=StrayCause.OVER_MEMORY,
                lease_id=lease_id,
                held_mib=held_mib,
                given_mib=given_mib,
            )
        )
        total_mib -= each.memory_mib
        allowed_mib -= CONTEXT_MIB_MAX
    return found


def share_of(kept: Kept, uuid: DeviceUuid) -> DeviceShare | None:
    """What an assignment has of a device; None: nothing."""
    return next(
        (share for share in kept.assignment.place.devices if share.device_uuid == uuid), None
    )


def stray_process(process: DeviceProcess, lease_id: str, cause: str = "") -> StrayProcess:
    """A process as it is reported."""
    return StrayProcess(
        pid=process.pid,
        uid=process.uid,
        user=sendable_name(process.user),
        command=sendable_name(process.command),
        memory_mib=process.memory_mib,
        cause=cause,
        lease_id=sendable_name(lease_id),
    )


def describe(process: DeviceProcess) -> str:
    """A process in words."""
    who = process.user or f"uid {process.uid}"
    held = f", {process.memory_mib} MiB" if process.memory_mib else ""
    return f"process {process.pid} of {who} ({process.command or 'unknown command'}{held})"
