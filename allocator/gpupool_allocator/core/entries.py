"""The pool's own mutable entries behind the frozen words of ``gpupool.model``."""

from dataclasses import dataclass, field, replace

from gpupool.model.assignment import Assignment, AssignmentKey
from gpupool.model.caller import Caller, ProcessRef
from gpupool.model.ids import CommandId, ConnectionId, DeviceUuid, LeaseId, NodeId, RequestId
from gpupool.model.inventory import Device, NodeInventory, NodeRecord, StrayProcess
from gpupool.model.lease import (
    ENDED,
    NO_EXPLANATION,
    Explanation,
    Lease,
    LeaseState,
    Member,
    MemberState,
    Place,
    ShareGiven,
)
from gpupool.model.request import LeaseSpec
from gpupool_allocator.core.capacity import UnclaimedKey

RUNS_ON_NODE = (MemberState.PREPARING, MemberState.READY)
"""Member states that a node's desired state names."""


@dataclass(slots=True, kw_only=True)
class MemberEntry:
    """A member.

    ``seen``: its node has spoken of this token, so only the node can say that it
    ended. ``named_at``, ``dropped_at``: the revisions of the node's desired state that
    are the first to name this token, and to name it no longer. ``assignment`` is what
    its node must carry out, made once for each token. ``stored_token``: the token under
    which the store had it when this term began; 0: it is younger than this term.
    ``losses``: accounts in a row by which its node had lost it, though it was ready.
    """

    group: str
    index: int
    rank: int
    token: int
    place: Place
    stored_token: int = 0
    state: MemberState = MemberState.PREPARING
    environment: dict[str, str] | None = None
    given: tuple[ShareGiven, ...] = ()
    degraded: str = ""
    seen: bool = False
    losses: int = 0
    named_at: int | None = None
    dropped_at: int | None = None
    assignment: Assignment | None = None

    def begin_anew(self, token: int) -> None:
        """Its node has nothing of it, and is to prepare it under this token."""
        self.state = MemberState.PREPARING
        self.token = token
        self.forget_node()
        self.seen = False
        self.named_at = None

    def frozen(self, *, reachable: bool) -> Member:
        """The member as others see it; one on a cut-off node is unreachable."""
        state = self.state
        if not reachable and state in (MemberState.READY, MemberState.PREPARING):
            state = MemberState.UNREACHABLE
        return Member(
            group=self.group,
            index=self.index,
            rank=self.rank,
            state=state,
            token=self.token,
            place=self.place,
            environment=self.environment,
            given=self.given,
            degraded=self.degraded,
        )

    def forget_node(self) -> None:
        """What its node has said of it does not hold any more."""
        self.environment = None
        self.given = ()
        self.degraded = ""


@dataclass(slots=True, kw_only=True)
class LeaseEntry:
    """A lease.

    ``ending_as``: the final state that it is releasing towards. ``listeners``:
    calls that hear of its changes, True for those that follow it to its end.
    ``excluded``: nodes that failed to prepare a member of it. ``position_told``: the
    position in the queue that its listeners heard of last.
    """

    lease_id: LeaseId
    request_id: RequestId
    caller: Caller
    spec: LeaseSpec
    state: LeaseState
    ttl_s: float | None
    process: ProcessRef | None
    wait_s: float | None
    create_unix_s: float
    generation: int = 1
    members: list[MemberEntry] = field(default_factory=list[MemberEntry])
    grant_unix_s: float | None = None
    end_unix_s: float | None = None
    explanation: Explanation = NO_EXPLANATION
    ending_as: LeaseState | None = None
    listeners: dict[CommandId, bool] = field(default_factory=dict[CommandId, bool])
    excluded: set[NodeId] = field(default_factory=set[NodeId])
    prepare_failures: int = 0
    position_told: int = 0

    @property
    def ended(self) -> bool:
        """The lease will never change again."""
        return self.state in ENDED

    @property
    def running(self) -> bool:
        """Granted and not ending."""
        return self.state in (LeaseState.GRANTED, LeaseState.ACTIVE)

    def key(self, member: MemberEntry) -> AssignmentKey:
        """Names a member's assignment."""
        return AssignmentKey(lease_id=self.lease_id, rank=member.rank)

    def assignment(self, member: MemberEntry) -> Assignment:
        """What the member's node must carry out."""
        known = member.assignment
        if known is None or known.token != member.token:
            known = member.assignment = Assignment(
                key=self.key(member),
                group=member.group,
                token=member.token,
                place=member.place,
                uid=self.spec.uid,
                disconnect_s=self.spec.disconnect_s,
                world_size=len(self.members),
            )
        return known

    def frozen(self, *, reachable: frozenset[NodeId] | None = None, position: int = 0) -> Lease:
        """The lease as others see it; ``reachable`` None: all of its nodes are."""
        return Lease(
            lease_id=self.lease_id,
            request_id=self.request_id,
            caller=self.caller,
            spec=self.spec,
            state=self.state,
            generation=self.generation,
            members=tuple(
                member.frozen(reachable=reachable is None or member.place.node_id in reachable)
                for member in self.members
            ),
            ttl_s=self.ttl_s,
            process=self.process,
            wait_s=self.wait_s,
            create_unix_s=self.create_unix_s,
            grant_unix_s=self.grant_unix_s,
            end_unix_s=self.end_unix_s,
            ending_as=self.ending_as,
            position=position,
            explanation=self.explanation,
        )


