"""Small values with good defaults for tests of the agent's core."""

from gpupool.model.assignment import (
    Assignment,
    AssignmentKey,
    AssignmentReport,
    DesiredState,
    HolderWatch,
    Welcome,
)
from gpupool.model.caller import ProcessRef
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId
from gpupool.model.inventory import Device, NodeInventory
from gpupool.model.lease import DeviceShare, Place
from gpupool_agent.core.events import (
    Checkpoint,
    CleanUp,
    Connected,
    DesiredArrived,
    InventoryRead,
    NodeEffect,
    NodeEvent,
    Prepare,
    ReadUsage,
    SaveCheckpoint,
    SendReport,
    StepDone,
    TimePassed,
    UsageRead,
)
from gpupool_agent.core.node import Node
from gpupool_agent.core.readings import DeviceProcess, DeviceState, DriverInventory
from gpupool_agent.core.stopping import OUT_OF_TIME_ONLY, StopPolicy

NODE = NodeId("n1")
BOOT = "boot-1"
TICK_S = 0.001


def gpu(number: int) -> DeviceUuid:
    return DeviceUuid(f"GPU-{number}")


def inventory(*numbers: int) -> DriverInventory:
    return DriverInventory(
        devices=tuple(
            Device(uuid=gpu(number), model="H100", memory_mib=80000, index=number)
            for number in numbers
        )
    )


def key(lease: str, rank: int = 0) -> AssignmentKey:
    return AssignmentKey(lease_id=LeaseId(lease), rank=rank)


def whole(number: int) -> DeviceShare:
    return DeviceShare(device_uuid=gpu(number), share_pct=100, memory_mib=80000, whole=True)


def part(number: int, share_pct: int) -> DeviceShare:
    return DeviceShare(
        device_uuid=gpu(number), share_pct=share_pct, memory_mib=800 * share_pct, whole=False
    )


def assignment(
    lease: str,
    token: int,
    *shares: DeviceShare,
    uid: int = 1000,
    rank: int = 0,
    disconnect_s: float = 3600.0,
) -> Assignment:
    return Assignment(
        key=key(lease, rank),
        group="main",
        token=token,
        place=Place(node_id=NODE, devices=shares),
        uid=uid,
        disconnect_s=disconnect_s,
        world_size=1,
    )


def holder(lease: str, pid: int, start_ticks: int = 1) -> HolderWatch:
    return HolderWatch(
        lease_id=LeaseId(lease),
        process=ProcessRef(node_id=NODE, pid=pid, start_ticks=start_ticks),
    )


def welcome(epoch: int = 1) -> Connected:
    return Connected(
        welcome=Welcome(
            epoch=epoch,
            protocol_revision=1,
            allocator_version="0.1.0",
            heartbeat_timeout_s=10.0,
            report_interval_s=5.0,
        )
    )


def process(
    pid: int,
    *,
    lease: str | None = "",
    memory_mib: int = 500,
    start_ticks: int = 1,
    uid: int = 1000,
    ancestors: tuple[int, ...] = (),
    through_mps: bool | None = None,
) -> DeviceProcess:
    return DeviceProcess(
        pid=pid,
        start_ticks=start_ticks,
        uid=uid,
        user="ada",
        command="python train.py",
        memory_mib=memory_mib,
        lease_id=lease,
        ancestors=ancestors,
        through_mps=through_mps,
    )


class Bench:
    """A node on a bench: real core, virtual clock, and a machine made of two dicts.

    Steps are answered at once and readings given as they are asked for, unless
    ``answers`` is switched off.
    """

    def __init__(
        self,
        *numbers: int,
        checkpoint: Checkpoint | None = None,
        boot: str = BOOT,
        connect: bool = True,
        now: float = 1000.0,
        stops: StopPolicy = OUT_OF_TIME_ONLY,
    ) -> None:
        self.now = now
        self.processes: dict[DeviceUuid, list[DeviceProcess]] = {}
        self.used_mib: dict[DeviceUuid, int] = {}
        self.numbers = numbers
        self.answers = True
        self.effects: list[NodeEffect] = []
        self.checkpoint = checkpoint
        self.node = Node(
            node_id=NODE,
            boot_id=boot,
            host=NodeInventory(),
            checkpoint=checkpoint,
            now=now,
            stops=stops,
        )
        self._perform(self.node.start(now))
        self.send(InventoryRead(inventory=inventory(*numbers)))
        self.read()
        if connect:
            self.send(welcome())

    def send(self, event: NodeEvent) -> list[NodeEffect]:
        self.now += TICK_S
        effects = self.node.handle(event, self.now)
        self.node.check()
        self._perform(effects)
        return effects

    def read(self) -> None:
        """Read the machine as it is now."""
        states = tuple(
            DeviceState(
                uuid=gpu(number),
                processes=tuple(self.processes.get(gpu(number), ())),
                memory_used_mib=self.used_mib.get(
                    gpu(number),
                    4 + sum(each.memory_mib for each in self.processes.get(gpu(number), ())),
                ),
            )
            for number in self.numbers
        )
        self.send(UsageRead(started_s=self.now, devices=states))

    def desire(self, revision: int, *wanted: Assignment, epoch: int = 1, **more: object) -> None:
        self.send(
            DesiredArrived(
                desired=DesiredState(
                    revision=revision,
                    epoch=epoch,
                    assignments=wanted,
                    **more,  # type: ignore[arg-type]
                )
            )
        )

    def wait(self, seconds: float) -> None:
        """Let time pass, stopping at each deadline of the node."""
        until = self.now + seconds
        for _ in range(10_000):
            due = self.node.next_deadline()
            if due is None or due > until:
                break
            self.now = max(self.now, due)
            self.send(TimePassed())
        else:
            raise AssertionError("the node never stops asking for time")
        self.now = until

    def states(self) -> dict[tuple[str, int], str]:
        """Lease and token of everything that has not ended, with its state."""
        return {
            (each.key.lease_id, each.token): each.state.value for each in self.node.assignments()
        }

    def reports(self) -> list[SendReport]:
        return [each for each in self.effects if isinstance(each, SendReport)]

    def take(self) -> list[NodeEffect]:
        effects, self.effects = self.effects, []
        return effects

    def _perform(self, effects: list[NodeEffect]) -> None:
        self.effects += effects
        for effect in effects:
            if isinstance(effect, SaveCheckpoint):
                self.checkpoint = effect.checkpoint
            elif self.answers and isinstance(effect, Prepare | CleanUp):
                done = effect.assignment
                self.send(StepDone(key=done.key, token=done.token))
            elif self.answers and isinstance(effect, ReadUsage):
                self.read()


def last_report(bench: Bench, lease: str) -> AssignmentReport:
    """What was last told about an assignment of a lease."""
    found = [
        each
        for effect in bench.reports()
        for each in effect.report.assignments
        if each.key.lease_id == lease
    ]
    return found[-1]
