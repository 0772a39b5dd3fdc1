"""The node machine: what shall be, what is, and the steps from one to the other.

One way in, one way out: ``effects = node.handle(event, now)``. It does no I/O, reads
no clock and makes no ids; ``now`` is monotonic seconds of this boot. The shell
performs the effects in their order, and answers those that ask for an answer.
SaveCheckpoint comes before everything that must not be forgotten once it is done.

The parts: ``fence`` (whose orders count), ``book`` (the assignments), ``devices``
(the GPUs), ``membership`` (whose their processes are), ``holders`` (the processes that
hold leases), ``adoptions`` (those that were taken into one), ``stopping`` (those that are
ended), ``clock`` (how long to go on alone) and ``reporting`` (what the allocator hears).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from gpupool.model.assignment import (
    Assignment,
    AssignmentReport,
    AssignmentState,
    DesiredState,
    DeviceReport,
    Hello,
    ProcessNote,
    ProcessNoteKind,
    Report,
)
from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.ids import DeviceUuid, NodeId
from gpupool.model.inventory import Hca, NodeInventory
from gpupool.model.lease import ShareGiven
from gpupool_agent.core.adopting import Adoptable, examine
from gpupool_agent.core.adoptions import ADOPTIONS_MAX, Adoption, Adoptions
from gpupool_agent.core.assignments import AssignmentName
from gpupool_agent.core.book import Book
from gpupool_agent.core.clock import NodeClock
from gpupool_agent.core.devices import Devices
from gpupool_agent.core.environment import imex_environment, lease_environment
from gpupool_agent.core.events import (
    AdoptedEnded,
    AdoptionAnswered,
    AdoptionAsked,
    AdoptionComes,
    Checkpoint,
    CloseConnection,
    Connected,
    DesiredArrived,
    Disconnected,
    DriverSilent,
    HcasRead,
    HolderEnded,
    InventoryRead,
    Log,
    MpsChanged,
    NodeEffect,
    NodeEvent,
    NodeFault,
    SaveCheckpoint,
    SendReport,
    StepDone,
    StepFailed,
    StopFailed,
    TimePassed,
    UnwatchAdopted,
    UsageRead,
    WatchAdopted,
    WatchHolder,
)
from gpupool_agent.core.fence import TOMBSTONES_MAX, Fence
from gpupool_agent.core.holders import Holders
from gpupool_agent.core.lapsed import LapsedBonds
from gpupool_agent.core.membership import Bonds, stray_process
from gpupool_agent.core.rails import Rails
from gpupool_agent.core.reporting import MPS_FAULT, Faults, Outbox
from gpupool_agent.core.shares import shares_given
from gpupool_agent.core.stopping import OUT_OF_TIME_ONLY, Stopper, StopPolicy

DRIVER_FAULTS = ("nvml_hang", "driver_unavailable")
REASON_CHARS_MAX = 500
PROTOCOL_REVISIONS = (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSummary:
    """The node in few numbers; ``faults`` are the codes of the open ones.

    ``strays`` counts them by cause; ``stopped`` are the processes that were ended since
    the agent's start, ``adopted`` those that count to leases by adoption now.
    """

    connected: bool
    epoch: int
    holders: int
    faults: tuple[str, ...]
    strays: Mapping[str, int]
    stopped: int
    adopted: int


class Node:
    """Everything that an agent knows and decides.

    ``host`` is the inventory without devices and adapters. ``checkpoint`` None: the
    agent has never run here. ``rail_rate_mbps`` is as in ``Rails``, ``stops`` says which
    processes are ended.
    """

    def __init__(
        self,
        *,
        node_id: NodeId,
        boot_id: str,
        host: NodeInventory,
        checkpoint: Checkpoint | None,
        now: float,
        rail_rate_mbps: int = 0,
        stops: StopPolicy = OUT_OF_TIME_ONLY,
    ) -> None:
        old = checkpoint or Checkpoint(boot_id=boot_id)
        same_boot = old.boot_id == boot_id
        self._node_id = node_id
        self._boot_id = boot_id
        self._host = host
        self._hcas_read: tuple[Hca, ...] = ()
        self._hcas: tuple[Hca, ...] = ()
        self._rails = Rails(rail_rate_mbps)
        self._driver_version = ""
        self._now = now
        self._connected = False
        self.knows_wanted = False
        """Whether an allocator has said, since this agent's start, what shall run here."""
        self._changed = not same_boot
        self._inventory = host
        self._fence = Fence(
            epoch=old.epoch, revision=old.revision, floors=old.floors, tombstones=old.tombstones
        )
        self._devices = Devices()
        self._book = Book(self._fence, self._devices)
        self._holders = Holders(node_id)
        self._faults = Faults()
        self._adoptions = Adoptions(old.adoptions if same_boot else ())
        self._stopper = Stopper(stops)
        # Without its books an agent would take work that it has forgotten for strays.
        self._stopper.may_strays = checkpoint is not None and same_boot
        lost_s = old.contact_lost_s if same_boot and old.contact_lost_s is not None else now
        self._clock = NodeClock(min(lost_s, now))
        if same_boot:
            self._book.adopt(old.entries, now)
            self._holders.watched = {watch.lease_id: watch for watch in old.holders}
        else:
            self._book.forget_over_reboot(old.entries)
            self._holders.end_all(old.holders, "reboot")
        self._lapsed = LapsedBonds()
        self._outbox = Outbox(self._book, self._devices, self._holders, self._faults, self._bonds)

    def start(self, now: float) -> list[NodeEffect]:
        """What to do first: once, before any event."""
        watches: list[NodeEffect] = [
            WatchHolder(watch=watch) for watch in self._holders.watched.values()
        ]
        watches += [WatchAdopted(adoption=each) for each in self._adoptions.living.values()]
        return self._settled(watches, now)

    def handle(self, event: NodeEvent, now: float) -> list[NodeEffect]:
        """Take in an event; what to do about it, in order."""
        return self._settled(self._take(event, now), now)

    def next_deadline(self) -> float | None:
        """When TimePassed is due; None: nothing is waited for."""
        times = [
            *self._book.deadlines(),
            *self._clock.deadlines(self._book),
            *self._stopper.deadlines(),
        ]
        if self._connected:
            times.append(self._outbox.account_due_s)
        forget_s = self._devices.next_forget_s(self._book.in_use())
        if forget_s is not None:
            times.append(forget_s)
        return min(times, default=None)

    def hello(self, *, agent_version: str, agent_instance_id: str) -> Hello:
        """How the agent introduces itself on the connection that it opens, with what runs here."""
        self._outbox.said_in_hello(self._inventory)
        return Hello(
            node_id=self._node_id,
            boot_id=self._boot_id,
            agent_version=agent_version,
            agent_instance_id=agent_instance_id,
            protocol_revisions=PROTOCOL_REVISIONS,
            inventory=self._inventory,
            # Those too that ended while nobody listened: else they would be taken for lost,
            # and prepared again.
            assignments=tuple(self._reports()),
            devices=self.devices(),
            highest_epoch=self._fence.epoch,
        )

    def assignments(self) -> tuple[AssignmentReport, ...]:
        """What is on the node and has not ended, with its places."""
        return tuple(
            report for report in self._reports() if report.state is not AssignmentState.ENDED
        )

    def _reports(self) -> Iterator[AssignmentReport]:
        for kept in self._book.kept.values():
            yield kept.report(with_place=True, degraded=self._devices.degraded(kept))

    @property
    def hcas(self) -> tuple[Hca, ...]:
        """Network adapters at their last reading, with their rails."""
        return self._hcas

    def environment_of(self, assignment: Assignment, added: dict[str, str]) -> dict[str, str]:
        """The member's whole environment; ``added`` is what preparing adds to it.

        One that was prepared before keeps what its holder has got.
        """
        kept = self._book.kept.get((assignment.key, assignment.token))
        if kept is not None and kept.state is AssignmentState.PREPARED:
            return dict(kept.environment)
        return lease_environment(
            assignment, devices=self._inventory.devices, hcas=self._hcas, added=added
        )

    def imex_environment(self, assignment: Assignment, channels: Sequence[int]) -> dict[str, str]:
        """What the node's IMEX channels add to a member's environment."""
        return imex_environment(assignment, devices=self._inventory.devices, channels=channels)

    def devices(self) -> tuple[DeviceReport, ...]:
        """State of every device."""
        return tuple(self._outbox.devices_now().values())

    def device_uuids(self) -> tuple[DeviceUuid, ...]:
        """Every device, in the driver's order."""
        return tuple(self._devices.known)

    def slices_on(self, uuid: DeviceUuid) -> frozenset[AssignmentName]:
        """Assignments that need MPS on a device, or have something of it there."""
        return self._book.slices_on(uuid)

    def sm_count(self, uuid: DeviceUuid) -> int:
        """Multiprocessors of a device, 0: unknown."""
        known = self._devices.known.get(uuid)
        return known.device.sm_count if known is not None else 0

    def summary(self) -> NodeSummary:
        """What the node's metrics show."""
        return NodeSummary(
            connected=self._connected,
            epoch=self._fence.epoch,
            holders=len(self._holders.watched),
            faults=tuple(code for code, _ in self._faults.open),
            strays=Counter(stray.cause for report in self.devices() for stray in report.strays),
            stopped=self._stopper.stopped,
            adopted=len(self._adoptions.living),
        )

    def heartbeat(self) -> Report:
        """Says that the node and these holders live; changes nothing."""
        return Report(alive_holders=self._holders.alive(), accepted_revision=self._fence.revision)

    def _take(self, event: NodeEvent, now: float) -> list[NodeEffect]:
        match event:
            case Connected():
                return self._connect(event, now)
            case Disconnected():
                self._connected = False
                self._outbox.end()
                self._changed |= self._clock.lose(now)
            case DesiredArrived():
                return self._desire(event.desired, now)
            case InventoryRead():
                self._enumerate(event, now)
            case HcasRead():
                self._hcas_read = event.hcas
                self._number_rails()
            case UsageRead():
                self._devices.read(event.devices, event.started_s)
                self._hear_driver(event.unix_s)
            case DriverSilent():
                self._devices.silent = event.reason
                self._faults.raise_(event.code, None, event.reason, event.unix_s)
            case StepDone():
                self._finish(event, now)
            case StepFailed():
                self._book.step_failed((event.key, event.token), event.reason, now)
            case HolderEnded():
                self._changed |= self._holders.end(event.watch, event.reason)
            case NodeFault():
                if event.open:
                    self._faults.raise_(event.code, None, event.evidence, event.unix_s)
                else:
                    self._faults.close(event.code, None, event.unix_s)
            case MpsChanged():
                self._mps_changed(event)
            case StopFailed():
                self._stopper.failed(event.pid, event.start_ticks)
            case AdoptionComes():
                self._stopper.spare(event.pid, over=event.over)
            case AdoptionAsked():
                return self._adopt(event)
            case AdoptedEnded():
                self._changed |= self._adoptions.end(event.adoption)
            case TimePassed():
                pass
            case _:
                assert_never(event)
        return []

    def _connect(self, event: Connected, now: float) -> list[NodeEffect]:
        refusal = self._fence.refuse_welcome(event.welcome.epoch)
        if refusal:
            return [
                Log(event="allocator.refused", details={"reason": refusal}),
                CloseConnection(reason=refusal),
            ]
        self._connected = True
        self._changed |= self._clock.contact()
        self._changed |= self._fence.enter(event.welcome.epoch)
        self._outbox.begin(event.welcome.report_interval_s, now)
        return []

    def _desire(self, desired: DesiredState, now: float) -> list[NodeEffect]:
        refusal = self._fence.refuse_desired(desired)
        if refusal:
            return [Log(event="desired_state.refused", details={"reason": refusal})]
        self.knows_wanted = True
        self._changed |= self._fence.enter(desired.epoch)
        if desired.revision > self._fence.revision:
            self._fence.revision = desired.revision
            self._changed = True
        self._stopper.may_strays = True
        before = dict(self._holders.watched)
        effects = self._book.apply(desired, now)
        unclaimed = {key.lease_id for key in desired.unclaimed}
        effects += self._holders.apply(desired.holders, unclaimed)
        self._changed |= before != self._holders.watched
        return effects

    def _adopt(self, asked: AdoptionAsked) -> list[NodeEffect]:
        found: Adoptable | Refused
        if self._stopper.is_ending(asked.pid, asked.start_ticks):
            why = f"process {asked.pid} is being ended already"
            found = Refused(kind=ErrorKind.WRONG_STATE, field="pid", message=why)
        else:
            found = examine(asked, self._book, self._devices, self._bonds())
        if isinstance(found, Refused):
            return [AdoptionAnswered(number=asked.number, refused=found)]
        adoption = Adoption(
            lease_id=asked.lease_id,
            pid=asked.pid,
            start_ticks=asked.start_ticks,
            actor=asked.asker,
        )
        self._adoptions.living[asked.pid] = adoption
        self._changed = True
        for uuid in found.device_uuids:
            note = ProcessNote(
                kind=ProcessNoteKind.ADOPTED,
                device_uuid=uuid,
                process=stray_process(found.process, asked.lease_id),
                actor=asked.asker,
            )
            self._outbox.note(note)
        answer = AdoptionAnswered(
            number=asked.number, device_uuids=found.device_uuids, command=found.process.command
        )
        return [WatchAdopted(adoption=adoption), answer]

    def _bonds(self) -> Bonds:
        living = Bonds(self._holders.pids(), self._adoptions.living)
        return self._lapsed.with_living(living, self._devices, self._now)

    def _enumerate(self, event: InventoryRead, now: float) -> None:
        self._devices.enumerate(event.inventory, now)
        self._number_rails()
        self._driver_version = event.inventory.driver_version
        self._hear_driver(event.unix_s)
        if event.inventory.unreadable:
            evidence = "; ".join(event.inventory.unreadable)
            self._faults.raise_("gpu_unreadable", None, evidence, event.unix_s)
        else:
            self._faults.close("gpu_unreadable", None, event.unix_s)

    def _number_rails(self) -> None:
        devices = [known.device for known in self._devices.known.values()]
        self._hcas = self._rails.number(self._hcas_read, devices)

    def _hear_driver(self, unix_s: float) -> None:
        for code in DRIVER_FAULTS:
            self._faults.close(code, None, unix_s)
        self._faults.update(self._devices, unix_s)

    def _mps_changed(self, event: MpsChanged) -> None:
        reason = event.reason[:REASON_CHARS_MAX]
        if reason:
            self._devices.mps_troubles[event.uuid] = reason
            # Told anew, since the reason may be another one.
            self._faults.close(MPS_FAULT, event.uuid, event.unix_s)
            self._faults.raise_(MPS_FAULT, event.uuid, reason, event.unix_s)
        else:
            self._devices.mps_troubles.pop(event.uuid, None)
            self._faults.close(MPS_FAULT, event.uuid, event.unix_s)

    def _finish(self, event: StepDone, now: float) -> None:
        kept = self._book.kept.get((event.key, event.token))
        environment: dict[str, str] = {}
        given: tuple[ShareGiven, ...] = ()
        if kept is not None and kept.state is AssignmentState.PREPARING:
            environment = self.environment_of(kept.assignment, event.environment)
            given = shares_given(kept.assignment, self._inventory.devices, event.sm_counts)
        self._book.step_done((event.key, event.token), environment, now, given)

    def _settled(self, effects: list[NodeEffect], now: float) -> list[NodeEffect]:
        """Take every step that is due, and put the checkpoint before and the news after."""
        self._now = now
        bonds = self._bonds()
        effects = [*effects, *self._clock.settle(self._book, now)]
        effects += self._book.settle(now, bonds)
        effects += self._stopper.settle(self._book, self._devices, now, bonds)
        for note in self._stopper.take_notes():
            self._outbox.note(note)
        effects += self._forget_adoptions()
        self._devices.forget_absent(now, self._book.in_use())
        self._inventory = NodeInventory(
            devices=tuple(known.device for known in self._devices.known.values()),
            hcas=self._hcas,
            cpu_milli=self._host.cpu_milli,
            host_memory_mib=self._host.host_memory_mib,
            labels=self._host.labels,
            simulated=self._host.simulated,
            driver_version=self._driver_version,
            hostname=self._host.hostname,
        )
        if self._connected:
            report = self._outbox.report(self._inventory, self._fence.revision, now)
            if report is not None:
                effects.append(SendReport(report=report))
        if self._changed or self._book.changed:
            self._changed = self._book.changed = False
            effects.insert(0, SaveCheckpoint(checkpoint=self.checkpoint()))
        return effects

    def _forget_adoptions(self) -> list[NodeEffect]:
        """Those of leases that have nothing on the node any more."""
        if not self._adoptions.living:
            return []
        here = {
            kept.assignment.key.lease_id
            for kept in self._book.kept.values()
            if kept.state is not AssignmentState.ENDED
        }
        over = self._adoptions.keep_of(here)
        self._changed |= bool(over)
        return [UnwatchAdopted(pid=each.pid) for each in over]

    def checkpoint(self) -> Checkpoint:
        """What must survive a restart of the agent."""
        return Checkpoint(
            boot_id=self._boot_id,
            epoch=self._fence.epoch,
            revision=self._fence.revision,
            contact_lost_s=self._clock.lost_s,
            entries=self._book.entries(),
            holders=tuple(self._holders.watched.values()),
            floors=self._fence.floors(),
            tombstones=self._fence.tombstones(),
            adoptions=tuple(self._adoptions.living.values()),
        )

    def check(self) -> None:
        """Assert everything that must hold between two events."""
        self._book.check()
        assert not set(self._holders.watched) & set(self._holders.ended)
        assert len(self._fence.tombstones()) <= TOMBSTONES_MAX
        assert len(self._adoptions.living) <= ADOPTIONS_MAX
        assert not (self._connected and self._clock.lost_s is not None)
