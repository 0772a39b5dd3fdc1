"""The engine over the real pool and a store in memory that fails on request."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from gpupool.model.assignment import DesiredState, Hello, Welcome
from gpupool.model.caller import Caller, Role
from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.event import Event
from gpupool.model.ids import DeviceUuid, LeaseId, RequestId
from gpupool.model.inventory import Device, NodeInventory
from gpupool.model.lease import Lease, LeaseState
from gpupool.model.request import Group, LeaseSpec, WholeGpus
from gpupool_allocator.core.events import (
    Acquire,
    KeepAlive,
    NodeConnected,
    Watch,
    WritesAccepted,
)
from gpupool_allocator.core.pool import Pool
from gpupool_allocator.core.settings import PoolSettings
from gpupool_allocator.engine import (
    AnswerStream,
    Engine,
    EngineStoppedError,
    FinalAnswer,
    RefusedError,
    Result,
)
from gpupool_allocator.engine.feed import EventFeed, ForgottenError
from gpupool_allocator.metrics import Metrics
from gpupool_allocator.storage import records
from gpupool_allocator.storage.memory import Failure, MemoryDisk, MemoryStore
from gpupool_allocator.storage.store import Operation


class GatedStore(MemoryStore):
    """Commits only while its gate is open, and counts."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__(disk)
        self.gate = threading.Event()
        self.gate.set()
        self.held = threading.Event()
        self.commits: list[int] = []

    def commit(
        self, epoch: int, operations: Sequence[Operation], events: Sequence[Event] = ()
    ) -> None:
        if not self.gate.is_set():
            self.held.set()
        assert self.gate.wait(30)
        super().commit(epoch, operations, events)
        self.commits.append(len(operations))


class Heard:
    """Outbound half of an agent's stream."""

    def __init__(self) -> None:
        self.welcomes: list[Welcome] = []
        self.refusals: list[Refused] = []

    def welcome(self, welcome: Welcome) -> None:
        self.welcomes.append(welcome)

    def desire(self, desired: DesiredState) -> None:
        pass

    def close(self, refused: Refused) -> None:
        self.refusals.append(refused)


@dataclass
class Running:
    engine: Engine
    store: GatedStore
    task: "asyncio.Task[None]"

    def connect(self, *, highest_epoch: int = 0) -> Heard:
        """An agent that says hello and nothing more: its GPUs are not offered yet."""
        heard = Heard()
        device = Device(uuid=DeviceUuid("GPU-1"), model="H100", memory_mib=80_000)
        hello = Hello(
            node_id="n1",
            boot_id="boot",
            agent_version="0.1.0",
            agent_instance_id="instance",
            protocol_revisions=(1,),
            inventory=NodeInventory(devices=(device,)),
            highest_epoch=highest_epoch,
        )
        connection = self.engine.open_connection(heard)
        self.engine.notify(NodeConnected(connection=connection, hello=hello, unix_s=1.0))
        return heard

    def acquire(self, request_id: str, *, ttl_s: float = 60.0) -> Acquire:
        return Acquire(
            command=self.engine.ids.command(),
            caller=Caller(role=Role.OPERATOR),
            lease_id=LeaseId(f"l-{request_id}"),
            request_id=RequestId(request_id),
            spec=LeaseSpec(groups=(Group(accelerator=WholeGpus(count=1)),)),
            ttl_s=ttl_s,
            unix_s=1.0,
        )

    async def waiting(self) -> int:
        return (await self.engine.read(lambda pool: pool.summary())).waiting


@asynccontextmanager
async def running(
    disk: MemoryDisk | None = None, *, inbox_max: int = 1000
) -> AsyncIterator[Running]:
    store = GatedStore(disk or MemoryDisk())
    epoch = store.begin_term()
    pool = Pool(PoolSettings(), epoch=epoch, last_sequence=store.bounds()[1])
    for stored in store.load():
        pool.restore(records.decode(stored))
    with ThreadPoolExecutor(max_workers=1) as thread:
        engine = Engine(
            pool,
            store,
            epoch=epoch,
            in_thread=thread,
            metrics=Metrics("test"),
            feed=EventFeed(store, thread, newest=store.bounds()[1]),
            inbox_max=inbox_max,
            check_invariants=True,
        )
        task = asyncio.create_task(engine.run())
        made = Running(engine, store, task)
        try:
            yield made
        finally:
            store.gate.set()
            if not task.done():
                engine.stop()
                await asyncio.wait_for(task, 30)


