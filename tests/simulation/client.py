"""Callers of the simulation: they ask, retry with the same id, renew, and let go."""

from dataclasses import dataclass, field

from tests.core_world import part, whole
from tests.simulation.clock import Clock
from tests.simulation.daemon import Daemon

from gpupool.model.caller import Caller
from gpupool.model.errors import Refused
from gpupool.model.ids import CommandId, LeaseId, RequestId
from gpupool.model.lease import ENDED, Lease, LeaseState
from gpupool.model.request import LeaseSpec, Level, OnFailure, TopologyConstraint
from gpupool_allocator.core.effects import Answer, KeptAlive
from gpupool_allocator.core.events import Acquire, CallEnded, KeepAlive, Release

RETRY_S = 5.0
TTL_S = 30.0


@dataclass
class Client:
    """One caller with one request; it is done when ``outcome`` is set."""

    name: str
    clock: Clock
    daemon: Daemon
    spec: LeaseSpec
    wait_s: float | None
    hold_s: float
    commands: dict[CommandId, str] = field(default_factory=dict)
    lease: Lease | None = None
    releasing: bool = False
    outcome: str = ""
    term: int = 0

    def start(self) -> None:
        self._ask()

    def _ask(self) -> None:
        """Asks, and asks again with the same id until there is an answer."""
        if self.outcome or (self.lease is not None and self.lease.state is LeaseState.ACTIVE):
            return
        if self.daemon.serving and self.term != self.daemon.epoch:
            self.term = self.daemon.epoch
            command = self.daemon.command()
            self.commands[command] = "acquire"
            self.daemon.send(
                Acquire(
                    command=command,
                    caller=Caller(tenant=self.spec.tenant),
                    lease_id=LeaseId(f"l-{command}"),
                    request_id=RequestId(self.name),
                    spec=self.spec,
                    ttl_s=TTL_S,
                    wait_s=self.wait_s,
                    unix_s=self.clock.unix_s,
                )
            )
        self.clock.after(RETRY_S, self._ask)

    def answered(self, answer: Answer) -> None:
        what = self.commands[answer.command]
        result = answer.result
        if what == "acquire":
            self._acquire_answered(result)
        elif what == "renew" and isinstance(result, KeptAlive) and result.gone:
            self.outcome = self.outcome or "gone"
        elif what == "release" and isinstance(result, Lease):
            self.outcome = "released"
        elif what == "release" and isinstance(result, Refused):
            self.outcome = f"release refused: {result.message}"

    def _acquire_answered(self, result: object) -> None:
        if isinstance(result, Refused):
            self.outcome = f"refused: {result.message}"
        elif isinstance(result, Lease):
            fresh = self.lease is None or self.lease.state is not LeaseState.ACTIVE
            self.lease = result
            if result.state in ENDED or result.state is LeaseState.RELEASING:
                self.outcome = f"ended: {result.state}"
            elif result.state is LeaseState.ACTIVE and fresh:
                self.clock.after(TTL_S / 3, self._renew)
                self.clock.after(self.hold_s, self.release)

    def _renew(self) -> None:
        if self.outcome or self.releasing or self.lease is None:
            return
        if self.daemon.serving:
            command = self.daemon.command()
            self.commands[command] = "renew"
            self.daemon.send(
                KeepAlive(
                    command=command,
                    caller=Caller(),
                    lease_ids=(self.lease.lease_id,),
                )
            )
        self.clock.after(TTL_S / 3, self._renew)

    def release(self) -> None:
        """Lets go, until the allocator has said that it knows."""
        if self.outcome or self.lease is None:
            return
        self.releasing = True
        if self.daemon.serving:
            command = self.daemon.command()
            self.commands[command] = "release"
            self.daemon.send(
                Release(
                    command=command,
                    caller=Caller(),
                    lease_id=self.lease.lease_id,
                    unix_s=self.clock.unix_s,
                )
            )
        self.clock.after(RETRY_S, self.release)

    def vanish(self) -> None:
        """The caller dies without a word."""
        for command, what in self.commands.items():
            if what == "acquire":
                self.daemon.send(CallEnded(command=command))
        self.outcome = self.outcome or "vanished"


def some_spec(clock: Clock) -> LeaseSpec:
    """A request of some kind that fits an idle pool."""
    chance = clock.chance
    more: dict[str, object] = {
        "uid": chance.choice([0, 0, 1001]),
        "priority": chance.choice([0, 0, 0, 1]),
        "on_failure": chance.choice([None, OnFailure.WAIT]),
        "max_duration_s": chance.choice([None, None, 20.0]),
    }
    kind = chance.randrange(5)
    if kind == 0:
        return whole(chance.randint(1, 4), **more)
    if kind == 1:
        return whole(chance.randint(1, 4), replicas=chance.randint(2, 3), **more)
    if kind == 2:
        spread = TopologyConstraint(spread=Level.NODE)
        return whole(1, replicas=chance.randint(2, 4), topology=spread, **more)
    return part(chance.choice([10, 20, 50, 70]), **more)
