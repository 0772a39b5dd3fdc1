"""The agent: the core in the middle, the machine and the allocator around it.

Everything that happens becomes an event for the core, and what the core wants is
performed in its order. A checkpoint is durable before anything after it is done; a
disk that is slow or refuses holds up neither heartbeats nor, after its deadline, the
rest: it is reported as a fault. Nothing here is global: one process can run many
agents.
"""

import asyncio
import secrets
import signal
import time
from collections import deque
from importlib import metadata
from typing import Any, assert_never

import structlog

from gpupool.model.assignment import (
    Assignment,
    AssignmentKey,
    DesiredState,
    DeviceTelemetry,
    Hello,
    Report,
    Welcome,
)
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId
from gpupool.model.inventory import NodeInventory
from gpupool_agent.checkpoint import CheckpointError, StateDirectory
from gpupool_agent.containers import LeaseSpecs
from gpupool_agent.core.events import (
    AdoptionAnswered,
    Checkpoint,
    CleanUp,
    CloseConnection,
    Connected,
    DesiredArrived,
    Disconnected,
    Log,
    MpsChanged,
    NodeEffect,
    NodeEvent,
    NodeFault,
    Prepare,
    ReadUsage,
    SaveCheckpoint,
    SendReport,
    StepDone,
    StepFailed,
    StopFailed,
    StopProcess,
    TimePassed,
    UnwatchAdopted,
    UnwatchHolder,
    WatchAdopted,
    WatchHolder,
)
from gpupool_agent.core.node import Node
from gpupool_agent.core.readings import PortCounters
from gpupool_agent.core.stopping import StopPolicy
from gpupool_agent.devices.blocking import CallHangsError
from gpupool_agent.devices.interfaces import Adapters
from gpupool_agent.devices.privileged import PrivilegedError
from gpupool_agent.link import Link
from gpupool_agent.local.adopting import Adopter
from gpupool_agent.local.door import LocalDoor
from gpupool_agent.polling import Poller
from gpupool_agent.privileges import Privileges
from gpupool_agent.settings import AgentSettings, StrayPolicy
from gpupool_agent.steps import StepFailedError, Steps
from gpupool_agent.watches import Watches

DISK_DEADLINE_S = 10.0
SWEEP_S = 5.0
"""How long to wait before what could not be swept is tried again."""

CDI_FAULT = "cdi_failed"
CHECKPOINT_FAULT = "checkpoint_failed"


def agent_version() -> str:
    """Version of the installed distribution."""
    return metadata.version("gpupool")