async def until(met: Callable[[], bool], *, turns_max: int = 30_000) -> None:
    """Gives the loop turns until a condition is met."""
    for _ in range(turns_max):
        if met():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the condition was not met in time")


async def first(stream: AnswerStream) -> Result:
    async for result in stream:
        return result
    raise AssertionError("the stream ended without an answer")


async def test_nothing_is_answered_before_it_is_durable() -> None:
    async with running() as run:
        run.connect()
        assert await run.waiting() == 0
        await until(lambda: len(run.store.commits) == 2)  # the start, and the node
        run.store.gate.clear()
        answers = AnswerStream()
        run.engine.submit(run.acquire("r1"), answers)
        answer = asyncio.create_task(first(answers))
        read = asyncio.create_task(run.waiting())
        await until(run.store.held.is_set)
        for _ in range(100):  # turns in which whatever was told already would arrive
            await asyncio.sleep(0)
        assert not answer.done()
        assert not read.done()
        run.store.gate.set()
        lease = await answer
        assert isinstance(lease, Lease)
        assert lease.state is LeaseState.PENDING
        assert await read == 1
        assert ("lease", "l-r1") in run.store.disk.records


async def test_what_arrives_during_a_commit_is_committed_together() -> None:
    async with running() as run:
        run.connect()
        await run.waiting()
        run.store.gate.clear()
        streams = [AnswerStream() for _ in range(31)]
        run.engine.submit(run.acquire("r0"), streams[0])
        await until(lambda: len(run.engine.recent_events()) == 2)
        before = len(run.store.commits)
        for number, stream in enumerate(streams[1:], start=1):
            run.engine.submit(run.acquire(f"r{number}"), stream)
        run.store.gate.set()
        await asyncio.gather(*(first(stream) for stream in streams))
        assert len(run.store.commits) - before == 2
        assert run.store.commits[-1] == 30


async def test_an_unknown_outcome_ends_the_engine_and_answers_nobody() -> None:
    async with running() as run:
        run.connect()
        await run.waiting()
        run.store.disk.failures.append(Failure.ANSWER_LOST)
        answer = FinalAnswer()
        run.engine.submit(run.acquire("r1"), answer)
        with pytest.raises(EngineStoppedError):
            await run.task
        assert not answer.future.done()
        assert any("r1" in event for event in run.engine.recent_events())


async def test_a_lost_epoch_ends_the_engine() -> None:
    async with running() as run:
        run.connect()
        await run.waiting()
        MemoryStore(run.store.disk).begin_term()
        run.engine.submit(run.acquire("r1"), FinalAnswer())
        with pytest.raises(EngineStoppedError, match="epoch"):
            await run.task


async def test_a_full_store_keeps_what_was_decided_and_then_refuses_changes() -> None:
    async with running() as run:
        run.connect()
        await run.waiting()
        run.store.disk.failures.append(Failure.FULL)
        run.store.disk.refusal = "no space left"
        answers = AnswerStream()
        run.engine.submit(run.acquire("r1"), answers)
        assert isinstance(await first(answers), Lease)
        refused = await run.engine.ask(run.acquire("r2"))
        assert isinstance(refused, Refused)
        assert refused.kind is ErrorKind.UNAVAILABLE
        assert "no space left" in refused.message
        assert await run.waiting() == 1
        # It takes writes again when there is room, and says so by itself.
        run.store.disk.refusal = ""
        await run.engine.check_store()
        third = AnswerStream()
        run.engine.submit(run.acquire("r3"), third)
        assert isinstance(await first(third), Lease)


async def test_without_a_reserve_callers_are_refused_until_there_is_room() -> None:
    async with running(MemoryDisk(reserve=False)) as run:
        run.connect()
        await run.waiting()
        run.store.disk.failures.append(Failure.FULL)
        answers = AnswerStream()
        run.engine.submit(run.acquire("r1"), answers)
        await until(lambda: bool(run.engine.stalled_reason))
        with pytest.raises(RefusedError, match="the store is full"):
            await run.waiting()
        with pytest.raises(RefusedError, match="the store is full"):
            run.engine.submit(run.acquire("r2"), FinalAnswer())
        assert isinstance(await first(answers), Lease)
        assert await run.waiting() == 1


