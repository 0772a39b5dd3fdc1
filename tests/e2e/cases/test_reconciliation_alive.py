"""Book and agents' truth are brought together while a connection lasts, at every account.

The agent is played, over real gRPC: it loses what a real one never should.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.allocator_daemon import Calls, Daemon, PlayedAgent, playing, until, whole

from gpupool.model.assignment import Assignment, AssignmentKey, DesiredState, Report
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId
from gpupool.model.lease import DeviceShare, Place
from gpupool.v1 import lease_pb2, node_pb2, pool_pb2, resources_pb2
from gpupool.wire.node import report_to_proto

# One event loop for all: gRPC is bound to the first that it sees.
one_loop = pytest.mark.asyncio(loop_scope="session")

BOUNDED_S = 30.0
"""Longest time until a difference is corrected, on a slow machine."""

ACCOUNT_S = 0.1


@dataclass
class AccountingAgent(PlayedAgent):
    """Gives its full account all the time.

    ``deaf``: what it is told gets lost. ``mute``: it does as told, and what it would
    report of that gets lost.
    """

    accepted: int = 0
    accounts: int = 0
    deaf: bool = False
    mute: bool = False

    def account(self) -> Report:
        """All that it has."""
        return Report(
            full=True,
            assignments=tuple(self._placed(each) for each in self.running.values()),
            devices=self._device_reports(),
            accepted_revision=self.accepted,
        )

    def carry_out(self, desired: DesiredState) -> Report:
        """As told, unless something gets lost."""
        if self.deaf:
            return Report(accepted_revision=self.accepted)
        self.accepted = desired.revision
        report = super().carry_out(desired)
        return Report(accepted_revision=self.accepted) if self.mute else report

    async def _beat(self, stream: Any, turn: asyncio.Lock) -> None:
        while True:
            await asyncio.sleep(ACCOUNT_S)
            async with turn:
                report = report_to_proto(self.account())
                await stream.write(node_pb2.ConnectRequest(report=report))
            self.accounts += 1

    async def gives(self, count: int) -> None:
        """Waits for so many more accounts."""
        enough = self.accounts + count
        await until(lambda: self.accounts >= enough)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path, report_interval_s=0.5, heartbeat_timeout_s=2)
    yield made.start()
    made.end()


async def eventually(what: str, look: Callable[[], Awaitable[Any]]) -> Any:
    """The first answer that is true."""
    deadline = time.monotonic() + BOUNDED_S
    while not (found := await look()):
        assert time.monotonic() < deadline, f"waited {BOUNDED_S:g} s in vain for: {what}"
        await asyncio.sleep(0.05)
    return found


async def events(calls: Calls, kind: str) -> list[pool_pb2.Event]:
    answer = await calls.pool.ListEvents(pool_pb2.ListEventsRequest(page_size=1000))
    return [event for event in answer.events if event.kind == kind]


async def state_of(calls: Calls, lease_id: str) -> int:
    answer = await calls.leases.GetLease(lease_pb2.GetLeaseRequest(lease_id=lease_id))
    state: int = answer.lease.state
    return state


@one_loop
async def test_c73_what_an_agent_loses_while_it_is_connected_is_prepared_again(
    daemon: Daemon,
) -> None:
    """C73: no reconnect is needed for the book to notice what an agent does not run any more."""
    agent = AccountingAgent("n1")
    async with daemon.connected() as calls, playing(calls, agent):
        lease = await calls.acquire("r1", whole(8))
        await agent.gives(3)
        assert await events(calls, "member.preparing") == []
        agent.running.clear()
        await until(lambda: len(agent.running) == 1)
        (again,) = agent.running.values()
        assert again.token > lease.members[0].token

        async def ready() -> bool:
            answer = await calls.leases.GetLease(lease_pb2.GetLeaseRequest(lease_id=lease.lease_id))
            member = answer.lease.members[0]
            renewed: bool = answer.lease.generation > lease.generation
            return renewed and member.state == resources_pb2.MEMBER_STATE_READY

        await eventually("the member to be ready", ready)
        (correction,) = await events(calls, "member.preparing")
        assert correction.subject == lease.lease_id
        assert correction.cause == "node n1 does not run it any more"
        assert len(await events(calls, "node.connected")) == 1


@one_loop
async def test_c73_a_release_whose_report_is_lost_ends_at_the_next_account(daemon: Daemon) -> None:
    """C73: the GPUs of a lease that has ended on its node are not reserved for nobody."""
    agent = AccountingAgent("n1")
    async with daemon.connected() as calls, playing(calls, agent):
        lease = await calls.acquire("r1", whole(8))
        agent.mute = True
        await calls.leases.Release(lease_pb2.ReleaseRequest(lease_id=lease.lease_id))

        async def released() -> bool:
            return await state_of(calls, lease.lease_id) == resources_pb2.LEASE_STATE_RELEASED

        await eventually("the end", released)
        (correction,) = await events(calls, "member.ended")
        assert correction.subject == lease.lease_id
        agent.mute = False
        assert (await calls.acquire("r2", whole(8))).state == resources_pb2.LEASE_STATE_ACTIVE


@one_loop
async def test_c73_work_that_turns_up_while_connected_is_kept_and_blocks_its_gpu(
    daemon: Daemon,
) -> None:
    """C73: what the node runs and the book does not have is noted, kept, granted to nobody."""
    agent = AccountingAgent("n1", gpus=2)
    share = DeviceShare(
        device_uuid=DeviceUuid("GPU-n1-1"), share_pct=100, memory_mib=80_000, whole=True
    )
    work = Assignment(
        key=AssignmentKey(lease_id=LeaseId("l-lost"), rank=0),
        group="default",
        token=7,
        place=Place(node_id=NodeId("n1"), devices=(share,)),
        uid=1001,
        disconnect_s=86_400.0,
        world_size=1,
    )
    async with daemon.connected() as calls, playing(calls, agent):
        await calls.acquire("r1", whole(1))
        agent.running[work.key] = work

        async def listed() -> list[pool_pb2.UnclaimedAssignment]:
            answer = await calls.pool.ListUnclaimed(pool_pb2.ListUnclaimedRequest())
            return list(answer.assignments)

        (found,) = await eventually("the find", listed)
        assert (found.lease_id, found.token, found.uid) == ("l-lost", 7, 1001)
        (noted,) = await events(calls, "assignment.unclaimed")
        assert noted.details["lease_id"] == "l-lost"
        refused = await calls.pool.GetPool(pool_pb2.GetPoolRequest())
        assert (refused.devices_free, refused.devices_used) == (0, 2)
        await agent.gives(3)
        assert work.key in agent.running
        end = pool_pb2.EndUnclaimedRequest(node_id="n1", lease_id="l-lost")
        await calls.pool.EndUnclaimed(end)
        await until(lambda: work.key not in agent.running)
        assert (await calls.acquire("r2", whole(1), wait_s=20)).members


@one_loop
async def test_c73_what_is_on_its_way_is_not_taken_for_lost_and_comes_again_where_it_was(
    daemon: Daemon,
) -> None:
    """C73: an account from before a grant ends nothing, and a lost desired state comes again."""
    agent = AccountingAgent("n1")
    async with daemon.connected() as calls, playing(calls, agent):
        agent.deaf = True
        asked = asyncio.create_task(calls.acquire("r1", whole(8)))
        await eventually("the grant", lambda: events(calls, "lease.granted"))
        await agent.gives(5)
        assert agent.running == {}
        for kind in ("member.preparing", "member.ended", "lease.failed", "lease.releasing"):
            assert await events(calls, kind) == []
        agent.deaf = False
        lease = await asked
        assert lease.state == resources_pb2.LEASE_STATE_ACTIVE
        (told,) = await events(calls, "node.told_again")
        assert told.subject == "n1"
        (granted,) = await events(calls, "lease.granted")
        assert str(lease.members[0].token) in granted.details["member.0"]