class Agent:
    """One node's agent.

    Made inside a running event loop. Raises StateLockedError when another agent runs
    on the same state directory, CheckpointError when its checkpoint is damaged.
    """

    def __init__(self, settings: AgentSettings, adapters: Adapters) -> None:
        self.settings = settings
        self._adapters = adapters
        self._instance_id = secrets.token_hex(8)
        self._version = agent_version()
        self._log = structlog.get_logger().bind(node_id=settings.node_id)
        self._state = StateDirectory(settings.state_dir) if settings.state_dir else None
        self._disk = adapters.disk_calls
        self._unsaved: Checkpoint | None = None
        self._queue: deque[NodeEffect] = deque()
        self._performing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watches = Watches(adapters.processes, self.handle)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed = False
        self._specs = LeaseSpecs(adapters.cdi, self._cdi_trouble)
        self.telemetry: tuple[DeviceTelemetry, ...] = ()
        self.port_counters: tuple[PortCounters, ...] = ()
        host = adapters.host.read()
        self.node = Node(
            node_id=NodeId(settings.node_id),
            boot_id=host.boot_id,
            host=NodeInventory(
                cpu_milli=host.cpu_milli,
                host_memory_mib=host.host_memory_mib,
                labels=dict(settings.labels),
                simulated=host.simulated,
                hostname=host.hostname,
            ),
            checkpoint=_load(self._state),
            now=time.monotonic(),
            rail_rate_mbps=settings.rail_rate_gbps * 1000,
            stops=StopPolicy(
                leftovers=adapters.privileged is not None,
                strays=settings.strays == StrayPolicy.STOP,
            ),
        )
        self.privileges = Privileges(adapters.privileged, self.handle)
        self._steps = Steps(adapters.mps, self.node.sm_count, self.node.slices_on)
        self._sweeping = False
        self._poller = Poller(
            periods=settings,
            driver=adapters.driver,
            hcas=adapters.hcas,
            processes=adapters.processes,
            calls=adapters.driver_calls,
            with_leases=self.privileges.with_leases,
            handle=self.handle,
            measured=self._measured,
            counted=self._counted,
            is_own=adapters.mps.is_own,
        )
        self.link = Link(settings.allocators, adapters.dial, self)
        self._adopter = Adopter(adapters.processes, self._poller.read_anew, self.handle)
        self.door = (
            LocalDoor(
                settings.socket,
                node_id=settings.node_id,
                link=self.link,
                connections_max=settings.local_connections_max,
                start_ticks=adapters.processes.start_ticks,
                adopter=self._adopter,
            )
            if settings.socket
            else None
        )
        self.started = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled; assignments go on afterwards.

        Raises what makes it impossible to go on, as a broken promise of the core.
        """
        tasks: list[asyncio.Future[Any]] = [self._failed]
        try:
            self._enqueue(self.node.start(time.monotonic()))
            if self.door is not None:
                await self.door.start()
            self._spawn(self.privileges.watch())
            tasks.append(asyncio.create_task(self._poller.run()))
            self._spawn(self._adapters.mps.watch(self.node.device_uuids, self._mps_changed))
            # Hello is worth more with devices in it; a driver that hangs takes its
            # deadline and no more.
            first = asyncio.create_task(self._poller.has_read.wait())
            await asyncio.wait([first, *tasks], return_when=asyncio.FIRST_COMPLETED)
            tasks += [first, asyncio.create_task(self.link.run())]
            self.started.set()
            done, _ = await asyncio.wait(
                [task for task in tasks if task is not first],
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                task.result()
        finally:
            await self._close(tasks)

    def handle(self, event: NodeEvent) -> None:
        """Give an event to the core and perform what it wants."""
        if self._closed:
            return
        now = time.monotonic()
        try:
            self._enqueue(self.node.handle(event, now))
        except Exception as error:
            # The core is wrong, so nothing that it holds can be trusted any more.
            if self._failed.done():
                raise
            self._failed.set_exception(error)

    def stuck(self) -> str:
        """Why the agent shall be started anew; empty where it works."""
        return self._poller.stuck()

    def status(self) -> str:
        """How it is, in one line for whoever looks at the service."""
        summary = self.node.summary()
        parts = ["connected" if summary.connected else "no allocator answers"]
        if self._poller.silent:
            parts.append(f"driver: {self._poller.silent}")
        else:
            parts.append(f"{len(self.node.devices())} devices")
        if self.privileges.missing:
            parts.append("read only, there is no root helper")
        return "; ".join(parts)

    # -- what the link asks and tells ----------------------------------------

    def hello(self) -> Hello:
        """How the node introduces itself now."""
        return self.node.hello(agent_version=self._version, agent_instance_id=self._instance_id)

    def heartbeat(self) -> Report:
        """What is said when there is nothing to say."""
        return self.node.heartbeat()

    def welcomed(self, welcome: Welcome) -> None:
        """An allocator answered."""
        self.handle(Connected(welcome=welcome))

    def desired(self, desired: DesiredState) -> None:
        """What the node shall run."""
        self.handle(DesiredArrived(desired=desired))
        if self.node.knows_wanted and not self._sweeping:
            # Not before: an agent without its state would take all for left behind.
            self._sweeping = True
            self._spawn(self._specs.sweep(self._kept_leases))
            self._spawn(self._sweep())

    def lost(self) -> None:
        """The stream is gone."""
        self.handle(Disconnected())

    # -- performing ----------------------------------------------------------

    def _enqueue(self, effects: list[NodeEffect]) -> None:
        self._queue.extend(effects)
        if self._performing is None:
            self._perform_ready()
        self._set_timer()

    def _perform_ready(self) -> None:
        """Perform up to the next checkpoint, and go on once that one is durable."""
        while self._queue:
            effect = self._queue.popleft()
            if not isinstance(effect, SaveCheckpoint):
                self._perform(effect)
            elif self._state is not None:
                self._unsaved = effect.checkpoint
                self._performing = asyncio.create_task(self._save_then_perform(self._state))
                self._performing.add_done_callback(self._finished)
                return

    async def _save_then_perform(self, state: StateDirectory) -> None:
        """Save the newest checkpoint that waits: it holds all of the older ones."""
        newest = self._unsaved
        for effect in self._queue:
            if isinstance(effect, SaveCheckpoint):
                newest = effect.checkpoint
        self._queue = deque(each for each in self._queue if not isinstance(each, SaveCheckpoint))
        assert newest is not None  # noqa: S101 - set by the only caller
        fault = ""
        try:
            await self._disk.call(lambda: state.save(newest), DISK_DEADLINE_S)
        except (OSError, CallHangsError) as error:
            fault = str(error)
            self._log.error("checkpoint.failed", reason=fault)
        self._performing = None
        self.handle(
            NodeFault(code=CHECKPOINT_FAULT, evidence=fault, open=bool(fault), unix_s=time.time())
        )
        if self._performing is None:
            self._perform_ready()

    def _perform(self, effect: NodeEffect) -> None:
        match effect:
            case SendReport():
                self.link.send(effect.report)
            case Prepare():
                self._spawn(self._prepare(effect.assignment, adopted=effect.adopted))
            case CleanUp():
                self._spawn(self._clean_up(effect.assignment))
            case ReadUsage():
                self._poller.read_usage()
            case WatchHolder() | UnwatchHolder() | WatchAdopted() | UnwatchAdopted():
                self._watches.perform(effect)
            case StopProcess():
                self._spawn(self._stop(effect))
            case AdoptionAnswered():
                self._adopter.answered(effect)
            case CloseConnection():
                self.link.close(effect.reason)
            case Log():
                self._log.warning(effect.event, **effect.details)
            case SaveCheckpoint():
                raise AssertionError("checkpoints are saved, not performed")
            case _:
                assert_never(effect)

    async def _prepare(self, assignment: Assignment, *, adopted: bool) -> None:
        key, token = assignment.key, assignment.token
        try:
            prepared = await self._steps.prepare(assignment, adopted=adopted)
        except StepFailedError as error:
            self._step_failed("assignment.failed", key, token, str(error))
            return
        added = prepared.environment
        added |= self.node.imex_environment(assignment, self._adapters.imex_channels())
        added |= await self._specs.write(
            assignment, lambda more: self.node.environment_of(assignment, added | more)
        )
        self.handle(StepDone(key=key, token=token, environment=added, sm_counts=prepared.sm_counts))

    async def _clean_up(self, assignment: Assignment) -> None:
        key, token = assignment.key, assignment.token
        try:
            await self._steps.clean_up(assignment)
            await self._specs.remove(assignment)
        except (StepFailedError, PrivilegedError) as error:
            self._step_failed("assignment.not_cleaned", key, token, str(error))
        else:
            self.handle(StepDone(key=key, token=token))

    async def _sweep(self) -> None:
        """End what a former agent has left of MPS, now that it is known what is wanted."""
        told: dict[DeviceUuid, str] = {}
        while True:
            gpus = self.node.device_uuids()
            stays = await self._steps.sweep(gpus)
            if gpus and not stays:
                return
            if stays != told:
                told = stays
                self._log.warning("mps.not_swept", reasons=sorted(stays.values()))
            await asyncio.sleep(SWEEP_S)

    def _kept_leases(self) -> set[LeaseId]:
        return {report.key.lease_id for report in self.node.assignments()}

    def _cdi_trouble(self, reason: str) -> None:
        if reason:
            self._log.warning("cdi.failed", reason=reason)
        self.handle(
            NodeFault(code=CDI_FAULT, evidence=reason, open=bool(reason), unix_s=time.time())
        )

    def _step_failed(self, event: str, key: AssignmentKey, token: int, reason: str) -> None:
        self._log.warning(event, lease_id=key.lease_id, rank=key.rank, reason=reason)
        self.handle(StepFailed(key=key, token=token, reason=reason))

    async def _stop(self, effect: StopProcess) -> None:
        """Through the helper, which looks once more; by itself only where it has none."""
        pid, ticks = effect.pid, effect.start_ticks
        number = signal.SIGKILL if effect.force else signal.SIGTERM
        if self._adapters.privileged is None or self.privileges.missing:
            failed = self._adapters.processes.signal(pid, ticks, number)
        else:
            failed = await self.privileges.end_process(effect.gpu, pid, ticks, number)
        self._log.warning(
            "process.stopped",
            pid=pid,
            signal=number.name,
            user=effect.user,
            command=effect.command,
            lease_id=effect.lease_id,
            gpu=effect.gpu,
            reason=effect.reason,
            failed=failed,
        )
        if failed:
            self.handle(StopFailed(pid=pid, start_ticks=ticks))

    def _measured(self, devices: tuple[DeviceTelemetry, ...]) -> None:
        self.telemetry = devices
        self.link.send_telemetry(devices)

    def _counted(self, ports: tuple[PortCounters, ...]) -> None:
        self.port_counters = ports

    def _mps_changed(self, uuid: DeviceUuid, reason: str) -> None:
        self.handle(MpsChanged(uuid=uuid, reason=reason, unix_s=time.time()))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_s = self.node.next_deadline()
        if due_s is None:
            self._timer = None
            return
        delay_s = max(0.0, due_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        self.handle(TimePassed())

    async def _close(self, tasks: list[asyncio.Future[Any]]) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self.door is not None:
            await self.door.stop()
        running = [*tasks, *self._tasks]
        if self._performing is not None:
            running.append(self._performing)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._watches.close()
        await self._poller.close()
        if self._state is not None:
            if self._performing is not None:
                await self._save_last(self._state)
            self._state.close()

    async def _save_last(self, state: StateDirectory) -> None:
        """Save what a checkpoint that was cut short would have held."""
        try:
            async with asyncio.timeout(DISK_DEADLINE_S):
                await self._disk.returned()
            await self._disk.call(lambda: state.save(self.node.checkpoint()), DISK_DEADLINE_S)
        except (OSError, CallHangsError) as error:
            self._log.error("checkpoint.failed", reason=str(error))


def _load(state: StateDirectory | None) -> Checkpoint | None:
    """Load the checkpoint; a damaged one gives the lock back."""
    if state is None:
        return None
    try:
        return state.load()
    except CheckpointError:
        state.close()
        raise