async def test_more_than_the_inbox_holds_is_refused_with_when_to_retry() -> None:
    async with running(inbox_max=5) as run:
        run.connect()
        await run.waiting()
        run.store.gate.clear()
        for number in range(5):
            run.engine.submit(run.acquire(f"r{number}"), AnswerStream())
        with pytest.raises(RefusedError) as caught:
            run.engine.submit(run.acquire("r5"), AnswerStream())
        assert caught.value.refused.kind is ErrorKind.UNAVAILABLE
        assert caught.value.refused.retry_after_s


async def test_a_later_epoch_is_exceeded_durably_before_the_engine_stops() -> None:
    async with running() as run:
        heard = run.connect(highest_epoch=77)
        with pytest.raises(EngineStoppedError) as caught:
            await run.task
        assert caught.value.new_term
        assert run.store.disk.epoch > 77
        assert not heard.welcomes


async def test_a_deadline_of_the_pool_comes_true_without_any_event() -> None:
    async with running() as run:
        run.connect()
        command = run.acquire("r1", ttl_s=0.05)
        answers = AnswerStream()
        run.engine.submit(command, answers)
        assert isinstance(await first(answers), Lease)
        run.engine.abandon(command.command)
        watched = AnswerStream()
        watch = Watch(command=run.engine.ids.command(), caller=Caller(), lease_id=LeaseId("l-r1"))
        run.engine.submit(watch, watched)
        async with asyncio.timeout(30):
            states = [result.state async for result in watched if isinstance(result, Lease)]
        assert states[-1] is LeaseState.CANCELLED


async def test_stop_answers_what_was_asked_before() -> None:
    async with running() as run:
        kept = run.engine.ask(
            KeepAlive(
                command=run.engine.ids.command(), caller=Caller(), lease_ids=(LeaseId("l-x"),)
            )
        )
        asked = asyncio.create_task(kept)
        await asyncio.sleep(0)
        run.engine.stop()
        await asyncio.wait_for(run.task, 30)
        assert await asked
        with pytest.raises(RefusedError, match="stopping"):
            await run.waiting()


async def test_a_slow_reader_of_a_lease_gets_the_newest_states() -> None:
    stream = AnswerStream()
    for number in range(500):
        refused = Refused(kind=ErrorKind.INVALID, message=str(number))
        stream.deliver(refused, final=number == 499)
    got = [result async for result in stream]
    assert len(got) == 64
    assert isinstance(got[-1], Refused)
    assert got[-1].message == "499"


async def test_the_feed_waits_for_the_next_event_and_names_a_gap() -> None:
    store = MemoryStore(MemoryDisk(history_max=10))
    epoch = store.begin_term()
    with ThreadPoolExecutor(max_workers=1) as thread:
        feed = EventFeed(store, thread, newest=0)
        waiting = asyncio.create_task(feed.next_page(0, 100))
        await asyncio.wait({waiting}, timeout=0.1)
        assert not waiting.done()
        events = [
            Event(sequence=n, unix_s=1.0, kind="k", subject=f"s{n % 2}", cause="c")
            for n in range(1, 31)
        ]
        store.commit(epoch, [], events)
        feed.publish(events)
        assert await waiting == events
        assert await feed.page(0, 3, subject="s1") == [events[0], events[2], events[4]]
        # Another process' feed knows only what the store still keeps.
        later = EventFeed(store, thread, newest=30)
        assert [event.sequence for event in await later.next_page(25, 100)] == [26, 27, 28, 29, 30]
        with pytest.raises(ForgottenError):
            await later.next_page(5, 100)


async def test_work_that_nobody_takes_is_a_reason_to_start_anew_and_none_waiting_is_not() -> None:
    async with running() as made:
        engine = made.engine
        await made.waiting()
        assert [engine.stuck() for _ in range(3)] == [""] * 3
        made.store.gate.clear()
        engine.submit(made.acquire("r1"), FinalAnswer())
        await asyncio.sleep(0)
        while not engine.stuck():
            # Taken for the commit that hangs; what comes now waits.
            engine.notify(WritesAccepted())
            await asyncio.sleep(0)
        assert "items wait" in engine.stuck()
        engine.stalled_reason = "no room"
        assert engine.stuck() == ""
        engine.stalled_reason = ""
        made.store.gate.set()
        await made.waiting()
        assert engine.stuck() == ""
