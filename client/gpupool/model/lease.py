"""Leases, members and their places."""

from dataclasses import dataclass, field
from enum import StrEnum

from gpupool.model.caller import Caller, ProcessRef
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId, RequestId
from gpupool.model.request import LeaseSpec


class LeaseState(StrEnum):
    """Life of a lease; see ``ENDED`` for the final ones."""

    PENDING = "pending"
    GRANTED = "granted"
    ACTIVE = "active"
    RELEASING = "releasing"
    RELEASED = "released"
    EXPIRED = "expired"
    PREEMPTED = "preempted"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset(
    {
        LeaseState.RELEASED,
        LeaseState.EXPIRED,
        LeaseState.PREEMPTED,
        LeaseState.FAILED,
        LeaseState.CANCELLED,
    }
)
"""States that a lease never leaves."""


class MemberState(StrEnum):
    """Life of one member."""

    PREPARING = "preparing"
    READY = "ready"
    UNREACHABLE = "unreachable"
    ENDING = "ending"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """What a member has of one device.

    ``memory_mib`` is 0 where the device's memory is unknown; ``whole`` means that
    nobody else may be on it, and then ``share_pct`` is 100.
    """

    device_uuid: DeviceUuid
    share_pct: int
    memory_mib: int
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGiven:
    """What a slice of a device really gets: whole multiprocessors, rounded down.

    ``share_milli_pct`` is their part of the device in thousandths of a percent.
    """

    device_uuid: DeviceUuid
    sm_count: int
    share_milli_pct: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a member runs; ``devices`` in the order that the member sees them."""

    node_id: NodeId
    devices: tuple[DeviceShare, ...] = ()
    cpu_milli: int = 0
    host_memory_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One replica of one group, the unit of change.

    ``token`` is the fencing number of ``place`` and grows with each assignment.
    ``environment`` is None until the node has reported it since the allocator's
    start; ``given`` is what its slices really get, ``degraded`` says why they do not
    work as they should. None of the three is ever stored.
    """

    group: str
    index: int
    rank: int
    state: MemberState
    token: int
    place: Place
    environment: dict[str, str] | None = None
    given: tuple[ShareGiven, ...] = ()
    degraded: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One counted cause of a wait or refusal; ``unit`` is "node" or "device"."""

    code: str
    count: int
    unit: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a request waits, was refused or ended; causes most common first."""

    summary: str
    causes: tuple[Cause, ...] = ()
    nearest_change: str = ""


NO_EXPLANATION = Explanation(summary="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A granted or waiting request, as seen at one moment.

    Times ending in ``_unix_s`` are wall time, for people and records only.
    ``end_unix_s`` is when it ended, or before that when its max_duration ends it.
    ``ttl_s`` is None for a process-bound lease, ``process`` for a TTL lease.
    ``expire_unix_s`` is when a TTL lease expires unless it is renewed, where that was asked.
    ``ending_as`` is the final state that a releasing lease is on its way to.
    """

    lease_id: LeaseId
    request_id: RequestId
    caller: Caller
    spec: LeaseSpec
    state: LeaseState
    generation: int = 1
    members: tuple[Member, ...] = ()
    ttl_s: float | None = None
    process: ProcessRef | None = None
    wait_s: float | None = None
    create_unix_s: float = 0.0
    grant_unix_s: float | None = None
    end_unix_s: float | None = None
    expire_unix_s: float | None = None
    ending_as: LeaseState | None = None
    position: int = 0
    explanation: Explanation = field(default=NO_EXPLANATION)

    @property
    def degraded(self) -> str:
        """Why an active lease does not run as it should; empty: it does.

        No state of its own on the wire: a release that does not know it reads "active".
        """
        if self.state is not LeaseState.ACTIVE:
            return ""
        return next((each.degraded for each in self.members if each.degraded), "")
