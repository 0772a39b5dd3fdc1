"""A small world around the core: a store that is a dictionary, nodes that obey at once.

Nodes are played by ``PlayedNode``: it carries out what the pool's effects tell it,
when the test says so, and reports like an agent. Time is a number that tests move.
"""

from collections.abc import Iterable
from dataclasses import replace

from tests.played_node import PlayedNode

from gpupool.model.assignment import (
    HolderEnd,
    Report,
)
from gpupool.model.caller import Caller, ProcessRef, Role
from gpupool.model.errors import Refused
from gpupool.model.event import Event
from gpupool.model.hold import HoldKind, HoldScope
from gpupool.model.ids import (
    CommandId,
    ConnectionId,
    DeviceUuid,
    HoldId,
    LeaseId,
    NodeId,
    RequestId,
)
from gpupool.model.inventory import Device, NodeInventory
from gpupool.model.lease import Lease
from gpupool.model.request import GpuSlice, Group, LeaseSpec, WholeGpus
from gpupool_allocator.core.effects import (
    Alarm,
    Answer,
    CloseConnection,
    Delete,
    Effect,
    Put,
    Record,
    SendDesired,
    SendWelcome,
    Stored,
    UnclaimedRecord,
)
from gpupool_allocator.core.events import (
    Acquire,
    AddHold,
    CallEnded,
    KeepAlive,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    PoolEvent,
    Release,
    RemoveHold,
    TimePassed,
)
from gpupool_allocator.core.pool import Pool
from gpupool_allocator.core.settings import PoolSettings

MODEL = "NVIDIA H100 80GB HBM3"
MEMORY_MIB = 80_000


def inventory(
    node_id: str,
    gpus: int = 8,
    *,
    memory_mib: int | None = MEMORY_MIB,
    model: str = MODEL,
    cpu_milli: int = 96_000,
    host_memory_mib: int = 500_000,
    labels: dict[str, str] | None = None,
) -> NodeInventory:
    """A host with some GPUs, whose UUIDs are made of its name."""
    return NodeInventory(
        devices=tuple(
            Device(
                uuid=DeviceUuid(f"GPU-{node_id}-{index}"),
                model=model,
                memory_mib=memory_mib,
                index=index,
                pci_address=f"0000:{index:02x}:00.0",
            )
            for index in range(gpus)
        ),
        cpu_milli=cpu_milli,
        host_memory_mib=host_memory_mib,
        labels=labels or {},
    )


def whole(count: int = 1, *, replicas: int = 1, **more: object) -> LeaseSpec:
    """A request for whole GPUs."""
    return spec(WholeGpus(count=count), replicas=replicas, **more)


def part(share_pct: int = 0, memory_mib: int = 0, **more: object) -> LeaseSpec:
    """A request for a slice."""
    return spec(GpuSlice(share_pct=share_pct, memory_mib=memory_mib), **more)


def spec(
    accelerator: WholeGpus | GpuSlice | None, *, replicas: int = 1, **more: object
) -> LeaseSpec:
    """A request of one group; ``more`` goes to the group where it has such a field."""
    of_group = {name: more.pop(name) for name in list(more) if name in Group.__slots__}
    group = replace(Group(replicas=replicas, accelerator=accelerator), **of_group)  # type: ignore[arg-type]
    return replace(LeaseSpec(groups=(group,)), **more)  # type: ignore[arg-type]


