"""The loop between the world and the pool.

Everything that happens goes into one inbox. The loop takes what is there, hands it
to the pool, commits what the pool wants kept, and only then tells anyone: answers,
agents, readers. Whatever arrives during a commit is the next batch (group commit).
A read is an inbox item too, so its answer waits for the commit of what it saw.

Crash-only: an exception of the pool, a lost epoch or a commit of unknown outcome
ends ``run`` at once, before anything that depends on it is answered; the program
then exits and starts anew from the store.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol, TypeVar, cast

import structlog

from gpupool.model.assignment import DesiredState, Welcome
from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.ids import CommandId, ConnectionId
from gpupool.model.lease import Lease, LeaseState
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
)
from gpupool_allocator.core.events import (
    Acquire,
    AddHold,
    CallEnded,
    EndUnclaimed,
    KeepAlive,
    PoolEvent,
    Release,
    RemoveHold,
    TimePassed,
    Watch,
    WritesAccepted,
    WritesRefused,
)
from gpupool_allocator.core.pool import Pool
from gpupool_allocator.engine.batch import Batch, Read
from gpupool_allocator.engine.calls import FinalAnswer, RefusedError, Result, Sink
from gpupool_allocator.engine.commit import Committer
from gpupool_allocator.engine.feed import EventFeed
from gpupool_allocator.engine.ids import Counters
from gpupool_allocator.metrics import Metrics
from gpupool_allocator.storage.store import Store, StoreFullError

T = TypeVar("T")
Command = Acquire | Watch | KeepAlive | Release | AddHold | RemoveHold | EndUnclaimed

RECENT_EVENTS = 256
"""Events that a crash report shows."""

TIMER_STEP_S = 0.001
"""Shortest time to a TimePassed: a deadline in the past must not become a busy loop."""

FULL_RETRY_S = 1.0

log = structlog.stdlib.get_logger("engine")


class EngineStoppedError(Exception):
    """The engine cannot go on; the process must exit and start from the store.

    ``new_term``: nothing is wrong with it, but a node has heard of a later term. The
    stored epoch is above that one now, and the next start exceeds both.
    """

    def __init__(self, reason: str, *, new_term: bool = False) -> None:
        super().__init__(reason)
        self.new_term = new_term


class AgentOutbound(Protocol):
    """The way down to one agent; called on the event loop, never blocking."""

    def welcome(self, welcome: Welcome) -> None:
        """Answers its Hello."""
        ...

    def desire(self, desired: DesiredState) -> None:
        """Replaces what it shall run."""
        ...

    def close(self, refused: Refused) -> None:
        """Ends the stream."""
        ...


class Engine:
    """Drives one pool over one store; used from one event loop.

    ``in_thread`` is the store's only thread: commits, history and checks take turns
    there. ``inbox_max`` bounds what callers may have waiting; events that the engine
    itself owes the pool (a call's or a stream's end, the timer) pass over it and are
    bounded by the calls and streams there are.
    """

    def __init__(
        self,
        pool: Pool,
        store: Store,
        *,
        epoch: int,
        in_thread: Executor,
        metrics: Metrics,
        feed: EventFeed,
        inbox_max: int = 100_000,
        check_invariants: bool = False,
    ) -> None:
        self.epoch = epoch
        self.feed = feed
        self.ids = Counters()
        self.stalled_reason = ""
        self.write_refusal = ""
        self._pool = pool
        self._store = store
        self._thread = in_thread
        self._metrics = metrics
        self._committer = Committer(store, epoch)
        self._inbox: deque[PoolEvent | Read] = deque()
        self._inbox_max = inbox_max
        self._check_invariants = check_invariants
        self._sinks: dict[CommandId, Sink] = {}
        self._agents: dict[ConnectionId, AgentOutbound] = {}
        self._asked_at: dict[CommandId, float] = {}
        self._recent: deque[PoolEvent] = deque(maxlen=RECENT_EVENTS)
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self._batches = 0
        self._batches_seen = -1

    # The way in.

    def submit(self, command: Command, sink: Sink) -> None:
        """Queues a command; its answers go to ``sink``. RefusedError when overloaded."""
        self._refuse_when_overloaded()
        self._sinks[command.command] = sink
        if isinstance(command, Acquire):
            self._asked_at[command.command] = time.monotonic()
        self._push(command)

    async def ask(self, command: Command) -> Result:
        """Queues a command and waits for its final answer."""
        answer = FinalAnswer()
        self.submit(command, answer)
        try:
            return await answer.future
        finally:
            self.abandon(command.command)

    def abandon(self, command: CommandId) -> None:
        """The caller is gone; nothing happens where the final answer was given."""
        if self._sinks.pop(command, None) is not None:
            self._asked_at.pop(command, None)
            self._push(CallEnded(command=command))

    def notify(self, event: PoolEvent) -> None:
        """Queues an event that is owed to the pool and cannot be refused."""
        self._push(event)

    async def tell(self, event: PoolEvent) -> None:
        """Queues an event and returns when it has taken effect: the sender's brake."""
        self._push(event)
        await self._ask_pool(lambda _: None)

    async def read(self, ask: Callable[[Pool], T]) -> T:
        """What ``ask`` sees, once it is durable. It must not change the pool."""
        self._refuse_when_overloaded()
        return cast("T", await self._ask_pool(ask))

    async def in_store(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def open_connection(self, outbound: AgentOutbound) -> ConnectionId:
        """Registers an agent's stream."""
        connection = self.ids.connection()
        self._agents[connection] = outbound
        self._metrics.agents_connected.set(len(self._agents))
        return connection

    def close_connection(self, connection: ConnectionId) -> None:
        """Forgets an agent's stream."""
        self._agents.pop(connection, None)
        self._metrics.agents_connected.set(len(self._agents))

    def stop(self) -> None:
        """Lets ``run`` return once everything queued has been dealt with."""
        self._stopping = True
        self._wake.set()

    def stuck(self) -> str:
        """Why it does not get on, since the last time that it was asked; empty where it does.

        One that waits for room in its store is not stuck: it reads, renews and says so.
        """
        seen, self._batches_seen = self._batches_seen, self._batches
        if not self._inbox or self.stalled_reason or seen != self._batches:
            return ""
        return f"{len(self._inbox)} items wait, and none was taken"

    def recent_events(self) -> list[str]:
        """The last events, oldest first, for a crash report."""
        return [repr(event)[:500] for event in self._recent]

    def _push(self, item: PoolEvent | Read) -> None:
        self._inbox.append(item)
        self._wake.set()

    async def _ask_pool(self, ask: Callable[[Pool], object]) -> object:
        read = Read(ask)
        self._push(read)
        return await read.future

    def _refuse_when_overloaded(self) -> None:
        if self.stalled_reason:
            message = f"the store is full: {self.stalled_reason}"
        elif self._stopping:
            message = "the allocator is stopping"
        elif len(self._inbox) >= self._inbox_max:
            message = f"the allocator is overloaded: {self._inbox_max} commands are waiting"
        else:
            return
        raise RefusedError(Refused(kind=ErrorKind.UNAVAILABLE, message=message, retry_after_s=1.0))

    # The loop.

    async def run(self) -> None:
        """Runs until ``stop``. EngineStoppedError: the process must not go on."""
        try:
            await self._begin()
            while await self._has_work():
                batch = self._take_batch()
                await self._finish(batch)
        except EngineStoppedError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise EngineStoppedError(reason) from error
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def _begin(self) -> None:
        batch = Batch()
        batch.add(self._pool.start(time.monotonic(), time.time()))
        await self._finish(batch)

    async def _has_work(self) -> bool:
        while not self._inbox:
            if self._stopping:
                return False
            self._wake.clear()
            await self._wake.wait()
        return True

    def _take_batch(self) -> Batch:
        batch = Batch()
        self._batches += 1
        now = time.monotonic()
        while self._inbox and not batch.is_full:
            item = self._inbox.popleft()
            batch.items += 1
            if isinstance(item, Read):
                item.run(self._pool)
                batch.tells.append(item)
            else:
                self._recent.append(item)
                batch.add(self._pool.handle(item, now))
        if self._check_invariants:
            self._pool.check()
        self._metrics.batch_items.observe(batch.items)
        return batch

    async def _finish(self, batch: Batch) -> None:
        if batch.changes:
            await self._commit(batch)
            self.feed.publish(batch.events)
        else:
            # Without a commit to wait for, calls still get their turn of the loop.
            await asyncio.sleep(0)
        for tell in batch.tells:
            if isinstance(tell, RaiseEpoch):
                await self._raise_epoch(tell.above)
            self._perform(tell)
        self._set_timer()

    async def _commit(self, batch: Batch) -> None:
        started = time.monotonic()
        try:
            commits = await self.in_store(lambda: self._committer.commit(batch.changes))
        except StoreFullError as error:
            commits = await self._commit_when_there_is_room(error)
        if self._committer.reserve_used:
            self._committer.reserve_used = False
            await self.check_store()
        self._metrics.commits.inc(commits)
        self._metrics.commit_changes.inc(batch.change_count)
        self._metrics.commit_seconds.observe(time.monotonic() - started)
        for event in batch.events:
            self._metrics.count_event(event.kind)

    async def _commit_when_there_is_room(self, error: StoreFullError) -> int:
        # Nothing of the rest was written, so trying again is safe. Until it is, what
        # the pool decided must not be seen, and callers are refused at the door.
        self.stalled_reason = str(error)
        log.error("store.full", reason=str(error))
        while True:
            await asyncio.sleep(FULL_RETRY_S)
            try:
                commits = await self.in_store(self._committer.resume)
            except StoreFullError as again:
                self.stalled_reason = str(again)
            else:
                self.stalled_reason = ""
                log.info("store.room", transactions=commits)
                return commits

    def _perform(self, tell: Effect | Read) -> None:
        match tell:
            case Read():
                tell.answer()
            case Answer():
                self._answer(tell)
            case SendWelcome(connection=connection, welcome=welcome):
                if agent := self._agents.get(connection):
                    agent.welcome(welcome)
            case SendDesired(connection=connection, desired=desired):
                if agent := self._agents.get(connection):
                    agent.desire(desired)
            case CloseConnection(connection=connection, refused=refused):
                if agent := self._agents.get(connection):
                    agent.close(refused)
            case Alarm(code=code, message=message):
                self._metrics.alarms.labels(code=code).inc()
                log.error("pool.alarm", code=code, message=message)
            case Put() | Delete() | Record() | RaiseEpoch():
                raise AssertionError(f"not something to tell: {tell}")

    async def _raise_epoch(self, above: int) -> None:
        # Durable first: a crash on the way must not bring the old term back.
        await self.in_store(lambda: self._store.begin_term(above=above))
        raise EngineStoppedError(
            f"a node has heard of epoch {above}, this term is {self.epoch}",
            new_term=True,
        )

    def _answer(self, answer: Answer) -> None:
        result = answer.result
        if isinstance(result, Refused):
            self._metrics.refusals.labels(code=result.kind.value.grpc).inc()
        elif isinstance(result, Lease) and result.state is not LeaseState.PENDING:
            asked_at = self._asked_at.pop(answer.command, None)
            if asked_at is not None:
                self._metrics.acquire_seconds.observe(time.monotonic() - asked_at)
        if answer.final:
            sink = self._sinks.pop(answer.command, None)
            self._asked_at.pop(answer.command, None)
        else:
            sink = self._sinks.get(answer.command)
        if sink is not None:
            sink.deliver(result, final=answer.final)

    # Time and the store's state.

    def _set_timer(self) -> None:
        deadline = self._pool.next_deadline()
        if deadline is None:
            return
        # A timer that fires early does no harm; one that is put off under load does.
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(max(deadline, loop.time() + TIMER_STEP_S), self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        self._push(TimePassed(unix_s=time.time()))

    async def check_store(self) -> None:
        """Asks the store whether it takes writes, and tells the pool when that changed."""
        reason = await self.in_store(self._store.accepts_writes)
        if reason == self.write_refusal:
            return
        self.write_refusal = reason
        if reason:
            log.error("store.refuses", reason=reason)
            self._push(WritesRefused(reason=reason))
        else:
            log.info("store.accepts")
            self._push(WritesAccepted())
