"""What the engine shall do: commit first (Put, Delete, Record), then tell (the rest).

The engine commits every Put, Delete and Record of a batch before it performs any
other effect of it.
"""

from dataclasses import dataclass

from gpupool.model.assignment import AssignmentReport, DesiredState, Welcome
from gpupool.model.errors import Refused
from gpupool.model.event import Event
from gpupool.model.hold import Hold
from gpupool.model.ids import CommandId, ConnectionId, HoldId, LeaseId, NodeId
from gpupool.model.inventory import NodeRecord
from gpupool.model.lease import Lease
from gpupool_allocator.core.capacity import UnclaimedKey


@dataclass(frozen=True, slots=True, kw_only=True)
class UnclaimedRecord:
    """An assignment found on a node that the store does not know."""

    node_id: NodeId
    report: AssignmentReport

    @property
    def key(self) -> UnclaimedKey:
        """Names it, also in the books."""
        named = self.report.key
        return UnclaimedKey(node_id=self.node_id, lease_id=named.lease_id, rank=named.rank)


Stored = Lease | Hold | NodeRecord | UnclaimedRecord
"""What the store keeps. Its kinds and keys are in storage/records.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Store this, replacing an older version."""

    record: Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Forget this. Exactly the record's identity counts, not its content."""

    record: Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Append to the history."""

    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAlive:
    """Answer to KeepAlive; ``ttl_s`` is the shortest TTL of the renewed leases."""

    gone: tuple[LeaseId, ...]
    ttl_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Answer of a command that has nothing else to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Tell a command's caller; ``final``: nothing more will come for it."""

    command: CommandId
    result: Lease | Hold | KeptAlive | Done | Refused
    final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SendWelcome:
    """Answer an agent's Hello."""

    connection: ConnectionId
    welcome: Welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDesired:
    """Tell a node all that it shall run."""

    connection: ConnectionId
    node_id: NodeId
    desired: DesiredState


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseConnection:
    """End an agent's stream with this refusal."""

    connection: ConnectionId
    refused: Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class RaiseEpoch:
    """A node has heard of a later term: raise the stored epoch above it, then restart."""

    above: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Something that must never happen did; ``code`` is a stable word for metrics."""

    code: str
    message: str


Effect = (
    Put
    | Delete
    | Record
    | Answer
    | SendWelcome
    | SendDesired
    | CloseConnection
    | RaiseEpoch
    | Alarm
)

__all__ = [
    "Alarm",
    "Answer",
    "CloseConnection",
    "Delete",
    "Done",
    "Effect",
    "HoldId",
    "KeptAlive",
    "Put",
    "RaiseEpoch",
    "Record",
    "SendDesired",
    "SendWelcome",
    "Stored",
    "UnclaimedRecord",
]