class World:
    """A pool, its store, its nodes and its callers."""

    def __init__(self, settings: PoolSettings | None = None) -> None:
        self.settings = settings or PoolSettings()
        self.now = 1000.0
        self.unix_s = 1.7e9
        self.epoch = 1
        self.store: dict[tuple[str, str], Stored] = {}
        self.history: list[Event] = []
        self.answers: dict[CommandId, list[Lease | object]] = {}
        self.finished: set[CommandId] = set()
        self.nodes: dict[NodeId, PlayedNode] = {}
        self.alarms: list[Alarm] = []
        self.closed: dict[ConnectionId, Refused] = {}
        self._ids = 0
        self.pool = Pool(self.settings, epoch=self.epoch)
        self._perform(self.pool.start(self.now, self.unix_s))

    # -- the pool ----------------------------------------------------------------

    def handle(self, event: PoolEvent) -> list[Effect]:
        """Gives the pool an event, checks every promise, performs the effects."""
        effects = self.pool.handle(event, self.now)
        self.pool.check()
        self._perform(effects)
        return effects

    def restart(self, *, above: int = 0) -> None:
        """The allocator crashes and comes back from its store."""
        self.epoch = max(self.epoch, above) + 1
        self.pool = Pool(self.settings, epoch=self.epoch, last_sequence=len(self.history))
        for record in self.store.values():
            self.pool.restore(record)
        for node in self.nodes.values():
            node.connection, node.desired = None, None
        self._perform(self.pool.start(self.now, self.unix_s))
        self.pool.check()

    def advance(self, seconds: float) -> None:
        """Lets time pass, stopping at each deadline."""
        until = self.now + seconds
        while (deadline := self.pool.next_deadline()) is not None and deadline <= until:
            self._move_to(max(deadline, self.now))
            self.handle(TimePassed(unix_s=self.unix_s))
        self._move_to(until)

    def _move_to(self, now: float) -> None:
        self.unix_s += now - self.now
        self.now = now

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Put(record=record):
                    self.store[identity(record)] = stored(record)
                case Delete(record=record):
                    self.store.pop(identity(record), None)
                case Record(event=event):
                    assert event.sequence == len(self.history) + 1
                    self.history.append(event)
                case Answer(command=command, result=result, final=final):
                    assert command not in self.finished, "an answer after the final one"
                    self.answers.setdefault(command, []).append(result)
                    if final:
                        self.finished.add(command)
                case SendDesired(node_id=node_id, connection=connection, desired=desired):
                    node = self.nodes[node_id]
                    if node.connection == connection:
                        node.desired = desired
                case SendWelcome():
                    pass
                case CloseConnection(connection=connection, refused=refused):
                    self.closed[connection] = refused
                    for node in self.nodes.values():
                        if node.connection == connection:
                            node.connection = None
                case Alarm():
                    self.alarms.append(effect)
                case _:
                    raise AssertionError(f"unexpected effect {effect}")

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    # -- nodes -------------------------------------------------------------------

    def add_node(self, node_id: str, gpus: int = 8, **more: object) -> PlayedNode:
        """A new host joins."""
        node = PlayedNode(NodeId(node_id), inventory(node_id, gpus, **more))  # type: ignore[arg-type]
        self.nodes[node.node_id] = node
        self.connect(node)
        return node

    def connect(self, node: PlayedNode) -> ConnectionId:
        connection = ConnectionId(self.next_id())
        node.connection, node.desired = connection, None
        self.handle(NodeConnected(connection=connection, hello=node.hello(), unix_s=self.unix_s))
        return connection

    def disconnect(self, node: PlayedNode) -> None:
        if node.connection is not None:
            gone, node.connection = node.connection, None
            self.handle(NodeDisconnected(connection=gone, node_id=node.node_id, unix_s=self.unix_s))

    def report(self, node: PlayedNode, report: Report) -> None:
        assert node.connection is not None
        self.handle(
            NodeReported(
                connection=node.connection,
                node_id=node.node_id,
                report=report,
                unix_s=self.unix_s,
            )
        )

    def account(self, node: PlayedNode) -> list[str]:
        """A node gives its full account; the kinds of events that this makes."""
        seen = len(self.history)
        self.report(node, node.account(self.epoch))
        return [event.kind for event in self.history[seen:]]

    def report_devices(self, node: PlayedNode) -> None:
        self.report(node, Report(devices=node.device_reports()))

    def settle(self) -> None:
        """Every connected node carries out what it is told, until nothing is left."""
        for _ in range(100):
            busy = False
            for node in self.nodes.values():
                if node.connection is not None and (report := node.obey()) is not None:
                    busy = True
                    self.report(node, report)
            if not busy:
                return
        raise AssertionError("nodes and pool never settle")

    # -- callers -----------------------------------------------------------------

    def acquire(
        self,
        wanted: LeaseSpec,
        *,
        request_id: str = "",
        wait_s: float | None = 0.0,
        ttl_s: float | None = 60.0,
        process: ProcessRef | None = None,
        follow: bool = False,
    ) -> CommandId:
        command = CommandId(self.next_id())
        self.handle(
            Acquire(
                command=command,
                caller=Caller(tenant=wanted.tenant, uid=wanted.uid),
                lease_id=LeaseId(f"l-{command}"),
                request_id=RequestId(request_id or f"r-{command}"),
                spec=wanted,
                ttl_s=None if process is not None else ttl_s,
                process=process,
                wait_s=wait_s,
                follow=follow,
                unix_s=self.unix_s,
            )
        )
        return command

    def lease_of(self, command: CommandId) -> Lease:
        """The lease as the call saw it last."""
        last = self.answers[command][-1]
        assert isinstance(last, Lease), last
        return last

    def refused(self, command: CommandId) -> Refused:
        last = self.answers[command][-1]
        assert isinstance(last, Refused), last
        return last

    def granted(self, wanted: LeaseSpec, **more: object) -> Lease:
        """A lease that is active."""
        command = self.acquire(wanted, **more)  # type: ignore[arg-type]
        self.settle()
        return self.lease_of(command)

    def release(self, lease: Lease, caller: Caller | None = None) -> CommandId:
        """End a lease, as its holder does or somebody else."""
        command = CommandId(self.next_id())
        self.handle(
            Release(
                command=command,
                caller=caller or lease.caller,
                lease_id=lease.lease_id,
                unix_s=self.unix_s,
            )
        )
        return command

    def keep_alive(self, *leases: Lease, caller: Caller | None = None) -> CommandId:
        """Renew leases, as their holder does or somebody else."""
        command = CommandId(self.next_id())
        self.handle(
            KeepAlive(
                command=command,
                caller=caller or leases[0].caller,
                lease_ids=tuple(lease.lease_id for lease in leases),
            )
        )
        return command

    def hang_up(self, command: CommandId) -> None:
        self.handle(CallEnded(command=command))

    def add_hold(self, target: str, *, scope: HoldScope = HoldScope.NODE, **more: object) -> HoldId:
        hold_id = HoldId(f"h-{self.next_id()}")
        self.handle(
            AddHold(
                command=CommandId(self.next_id()),
                caller=Caller(role=Role.OPERATOR),
                hold_id=hold_id,
                request_id=f"r-{hold_id}",
                kind=HoldKind.OPERATOR,
                scope=scope,
                target=target,
                reason="maintenance",
                unix_s=self.unix_s,
                **more,  # type: ignore[arg-type]
            )
        )
        return hold_id

    def remove_hold(self, hold_id: HoldId) -> None:
        self.handle(
            RemoveHold(
                command=CommandId(self.next_id()),
                caller=Caller(role=Role.OPERATOR),
                hold_id=hold_id,
                unix_s=self.unix_s,
            )
        )

    def holder_ended(self, node: PlayedNode, lease: Lease, reason: str = "exited") -> None:
        assert lease.process is not None
        node.watched.discard(lease.lease_id)
        self.report(
            node,
            Report(
                ended_holders=(
                    HolderEnd(lease_id=lease.lease_id, pid=lease.process.pid, reason=reason),
                )
            ),
        )

    def now_lease(self, lease: Lease) -> Lease:
        """The lease as the pool has it now."""
        found = self.pool.lease(lease.lease_id)
        assert found is not None
        return found


def identity(record: Stored) -> tuple[str, str]:
    """Kind and key of a record in the world's store."""
    match record:
        case Lease():
            return "lease", record.lease_id
        case UnclaimedRecord():
            return "unclaimed", f"{record.node_id}/{record.report.key}"
        case _:
            return type(record).__name__, getattr(record, "node_id", getattr(record, "hold_id", ""))


def stored(record: Stored) -> Stored:
    """What comes back from a store: no environment, no view of the moment."""
    if not isinstance(record, Lease):
        return record
    return replace(
        record, members=tuple(replace(member, environment=None) for member in record.members)
    )
