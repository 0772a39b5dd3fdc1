"""The allocator of the simulation: the real core, a store with a slow disk, crashes.

A batch is committed after a moment. A crash before that loses it, and nobody was
told; a crash after it keeps it, though nobody was told either.
"""

from collections.abc import Callable

from tests.core_world import identity, stored
from tests.simulation.clock import Clock
from tests.simulation.wire import Link

from gpupool.model.assignment import Hello, Report
from gpupool.model.caller import Caller, Role
from gpupool.model.event import Event
from gpupool.model.ids import CommandId, ConnectionId, LeaseId
from gpupool.model.lease import LeaseState
from gpupool_allocator.core.clocks import ClockKind
from gpupool_allocator.core.effects import (
    Alarm,
    Answer,
    CloseConnection,
    Delete,
    Effect,
    Put,
    RaiseEpoch,
    Record,
    SendDesired,
    SendWelcome,
    Stored,
)
from gpupool_allocator.core.events import (
    EndUnclaimed,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    PoolEvent,
    TimePassed,
)
from gpupool_allocator.core.pool import Pool
from gpupool_allocator.core.settings import PoolSettings

# Accounts follow the report interval: many of them meet what is on its way.
SETTINGS = PoolSettings(queue_max=50, ended_kept=200, reservation_s=3.0, report_interval_s=0.25)


