"""The agent's core under any order of events: its promises hold after every step.

The machine around it is honest but unkind: steps answer late, fail or never, old
desired states come again, processes outlive their leases, the driver falls silent,
devices vanish, the agent restarts and the host reboots. Strays are stopped, and users
take processes into leases.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.agent_bench import (
    Bench,
    assignment,
    gpu,
    holder,
    inventory,
    part,
    process,
    welcome,
    whole,
)

from gpupool.model.assignment import Assignment, AssignmentState, DesiredState
from gpupool.model.ids import LeaseId
from gpupool_agent.core.events import (
    AdoptedEnded,
    AdoptionAsked,
    CleanUp,
    Connected,
    DesiredArrived,
    Disconnected,
    DriverSilent,
    HolderEnded,
    InventoryRead,
    NodeEffect,
    Prepare,
    StepDone,
    StepFailed,
    StopProcess,
)
from gpupool_agent.core.stopping import StopPolicy

GPUS = (0, 1, 2)
STOPS = StopPolicy(leftovers=True, strays=True)
LEASES = ("a", "ab", "b", "c")
DISCONNECT_S = 300.0


class WatchedBench(Bench):
    """Looks at each process that is to be stopped, at the moment when that is decided."""

    def _perform(self, effects: list[NodeEffect]) -> None:
        for effect in effects:
            if isinstance(effect, StopProcess):
                self.check_stop(effect)
        super()._perform(effects)

    def check_stop(self, stop: StopProcess) -> None:
        """Nobody stops what a running lease has on its own GPU."""
        book, adopted = self.node._book, self.node._adoptions.living
        found = [each for each in self.node._devices.processes(stop.gpu) if each.pid == stop.pid]
        assert found, "it is not on the GPU"
        leases = {found[0].lease_id}
        if stop.pid in adopted:
            leases = {adopted[stop.pid].lease_id}
        for kept in book.kept.values():
            on = {share.device_uuid for share in kept.assignment.place.devices}
            running = kept.state is AssignmentState.PREPARED and stop.gpu in on
            assert not (running and kept.assignment.key.lease_id in leases), stop


class AgentMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = WatchedBench(*GPUS, stops=STOPS)
        self.bench.answers = False
        self.boots = 1
        self.epoch = 1
        self.revision = 0
        self.token = 0
        self.wanted: dict[str, Assignment] = {}
        self.history: list[DesiredState] = []
        self.steps: list[Prepare | CleanUp] = []
        self.ended: set[tuple[str, int]] = set()
        self.pid = 100
        self.reported = 0

    # -- the allocator -------------------------------------------------------

    @rule(lease=st.sampled_from(LEASES), number=st.sampled_from(GPUS), share=st.integers(0, 10))
    def grant(self, lease: str, number: int, share: int) -> None:
        self.token += 1
        shares = (whole(number),) if share == 0 else (part(number, share * 10),)
        self.wanted[lease] = assignment(lease, self.token, *shares, disconnect_s=DISCONNECT_S)
        self.tell()

    @rule(lease=st.sampled_from(LEASES))
    def release(self, lease: str) -> None:
        self.wanted.pop(lease, None)
        self.tell()

    def tell(self) -> None:
        self.revision += 1
        desired = DesiredState(
            revision=self.revision,
            epoch=self.epoch,
            assignments=tuple(self.wanted.values()),
            holders=tuple(holder(lease, 50 + len(lease)) for lease in self.wanted),
        )
        self.history.append(desired)
        self.send(DesiredArrived(desired=desired))

    @rule(data=st.data())
    @precondition(lambda self: self.history)
    def a_late_desired_state_comes_again(self, data: st.DataObject) -> None:
        before = self.bench.states()
        late = data.draw(st.sampled_from(self.history))
        self.send(DesiredArrived(desired=late))
        if late is not self.history[-1]:
            after = self.bench.states()
            assert set(after) <= set(before)
            ended = {name for name in before if after.get(name, "ending") == "ending"}
            assert all(before[name] == "ending" for name in ended)

    @rule()
    def the_allocator_restarts(self) -> None:
        self.send(Disconnected())
        self.epoch += 1
        self.revision = 0
        self.send(welcome(epoch=self.epoch))
        self.tell()

    @rule()
    def the_connection_breaks(self) -> None:
        self.send(Disconnected())

    @rule()
    def the_connection_is_back(self) -> None:
        self.send(welcome(epoch=self.epoch))
        self.tell()

    # -- the machine ---------------------------------------------------------

    @rule(data=st.data(), fails=st.booleans())
    @precondition(lambda self: self.steps)
    def a_step_answers(self, data: st.DataObject, fails: bool) -> None:
        step = self.steps.pop(data.draw(st.integers(0, len(self.steps) - 1)))
        key, token = step.assignment.key, step.assignment.token
        if fails:
            self.send(StepFailed(key=key, token=token, reason="it did not work"))
        else:
            self.send(StepDone(key=key, token=token))

    @rule()
    def the_devices_are_read(self) -> None:
        self.bench.read()
        self.gather()

    @rule(number=st.sampled_from(GPUS), lease=st.sampled_from((*LEASES, "", None)))
    def a_process_starts(self, number: int, lease: str | None) -> None:
        self.pid += 1
        self.bench.processes.setdefault(gpu(number), []).append(process(self.pid, lease=lease))

    @rule(number=st.sampled_from(GPUS))
    def the_processes_of_a_device_end(self, number: int) -> None:
        self.bench.processes[gpu(number)] = []
        living = {each.pid for listed in self.bench.processes.values() for each in listed}
        for adoption in list(self.bench.node._adoptions.living.values()):
            if adoption.pid not in living:
                self.send(AdoptedEnded(adoption=adoption))

    @rule(data=st.data(), lease=st.sampled_from(LEASES), asker=st.sampled_from((0, 1000, 1001)))
    @precondition(lambda self: any(self.bench.processes.values()))
    def a_user_adopts_a_process(self, data: st.DataObject, lease: str, asker: int) -> None:
        there = [each for listed in self.bench.processes.values() for each in listed]
        chosen = data.draw(st.sampled_from(there))
        asked = AdoptionAsked(
            number=1,
            lease_id=LeaseId(lease),
            pid=chosen.pid,
            start_ticks=chosen.start_ticks,
            process_uid=chosen.uid,
            asker_uid=asker,
            asker="ada",
        )
        before = dict(self.bench.node._adoptions.living)
        self.send(asked)
        after = self.bench.node._adoptions.living
        if asker == 1001:
            assert set(after) <= set(before)

    @rule()
    def the_driver_falls_silent(self) -> None:
        self.send(DriverSilent(code="nvml_hang", reason="no answer"))

    @rule(numbers=st.sets(st.sampled_from(GPUS)))
    def the_devices_are_enumerated(self, numbers: set[int]) -> None:
        self.bench.numbers = tuple(sorted(numbers))
        self.send(InventoryRead(inventory=inventory(*self.bench.numbers)))

    @rule(lease=st.sampled_from(LEASES))
    def a_holder_ends(self, lease: str) -> None:
        self.send(HolderEnded(watch=holder(lease, 50 + len(lease)), reason="exited"))

    @rule(seconds=st.sampled_from((1.0, 31.0, DISCONNECT_S + 1)))
    def time_passes(self, seconds: float) -> None:
        self.bench.wait(seconds)
        self.gather()

    @rule(reboot=st.booleans())
    def the_agent_restarts(self, reboot: bool) -> None:
        if reboot:
            self.boots += 1
            self.bench.processes.clear()
        old = self.bench
        self.steps.clear()
        self.bench = WatchedBench(
            *old.numbers,
            checkpoint=old.checkpoint,
            boot=f"boot-{self.boots}",
            connect=False,
            now=10.0 if reboot else old.now,
            stops=STOPS,
        )
        self.bench.answers = False
        self.bench.processes = old.processes
        self.reported = 0
        self.gather()
        if reboot:
            assert self.bench.states() == {}

    # -- what holds ----------------------------------------------------------

    def send(self, event: Connected | DesiredArrived | object) -> None:
        self.bench.send(event)  # type: ignore[arg-type]
        self.gather()

    def gather(self) -> None:
        """Collect the steps that are asked for and the ends that are told."""
        for effect in self.bench.effects[self.reported :]:
            if isinstance(effect, Prepare | CleanUp):
                self.steps.append(effect)
        self.reported = len(self.bench.effects)
        for effect in self.bench.reports():
            for each in effect.report.assignments:
                if each.state is AssignmentState.ENDED:
                    self.ended.add((each.key.lease_id, each.token))

    @invariant()
    def the_core_keeps_its_own_promises(self) -> None:
        self.bench.node.check()

    @invariant()
    def what_was_told_to_have_ended_never_comes_back(self) -> None:
        active = {
            name
            for name, state in self.bench.states().items()
            if state in ("preparing", "prepared", "ending")
        }
        assert not active & self.ended

    @invariant()
    def a_prepared_assignment_has_its_environment(self) -> None:
        for each in self.bench.node.assignments():
            if each.state is AssignmentState.PREPARED:
                assert each.environment["GPUPOOL_TOKEN"] == str(each.token)

    def teardown(self) -> None:
        """Liveness: on a well-behaved machine everything that is not wanted ends."""
        bench = self.bench
        bench.processes.clear()
        bench.numbers = GPUS
        self.send(welcome(epoch=self.epoch))
        self.send(InventoryRead(inventory=inventory(*GPUS)))
        bench.answers = True
        for step in self.steps:
            bench.send(StepDone(key=step.assignment.key, token=step.assignment.token))
        bench.read()
        self.wanted.clear()
        self.tell()
        bench.wait(120)
        assert bench.states() == {}
        assert all(each.clean for each in bench.node.devices())


TestAgentMachine = AgentMachine.TestCase
TestAgentMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