@dataclass(slots=True, kw_only=True)
class DeviceEntry:
    """What the node said last about a device; ``device`` as it described it last.

    ``present``: in the node's latest inventory. ``confirmed``: reported in this
    term, so that ``clean`` is fresh. ``lost_unix_s``: when its node last spoke before
    it was missing or failed; 0: it is neither, or was so before this term.
    """

    device: Device
    present: bool = True
    confirmed: bool = False
    clean: bool = False
    failed: bool = False
    strays: tuple[StrayProcess, ...] = ()
    reason: str = ""
    lost_unix_s: float = 0.0

    @property
    def offered(self) -> bool:
        """May be granted, as far as the node's own words go."""
        return self.present and self.confirmed and self.clean and not self.failed


FaultName = tuple[str, DeviceUuid | None]
"""Code and device of a fault; no device: the node."""

FAULTS_STORED_MAX = 32
"""Open faults in a node's record, the newest: others are told once more after a restart."""


@dataclass(slots=True, kw_only=True)
class NodeEntry:
    """A node. ``connection`` None: not connected in this term, or cut off.

    ``welcomed``: it has heard of this term's epoch from this very process. ``behind``:
    a revision that it had not accepted when it spoke, and when that was noticed.
    ``unclaimed`` names what it runs and the pool does not know, and whether it was told
    that something of the book overlaps it, ``faults`` what it has
    found wrong. ``seen_before_unix_s``: its last word before the one that is being taken
    in.
    """

    node_id: NodeId
    boot_id: str
    agent_version: str
    agent_instance_id: str
    inventory: NodeInventory
    connection: ConnectionId | None = None
    welcomed: bool = False
    last_seen_unix_s: float = 0.0
    seen_before_unix_s: float = 0.0
    revision: int = 0
    accepted_revision: int = 0
    behind: tuple[int, float] | None = None
    devices: dict[DeviceUuid, DeviceEntry] = field(default_factory=dict[DeviceUuid, DeviceEntry])
    members: dict[AssignmentKey, MemberEntry] = field(
        default_factory=dict[AssignmentKey, MemberEntry]
    )
    held_leases: dict[LeaseId, None] = field(default_factory=dict[LeaseId, None])
    unclaimed: dict[AssignmentKey, bool] = field(default_factory=dict[AssignmentKey, bool])
    faults: dict[FaultName, None] = field(default_factory=dict[FaultName, None])

    def record(self) -> NodeRecord:
        """The node as it is stored, missing devices included: they are missed, not forgotten."""
        entries = self.devices.values()
        return NodeRecord(
            node_id=self.node_id,
            boot_id=self.boot_id,
            agent_version=self.agent_version,
            inventory=replace(self.inventory, devices=tuple(each.device for each in entries)),
            missing=tuple(each.device.uuid for each in entries if not each.present),
            failed=tuple(each.device.uuid for each in entries if each.failed),
            faults=tuple(self.faults)[-FAULTS_STORED_MAX:],
        )

    def unclaimed_key(self, key: AssignmentKey) -> UnclaimedKey:
        """Names what the node runs under ``key`` and the pool does not know."""
        return UnclaimedKey(node_id=self.node_id, lease_id=key.lease_id, rank=key.rank)

    def heard(self, unix_s: float) -> None:
        """The node has spoken."""
        self.seen_before_unix_s = self.last_seen_unix_s
        self.last_seen_unix_s = unix_s