class Daemon:
    """Engine and store around the core, played."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.epoch = 0
        self.store: dict[tuple[str, str], Stored] = {}
        self.history: list[Event] = []
        self.links: dict[ConnectionId, Link] = {}
        self.heard: dict[ConnectionId, tuple[str, float]] = {}
        self.answered: Callable[[Answer], None] = lambda _: None
        self.alarms: list[Alarm] = []
        self.serving = False
        self.faulty = True
        self.crashes = 0
        self.lost: list[LeaseId] = []
        self._inbox: list[PoolEvent] = []
        self._committing = False
        self._ids = 0
        self.pool = Pool(SETTINGS, epoch=1)
        self.start()

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    # -- life ----------------------------------------------------------------------

    def start(self) -> None:
        self.epoch += 1
        self.pool = Pool(SETTINGS, epoch=self.epoch, last_sequence=len(self.history))
        for record in self.store.values():
            self.pool.restore(record)
        self.serving = True
        self._committing = False
        self._inbox = []
        self._commit(self.pool.start(self.clock.now, self.clock.unix_s))
        self.pool.check()
        self._watch_silence(self.epoch)

    def crash(self) -> None:
        """kill -9, wherever it is, and a restart a moment later."""
        if not self.serving:
            return
        self.crashes += 1
        self.serving = False
        self._inbox = []
        for link in list(self.links.values()):
            link.close()
        self.links.clear()
        self.heard.clear()
        self.clock.after(self.clock.chance.uniform(0.1, 2.0), self.start)

    def lose_lease(self) -> None:
        """The book forgets a lease that nobody is waiting to hear of, in memory and on disk."""
        if not self.serving or self._committing:
            return
        state = self.pool._state
        known = [
            lease
            for lease in state.leases.values()
            if lease.state is LeaseState.ACTIVE and not lease.listeners
        ]
        if not known:
            return
        lease = self.clock.chance.choice(known)
        for member in lease.members:
            state.books.unbook(lease.key(member))
            del state.nodes[member.place.node_id].members[lease.key(member)]
        state.clocks.clear(lease.lease_id, *ClockKind)
        del state.leases[lease.lease_id], state.requests[lease.spec.tenant, lease.request_id]
        del self.store["lease", lease.lease_id]
        self.lost.append(lease.lease_id)
        self.pool.check()

    def end_unclaimed(self) -> None:
        """An operator ends what nobody knows."""
        if not self.serving:
            return
        for each in self.pool.unclaimed():
            self.send(
                EndUnclaimed(
                    command=self.command(),
                    caller=Caller(role=Role.OPERATOR),
                    node_id=each.node_id,
                    lease_id=each.lease_id,
                    unix_s=self.clock.unix_s,
                )
            )

    # -- events in, effects out ------------------------------------------------------

    def send(self, event: PoolEvent) -> None:
        """An event arrives; those that come during a commit go into the next batch."""
        if not self.serving:
            return
        self._inbox.append(event)
        if not self._committing:
            self._batch()

    def _batch(self) -> None:
        inbox, self._inbox = self._inbox, []
        effects: list[Effect] = []
        for event in inbox:
            effects += self.pool.handle(event, self.clock.now)
            self.pool.check()
        self._commit(effects)

    def _commit(self, effects: list[Effect]) -> None:
        self._committing = True
        term = self.epoch
        delay_s = self.clock.chance.uniform(0.0005, 0.004)
        self.clock.after(delay_s, lambda: self._committed(effects, term))

    def _committed(self, effects: list[Effect], term: int) -> None:
        if term != self.epoch or not self.serving:
            return  # the crash came before the sync: none of it was written
        for effect in effects:
            match effect:
                case Put(record=record):
                    self.store[identity(record)] = stored(record)
                case Delete(record=record):
                    self.store.pop(identity(record), None)
                case Record(event=event):
                    assert event.sequence == len(self.history) + 1
                    self.history.append(event)
                case _:
                    pass
        if self.faulty and self.clock.chance.random() < 0.002:
            self.crash()  # written, and nobody told
            return
        for effect in effects:
            self._tell(effect)
        self._committing = False
        self._plan_deadline(term)
        if self._inbox:
            self._batch()

    def _tell(self, effect: Effect) -> None:
        match effect:
            case Answer():
                self.answered(effect)
            case SendWelcome(connection=connection, welcome=welcome):
                if connection in self.links:
                    self.links[connection].send_down(welcome)
            case SendDesired(connection=connection, desired=desired):
                if connection in self.links:
                    self.links[connection].send_down(desired)
            case CloseConnection(connection=connection):
                if connection in self.links:
                    self.links.pop(connection).close()
            case RaiseEpoch(above=above):
                raise AssertionError(f"no store was ever restored here, yet {above} was heard")
            case Alarm():
                self.alarms.append(effect)
            case Put() | Delete() | Record():
                pass

    def _plan_deadline(self, term: int) -> None:
        deadline = self.pool.next_deadline()
        if deadline is not None:
            self.clock.after(deadline - self.clock.now, lambda: self._time_passed(term, deadline))

    def _time_passed(self, term: int, deadline: float) -> None:
        if term == self.epoch and self.serving and self.pool.next_deadline() == deadline:
            self.send(TimePassed(unix_s=self.clock.unix_s))

    # -- nodes -----------------------------------------------------------------------

    def accept(self, link: Link, hello: Hello) -> None:
        connection = link.connection
        self.links[connection] = link
        self.heard[connection] = (hello.node_id, self.clock.now)
        link.up = lambda report: self._reported(connection, hello.node_id, report)
        link.closed_above = lambda: self._closed(connection, hello.node_id)
        self.send(NodeConnected(connection=connection, hello=hello, unix_s=self.clock.unix_s))

    def _reported(self, connection: ConnectionId, node_id: str, report: Report) -> None:
        if connection not in self.links:
            return
        self.heard[connection] = (node_id, self.clock.now)
        self.send(
            NodeReported(
                connection=connection,
                node_id=node_id,  # type: ignore[arg-type]
                report=report,
                unix_s=self.clock.unix_s,
            )
        )

    def _closed(self, connection: ConnectionId, node_id: str) -> None:
        self.links.pop(connection, None)
        self.heard.pop(connection, None)
        self.send(
            NodeDisconnected(
                connection=connection,
                node_id=node_id,  # type: ignore[arg-type]
                unix_s=self.clock.unix_s,
            )
        )

    def _watch_silence(self, term: int) -> None:
        if term != self.epoch or not self.serving:
            return
        for connection, (node_id, at) in list(self.heard.items()):
            if self.clock.now - at > SETTINGS.heartbeat_timeout_s:
                link = self.links.get(connection)
                if link is not None:
                    link.close()
                self._closed(connection, node_id)
        self.clock.after(1.0, lambda: self._watch_silence(term))

    def command(self) -> CommandId:
        return CommandId(self.next_id())
