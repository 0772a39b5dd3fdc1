"""A node of the simulation: the agent's real core over GPUs that are numbers.

Preparing takes a moment and sometimes fails. A prepared assignment is used by one
process, which its holder ends some time after the lease began to end, as jobs do.
"""

from collections.abc import Callable
from dataclasses import replace

from tests.core_world import inventory
from tests.simulation.clock import Clock
from tests.simulation.wire import Allocator, Link

from gpupool.model.assignment import Assignment, AssignmentKey, DesiredState, Report, Welcome
from gpupool.model.ids import ConnectionId, DeviceUuid, NodeId
from gpupool_agent.core.events import (
    Checkpoint,
    CleanUp,
    CloseConnection,
    Connected,
    DesiredArrived,
    Disconnected,
    HcasRead,
    InventoryRead,
    Log,
    NodeEffect,
    NodeEvent,
    Prepare,
    ReadUsage,
    SaveCheckpoint,
    SendReport,
    StepDone,
    StepFailed,
    StopProcess,
    TimePassed,
    UnwatchHolder,
    UsageRead,
    WatchHolder,
)
from gpupool_agent.core.node import Node
from gpupool_agent.core.readings import DeviceProcess, DeviceState, DriverInventory, FailedDevice

IDLE_MIB = 500


class Machine:
    """One host with its agent."""

    def __init__(self, clock: Clock, name: str, gpus: int, allocator: Allocator) -> None:
        self.clock = clock
        self.node_id = NodeId(name)
        self.inventory = inventory(name, gpus)
        self.allocator = allocator
        self.boots = 1
        self.starts = 0
        self.cut_off = False
        self.refuse_pct = 0
        self.lost: set[DeviceUuid] = set()
        self.processes: dict[AssignmentKey, tuple[int, Assignment]] = {}
        self.pids = 100
        self.forgot = 0
        self.checkpoint: Checkpoint | None = None
        self.link: Link | None = None
        self.node: Node | None = None
        self.start_agent()

    # -- the agent's life ----------------------------------------------------------

    def start_agent(self) -> None:
        """The agent starts, from its checkpoint."""
        self.starts += 1
        host = replace(self.inventory, devices=())
        node = Node(
            node_id=self.node_id,
            boot_id=f"boot-{self.boots}",
            host=host,
            checkpoint=self.checkpoint,
            now=self.clock.now,
        )
        self.node = node
        self._perform(node, node.start(self.clock.now))
        self._handle(node, HcasRead(hcas=()))
        self._handle(node, InventoryRead(inventory=self._enumerated()))
        self._handle(node, self._usage())
        self._poll(node)
        self._connect(node)

    def kill_agent(self) -> None:
        """kill -9: what it has not saved is gone, what it prepared stays."""
        self.node = None
        self._hang_up()

    def reboot(self) -> None:
        """The host restarts: no process lives on."""
        self.kill_agent()
        self.boots += 1
        self.processes.clear()
        self.start_agent()

    def lose_assignment(self) -> None:
        """The agent's core forgets what it runs, without a word; its job dies some time later."""
        if self.node is None:
            return
        book = self.node._book
        idle = [name for name, kept in book.kept.items() if kept.step is None]
        if not idle:
            return
        key, token = self.clock.chance.choice(idle)
        del book.kept[key, token]
        book._index = None
        self.forgot += 1
        running = self.processes.get(key)
        if running is not None and running[1].token == token:
            self.clock.after(
                self.clock.chance.uniform(0.0, 20.0), lambda: self._job_ends(key, running[0])
            )

    def _handle(self, node: Node, event: NodeEvent) -> None:
        if node is not self.node:
            return  # an answer for an agent that is gone
        effects = node.handle(event, self.clock.now)
        node.check()
        self._perform(node, effects)

    def _perform(self, node: Node, effects: list[NodeEffect]) -> None:
        for effect in effects:
            match effect:
                case SaveCheckpoint(checkpoint=checkpoint):
                    self.checkpoint = checkpoint
                case Prepare():
                    self._later(lambda effect=effect: self._prepare(node, effect))
                case CleanUp(assignment=assignment):
                    self._later(lambda a=assignment: self._clean_up(node, a))
                case ReadUsage():
                    self._later(lambda: self._handle(node, self._usage()))
                case SendReport(report=report):
                    self._send(report)
                case CloseConnection():
                    self._hang_up()
                case StopProcess(pid=pid):
                    for key, (running, _) in list(self.processes.items()):
                        if running == pid:
                            del self.processes[key]
                case WatchHolder() | UnwatchHolder() | Log():
                    pass
        deadline = node.next_deadline()
        if deadline is not None:
            self.clock.after(
                deadline - self.clock.now + 0.001, lambda: self._time_passed(node, deadline)
            )

    def _later(self, do: Callable[[], None]) -> None:
        self.clock.after(self.clock.chance.uniform(0.001, 0.2), do)

    def _time_passed(self, node: Node, deadline: float) -> None:
        if node is self.node and (node.next_deadline() or 0.0) == deadline:
            self._handle(node, TimePassed())

    def _poll(self, node: Node) -> None:
        if node is not self.node:
            return
        self._handle(node, InventoryRead(inventory=self._enumerated()))
        self._handle(node, self._usage())
        self._send(node.heartbeat())
        self.clock.after(self.clock.chance.uniform(1.5, 2.5), lambda: self._poll(node))

    # -- the hardware --------------------------------------------------------------

    def _prepare(self, node: Node, step: Prepare) -> None:
        if node is not self.node:
            return
        assignment = step.assignment
        key, token = assignment.key, assignment.token
        if not step.adopted and self.clock.chance.randrange(100) < self.refuse_pct:
            self._handle(node, StepFailed(key=key, token=token, reason="the driver said no"))
            return
        if key not in self.processes and assignment.place.devices:
            self.pids += 1
            self.processes[key] = (self.pids, assignment)
        self._handle(node, StepDone(key=key, token=token, environment={}))

    def _clean_up(self, node: Node, assignment: Assignment) -> None:
        if node is not self.node:
            return
        running = self.processes.get(assignment.key)
        if running is not None and running[1].token <= assignment.token:
            # The job notices and goes, in its own time.
            self.clock.after(
                self.clock.chance.uniform(0.0, 3.0),
                lambda: self._job_ends(assignment.key, running[0]),
            )
        self._handle(node, StepDone(key=assignment.key, token=assignment.token))

    def _job_ends(self, key: AssignmentKey, pid: int) -> None:
        if key in self.processes and self.processes[key][0] == pid:
            del self.processes[key]

    def _enumerated(self) -> DriverInventory:
        return DriverInventory(
            devices=self.inventory.devices,
            failed=tuple(
                FailedDevice(uuid=uuid, code="gpu_lost", reason="off the bus")
                for uuid in sorted(self.lost)
            ),
        )

    def _usage(self) -> UsageRead:
        return UsageRead(
            started_s=self.clock.now,
            devices=tuple(self._device_state(device.uuid) for device in self.inventory.devices),
        )

    def _device_state(self, uuid: DeviceUuid) -> DeviceState:
        if uuid in self.lost:
            gone = FailedDevice(uuid=uuid, code="gpu_lost", reason="off the bus")
            return DeviceState(uuid=uuid, processes=None, memory_used_mib=None, failed=gone)
        here = [
            (pid, key)
            for key, (pid, assignment) in sorted(self.processes.items())
            if any(share.device_uuid == uuid for share in assignment.place.devices)
        ]
        return DeviceState(
            uuid=uuid,
            processes=tuple(
                DeviceProcess(pid=pid, memory_mib=10, lease_id=key.lease_id) for pid, key in here
            ),
            memory_used_mib=IDLE_MIB + 10 * len(here),
        )

    # -- the network ---------------------------------------------------------------

    def _connect(self, node: Node) -> None:
        if node is not self.node or (self.link is not None and self.link.open):
            return
        if self.cut_off or not self.allocator.serving:
            self.clock.after(self.clock.chance.uniform(0.2, 1.0), lambda: self._connect(node))
            return
        link = Link(self.clock, ConnectionId(self.allocator.next_id()))
        self.link = link
        hello = node.hello(agent_version="0.1.0", agent_instance_id=f"agent-{self.starts}")
        link.down = lambda message: self._received(node, link, message)
        link.closed = lambda: self._link_closed(node, link)
        self.allocator.accept(link, hello)

    def _received(self, node: Node, link: Link, message: Welcome | DesiredState) -> None:
        if link is not self.link:
            return
        if isinstance(message, Welcome):
            self._handle(node, Connected(welcome=message))
        else:
            self._handle(node, DesiredArrived(desired=message))

    def _link_closed(self, node: Node, link: Link) -> None:
        if link is self.link:
            self.link = None
            self._handle(node, Disconnected())
            self.clock.after(self.clock.chance.uniform(0.2, 1.0), lambda: self._connect(node))

    def _send(self, report: Report) -> None:
        if self.link is not None:
            self.link.send_up(report)

    def _hang_up(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None
