"""The core under everything that can happen to it, in any order.

After each step every promise is asserted (``World.handle`` calls ``Pool.check``), and
the machine adds what only an onlooker can see: what was acknowledged is never lost,
tokens of a device only grow, a history replayed gives the pool's own state.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.core_world import World, inventory, part, spec, whole
from tests.played_node import PlayedNode

from gpupool.model.caller import ProcessRef
from gpupool.model.event import Event
from gpupool.model.hold import HoldScope
from gpupool.model.ids import CommandId, NodeId
from gpupool.model.lease import ENDED, Lease, LeaseState
from gpupool.model.request import LeaseSpec, Level, OnFailure, TopologyConstraint
from gpupool_allocator.core.events import WritesAccepted, WritesRefused
from gpupool_allocator.core.settings import PoolSettings

NODES = {"n1": 4, "n10": 2, "n2": 1, "cpu": 0}

CORRECTIONS = {
    "assignment.gone",
    "assignment.unclaimed",
    "assignment.unwanted",
    "device.unconfirmed",
    "holder.unwanted",
    "holder.unwatched",
    "member.ended",
    "member.preparing",
}
"""Events that say that book and account differed."""

_policies = st.sampled_from([None, OnFailure.STOP, OnFailure.WAIT])
_spreads = st.sampled_from(
    [
        TopologyConstraint(),
        TopologyConstraint(required=Level.NODE),
        TopologyConstraint(spread=Level.NODE),
        TopologyConstraint(preferred=Level.NODE),
    ]
)


@st.composite
def specs(draw: st.DrawFn) -> LeaseSpec:
    """Requests of every built kind, most of which fit an idle pool."""
    more = {
        "uid": draw(st.sampled_from([0, 1001])),
        "priority": draw(st.integers(0, 2)),
        "tenant": draw(st.sampled_from(["red", "blue"])),
        "max_duration_s": draw(st.sampled_from([None, 5.0, 50.0])),
        "on_failure": draw(_policies),
        "cpu_milli": draw(st.sampled_from([0, 1000, 90_000])),
        "replicas": draw(st.integers(1, 3)),
        "topology": draw(_spreads),
    }
    kind = draw(st.sampled_from(["whole", "share", "memory", "none"]))
    if kind == "whole":
        return whole(draw(st.integers(1, 4)), **more)
    if kind == "share":
        return part(draw(st.sampled_from([10, 30, 50, 100])), **more)
    if kind == "memory":
        return part(0, draw(st.sampled_from([100, 30_000])), **more)
    return spec(None, **more)


class PoolMachine(RuleBasedStateMachine):
    """One pool, four hosts, any order of events."""

    leases = Bundle("leases")
    holds = Bundle("holds")

    @initialize()
    def start(self) -> None:
        self.world = World(PoolSettings(queue_max=6, ended_kept=5, reservation_s=3.0))
        for name, gpus in NODES.items():
            self.world.nodes[NodeId(name)] = PlayedNode(NodeId(name), inventory(name, gpus))
            self.world.connect(self.world.nodes[NodeId(name)])
        self.forgetful: set[str] = set()

    # -- callers -----------------------------------------------------------------

    @rule(
        target=leases,
        wanted=specs(),
        wait_s=st.sampled_from([None, 0.0, 20.0]),
        follow=st.booleans(),
        bound=st.booleans(),
        request=st.integers(0, 30),
    )
    def acquire(
        self, wanted: LeaseSpec, wait_s: float | None, follow: bool, bound: bool, request: int
    ) -> CommandId:
        holder = ProcessRef(node_id=NodeId("cpu"), pid=100 + request, start_ticks=1)
        return self.world.acquire(
            wanted,
            wait_s=wait_s,
            follow=follow,
            process=holder if bound else None,
            request_id=f"request-{request}",
            ttl_s=10.0,
        )

    @rule(command=leases)
    def release(self, command: CommandId) -> None:
        if (lease := self._known(command)) is not None:
            self.world.release(lease)

    @rule(command=leases)
    def renew(self, command: CommandId) -> None:
        if (lease := self._known(command)) is not None:
            self.world.keep_alive(lease)

    @rule(command=leases)
    def hang_up(self, command: CommandId) -> None:
        self.world.finished.add(command)
        self.world.hang_up(command)
        self.world.finished.discard(command)

    @rule(command=leases)
    def holder_dies(self, command: CommandId) -> None:
        lease = self._known(command)
        node = self.world.nodes[NodeId("cpu")]
        if lease is not None and lease.process is not None and node.connection is not None:
            self.world.holder_ended(node, lease)

    # -- operators ---------------------------------------------------------------

    @rule(
        target=holds,
        target_name=st.sampled_from(["n1", "n2", "n10", "GPU-n1-0", "GPU-n10-1"]),
        tenants=st.sampled_from([(), ("red",)]),
        seconds=st.sampled_from([None, 5.0]),
    )
    def hold(self, target_name: str, tenants: tuple[str, ...], seconds: float | None) -> object:
        return self.world.add_hold(
            target_name,
            scope=HoldScope.DEVICE if target_name.startswith("GPU") else HoldScope.NODE,
            allowed_tenants=tenants,
            expire_unix_s=None if seconds is None else self.world.unix_s + seconds,
        )

    @rule(hold=consumes(holds))
    def unhold(self, hold: object) -> None:
        self.world.remove_hold(hold)  # type: ignore[arg-type]

    # -- nodes -------------------------------------------------------------------

    @rule(name=st.sampled_from(list(NODES)))
    def obey(self, name: str) -> None:
        node = self.world.nodes[NodeId(name)]
        if node.connection is not None and (report := node.obey()) is not None:
            self.world.report(node, report)

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule(name=st.sampled_from(list(NODES)))
    def account(self, name: str) -> None:
        """Whatever is on its way: an account of a node that lost nothing corrects nothing."""
        node = self.world.nodes[NodeId(name)]
        if node.connection is not None:
            corrected = CORRECTIONS & set(self.world.account(node))
            assert not corrected or name in self.forgetful, (name, corrected)
            self.forgetful.discard(name)

    @rule(name=st.sampled_from(list(NODES)), what=st.sampled_from(["work", "watches", "report"]))
    def lose(self, name: str, what: str) -> None:
        """The agent forgets something, or its report gets lost, and nobody is told."""
        node = self.world.nodes[NodeId(name)]
        self.forgetful.add(name)
        if what == "work":
            node.forget(*node.running)
        elif what == "watches":
            node.watched.clear()
        elif node.connection is not None:
            node.obey()

    @rule(name=st.sampled_from(list(NODES)), reboot=st.booleans())
    def cut_off(self, name: str, reboot: bool) -> None:
        node = self.world.nodes[NodeId(name)]
        self.world.disconnect(node)
        if reboot:
            node.boot_id += "x"
            node.forget(*node.running)
            node.instance += "x"

    @rule(name=st.sampled_from(list(NODES)))
    def come_back(self, name: str) -> None:
        self.world.connect(self.world.nodes[NodeId(name)])

    @rule(name=st.sampled_from(["n1", "n10"]), refuses=st.booleans())
    def refuse(self, name: str, refuses: bool) -> None:
        self.world.nodes[NodeId(name)].refuses = "no" if refuses else ""

    @rule(
        name=st.sampled_from(["n1", "n2"]),
        fault=st.sampled_from(["dirty", "failed", "well"]),
    )
    def gpu_changes(self, name: str, fault: str) -> None:
        node = self.world.nodes[NodeId(name)]
        uuid = node.inventory.devices[0].uuid if node.inventory.devices else None
        if uuid is None:
            return
        node.dirty.pop(uuid, None)
        node.failed.discard(uuid)
        if fault == "dirty":
            node.dirty[uuid] = "stray"
        elif fault == "failed":
            node.failed.add(uuid)
        if node.connection is not None:
            self.world.report_devices(node)

    @rule(gpus=st.sampled_from([0, 2, 4]))
    def gpus_come_and_go(self, gpus: int) -> None:
        node = self.world.nodes[NodeId("n1")]
        self.world.disconnect(node)
        node.inventory = inventory("n1", gpus)
        gone = {
            key
            for key, assignment in node.running.items()
            if any(
                share.device_uuid not in {d.uuid for d in node.inventory.devices}
                for share in assignment.place.devices
            )
        }
        node.forget(*gone)
        self.world.connect(node)

    # -- time and the allocator --------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    @precondition(lambda self: not self.world.pool.summary().read_only_reason)
    def crash_and_restart(self) -> None:
        self.world.restart()

    @rule()
    def disk_fills(self) -> None:
        self.world.handle(WritesRefused(reason="disk full"))

    @rule()
    def disk_empties(self) -> None:
        self.world.handle(WritesAccepted())

    # -- what an onlooker sees -----------------------------------------------------

    def _known(self, command: CommandId) -> Lease | None:
        answers = self.world.answers.get(command, [])
        last = answers[-1] if answers else None
        return last if isinstance(last, Lease) else None

    @invariant()
    def no_alarm_was_raised(self) -> None:
        if hasattr(self, "world"):
            assert self.world.alarms == []

    @invariant()
    def history_replayed_gives_the_state(self) -> None:
        if not hasattr(self, "world") or self.world.pool.summary().read_only_reason:
            return
        states = replay(self.world.history)
        for state, wanted in states.items():
            lease = self.world.pool.lease(state)  # type: ignore[arg-type]
            if lease is not None:
                assert lease.state == wanted, (state, lease.state, wanted)

    @invariant()
    def what_was_acknowledged_is_in_the_store(self) -> None:
        if not hasattr(self, "world"):
            return
        for answers in self.world.answers.values():
            last = answers[-1]
            if isinstance(last, Lease) and last.state not in ENDED:
                assert ("lease", last.lease_id) in self.world.store or (
                    self.world.pool.lease(last.lease_id) is None
                )

    def teardown(self) -> None:
        """Liveness: once faults stop and leases end, the pool is empty and clean again."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.handle(WritesAccepted())
        for hold in world.pool.holds():
            if hold.kind == "operator":
                world.remove_hold(hold.hold_id)
        for node in world.nodes.values():
            node.refuses, node.dirty, node.failed = "", {}, set()
            world.connect(node)
        for _ in range(20):
            world.settle()
            for node in world.nodes.values():
                world.account(node)
            open_leases = world.pool.leases(limit=1000)
            if not open_leases:
                break
            for lease in open_leases:
                world.release(lease)
        summary = world.pool.summary()
        assert (summary.leases, summary.waiting, summary.devices_used) == (0, 0, 0)
        assert all(not node.running for node in world.nodes.values())
        connected = sum(len(node.inventory.devices) for node in world.nodes.values())
        assert summary.devices_free == connected


def replay(history: list[Event]) -> dict[str, LeaseState]:
    """States of leases by their events alone."""
    states: dict[str, LeaseState] = {}
    for event in history:
        subject, _, verb = event.kind.partition(".")
        if subject != "lease":
            continue
        states[event.subject] = {
            "requested": LeaseState.PENDING,
            "granted": LeaseState.GRANTED,
            "active": LeaseState.ACTIVE,
            "releasing": LeaseState.RELEASING,
        }.get(verb) or LeaseState(verb)
    return states


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase
