"""What can happen to the pool: events (past or noun phrases) and commands (imperative).

Every command carries a ``command`` id, which its answers name, and its caller.
Ids (lease, hold) are made by the engine and passed in, never made here.
"""

from dataclasses import dataclass

from gpupool.model.assignment import Hello, Report
from gpupool.model.caller import Caller, ProcessRef
from gpupool.model.hold import HoldKind, HoldScope
from gpupool.model.ids import CommandId, ConnectionId, HoldId, LeaseId, NodeId, RequestId
from gpupool.model.request import LeaseSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquire:
    """Ask for a lease.

    Exactly one of ``ttl_s`` and ``process`` is set. ``wait_s`` None: wait as long
    as somebody listens or renews; 0: refuse at once what does not fit now. The
    command is answered with each state of the lease until it is active, and to
    its end where ``follow`` is set.
    """

    command: CommandId
    caller: Caller
    lease_id: LeaseId
    request_id: RequestId
    spec: LeaseSpec
    ttl_s: float | None = None
    process: ProcessRef | None = None
    wait_s: float | None = None
    follow: bool = False
    unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Answer with the lease now and at each later change, until it ends."""

    command: CommandId
    caller: Caller
    lease_id: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded:
    """The call behind a command is gone: nobody listens to its answers any more."""

    command: CommandId


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAlive:
    """Renew TTL leases (and pending requests)."""

    command: CommandId
    caller: Caller
    lease_ids: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """End a lease; ending an ended one changes nothing and is no error."""

    command: CommandId
    caller: Caller
    lease_id: LeaseId
    reason: str = ""
    unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AddHold:
    """Add an operator's hold; a repeated ``request_id`` gives the hold it made."""

    command: CommandId
    caller: Caller
    hold_id: HoldId
    request_id: str
    kind: HoldKind
    scope: HoldScope
    target: str
    reason: str
    allowed_tenants: tuple[str, ...] = ()
    expire_unix_s: float | None = None
    unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveHold:
    """Remove an operator's hold."""

    command: CommandId
    caller: Caller
    hold_id: HoldId
    unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndUnclaimed:
    """End an assignment that a node runs and the pool does not know (operators only)."""

    command: CommandId
    caller: Caller
    node_id: NodeId
    lease_id: LeaseId
    unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConnected:
    """An agent opened its stream and said Hello. ``forward_key`` goes into Welcome."""

    connection: ConnectionId
    hello: Hello
    forward_key: str = ""
    unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReported:
    """A report came over an open stream; one of an older stream is dropped."""

    connection: ConnectionId
    node_id: NodeId
    report: Report
    unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpoke:
    """Measurements came over an open stream: the node is there, nothing else has changed."""

    connection: ConnectionId
    node_id: NodeId
    unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDisconnected:
    """A stream ended or fell silent for longer than the heartbeat timeout."""

    connection: ConnectionId
    node_id: NodeId
    reason: str = ""
    unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesRefused:
    """The store refuses writes (full, no quorum): changes are refused with ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesAccepted:
    """The store takes writes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """``Pool.next_deadline()`` has come. ``unix_s`` is the wall time, for records."""

    unix_s: float = 0.0


PoolEvent = (
    Acquire
    | Watch
    | CallEnded
    | KeepAlive
    | Release
    | AddHold
    | RemoveHold
    | EndUnclaimed
    | NodeConnected
    | NodeReported
    | NodeSpoke
    | NodeDisconnected
    | WritesRefused
    | WritesAccepted
    | TimePassed
)
