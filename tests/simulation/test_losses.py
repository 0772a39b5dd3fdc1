"""Both cores on one living connection, of which one side or the stream forgets something.

Nobody reconnects here: what puts it right is the full account that agents give at a
steady pace, and the desired state that is sent again to who has not accepted it.
"""

from tests.core_world import whole
from tests.simulation.client import Client
from tests.simulation.daemon import SETTINGS
from tests.simulation.machine import Machine
from tests.simulation.test_simulation import Simulation

from gpupool.model.event import Event
from gpupool.model.lease import Lease, LeaseState
from gpupool_agent.core.reporting import ACCOUNT_INTERVALS

ACCOUNT_S = ACCOUNT_INTERVALS * SETTINGS.report_interval_s
ON_THE_WAY_S = 4.0
"""The slowest messages of the simulation, there and back."""

NOTICED_S = ACCOUNT_S + ON_THE_WAY_S
AGAIN_S = SETTINGS.heartbeat_timeout_s + NOTICED_S
JOB_DIES_S = 20.0


class Quiet:
    """A cluster without chance faults, and one lease of two GPUs in it."""

    def __init__(self, seed: int) -> None:
        self.simulation = Simulation(seed)
        self.daemon = self.simulation.daemon
        self.daemon.faulty = False
        self.clock = self.simulation.clock
        self.run(5.0)
        self.client = self.asks("first")
        self.run(5.0)
        assert self.lease.state is LeaseState.ACTIVE
        self.connections = self._connections()

    def asks(self, name: str) -> Client:
        client = Client(
            name=name,
            clock=self.clock,
            daemon=self.daemon,
            spec=whole(2),
            wait_s=None,
            hold_s=10_000.0,
        )
        self.simulation.clients.append(client)
        client.start()
        return client

    def run(self, seconds: float) -> None:
        self.clock.run_for(seconds)

    @property
    def lease(self) -> Lease:
        assert self.client.lease is not None
        found = self.daemon.pool.lease(self.client.lease.lease_id)
        assert found is not None
        return found

    @property
    def machine(self) -> Machine:
        """Where the lease is."""
        return self.simulation.machines[self.lease.members[0].place.node_id]

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.daemon.history if event.kind == kind]

    def nobody_reconnected(self) -> bool:
        return self._connections() == self.connections and not self.events("node.unreachable")

    def _connections(self) -> int:
        return len(self.events("node.connected"))


def test_what_an_agent_forgets_is_noticed_within_one_account_and_prepared_again() -> None:
    quiet = Quiet(1)
    quiet.machine.lose_assignment()
    quiet.run(NOTICED_S)
    (found,) = quiet.events("member.preparing")
    assert found.subject == quiet.lease.lease_id
    quiet.run(JOB_DIES_S + ON_THE_WAY_S)
    assert quiet.lease.state is LeaseState.ACTIVE
    assert {member.state for member in quiet.lease.members} == {"ready"}
    assert quiet.nobody_reconnected()


def test_an_end_of_which_the_report_is_lost_ends_the_lease_within_one_account() -> None:
    quiet = Quiet(2)
    machine = quiet.machine
    quiet.client.release()
    link = machine.link
    assert link is not None
    node = machine.node
    assert node is not None
    # Its every word, until it has nothing left of the lease.
    link.lose_up = 10_000
    while node.assignments():
        assert quiet.clock.step()
    link.lose_up = 0
    assert quiet.lease.state is LeaseState.RELEASING
    quiet.run(NOTICED_S)
    assert quiet.lease.state is LeaseState.RELEASED
    assert quiet.daemon.pool.summary().devices_free == quiet.daemon.pool.summary().devices
    assert quiet.nobody_reconnected()


def test_a_desired_state_that_is_lost_comes_again() -> None:
    quiet = Quiet(3)
    links = [machine.link for machine in quiet.simulation.machines.values()]
    for link in links:
        assert link is not None
        link.lose_down = 1
    second = quiet.asks("second")
    quiet.run(AGAIN_S)
    (told,) = quiet.events("node.told_again")
    assert second.lease is not None
    assert second.lease.state is LeaseState.ACTIVE
    assert told.subject == second.lease.members[0].place.node_id
    assert quiet.events("member.preparing") == []
    assert quiet.nobody_reconnected()


def test_what_the_book_forgets_is_found_within_one_account_and_kept_from_others() -> None:
    quiet = Quiet(4)
    uuids = {share.device_uuid for share in quiet.lease.members[0].place.devices}
    token = quiet.lease.members[0].token
    quiet.daemon.lose_lease()
    (lost,) = quiet.daemon.lost
    quiet.run(NOTICED_S)
    (kept,) = quiet.daemon.pool.unclaimed()
    assert (kept.lease_id, kept.token, kept.ending) == (lost, token, False)
    assert {share.device_uuid for share in kept.place.devices} == uuids
    summary = quiet.daemon.pool.summary()
    assert summary.devices_free == summary.devices - len(uuids)
    quiet.daemon.end_unclaimed()
    quiet.run(NOTICED_S)
    assert quiet.daemon.pool.unclaimed() == []
    summary = quiet.daemon.pool.summary()
    assert summary.devices_free == summary.devices
    assert quiet.nobody_reconnected()
