"""Work that nodes run and a restored store does not know."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import aio
from tests.integration.allocator_daemon import Daemon, PlayedAgent, playing, until, whole

from gpupool.model.assignment import Assignment, AssignmentKey
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId
from gpupool.model.lease import DeviceShare, Place
from gpupool.model.views import UnclaimedAssignment
from gpupool.v1 import pool_pb2
from gpupool.wire.views import unclaimed_from_proto

# One event loop for all: gRPC is bound to the first that it sees.
one_loop = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made.start()
    made.end()


def assignment_on(node_id: str, lease_id: str, *, rank: int, gpu: int) -> Assignment:
    """A whole GPU of a lease that nobody has asked this allocator for."""
    share = DeviceShare(
        device_uuid=DeviceUuid(f"GPU-{node_id}-{gpu}"), share_pct=100, memory_mib=80_000, whole=True
    )
    return Assignment(
        key=AssignmentKey(lease_id=LeaseId(lease_id), rank=rank),
        group="default",
        token=7,
        place=Place(node_id=NodeId(node_id), devices=(share,)),
        uid=1001,
        disconnect_s=86_400.0,
        world_size=2,
    )


@one_loop
async def test_work_that_the_store_does_not_know_is_listed_and_kept_until_it_is_ended(
    daemon: Daemon,
) -> None:
    forgotten = [assignment_on("n1", "l-forgotten", rank=rank, gpu=rank) for rank in range(2)]
    agent = PlayedAgent("n1", gpus=3, running={each.key: each for each in forgotten})
    async with daemon.connected() as calls, playing(calls, agent):
        assert agent.desired is not None
        assert set(agent.desired.unclaimed) == {each.key for each in forgotten}
        listed: list[UnclaimedAssignment] = []
        token = ""
        while True:
            page = await calls.pool.ListUnclaimed(
                pool_pb2.ListUnclaimedRequest(page_size=1, page_token=token)
            )
            listed += [unclaimed_from_proto(each) for each in page.assignments]
            token = page.next_page_token
            if not token:
                break
        assert listed == [
            UnclaimedAssignment(
                node_id=NodeId("n1"),
                lease_id=each.key.lease_id,
                rank=each.key.rank,
                token=7,
                place=each.place,
                uid=1001,
            )
            for each in forgotten
        ]
        # One of the three GPUs is free.
        with pytest.raises(aio.AioRpcError) as caught:
            await calls.acquire("r1", whole(2), wait_s=0)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert set(agent.running) == {each.key for each in forgotten}

        end = pool_pb2.EndUnclaimedRequest(node_id="n1", lease_id="l-forgotten")
        await calls.pool.EndUnclaimed(end)
        await until(lambda: agent.desired is not None and not agent.desired.unclaimed)
        lease = await calls.acquire("r2", whole(3), wait_s=20)
        assert {key.lease_id for key in agent.running} == {lease.lease_id}
        left = await calls.pool.ListUnclaimed(pool_pb2.ListUnclaimedRequest())
        assert not left.assignments
        with pytest.raises(aio.AioRpcError) as caught:
            await calls.pool.EndUnclaimed(end)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@one_loop
async def test_two_nodes_that_claim_the_same_unknown_member_both_keep_it(daemon: Daemon) -> None:
    works = {name: assignment_on(name, "l-forgotten", rank=0, gpu=0) for name in ("n1", "n2")}
    agents = [PlayedAgent(name, gpus=1, running={work.key: work}) for name, work in works.items()]
    async with daemon.connected() as calls, playing(calls, *agents):
        await until(lambda: all(agent.desired and agent.desired.unclaimed for agent in agents))
        listed = await calls.pool.ListUnclaimed(pool_pb2.ListUnclaimedRequest())
        assert [(each.node_id, each.rank) for each in listed.assignments] == [("n1", 0), ("n2", 0)]
        with pytest.raises(aio.AioRpcError) as caught:
            await calls.acquire("r1", whole(1), wait_s=0)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        await calls.pool.EndUnclaimed(
            pool_pb2.EndUnclaimedRequest(node_id="n2", lease_id="l-forgotten")
        )
        lease = await calls.acquire("r2", whole(1), wait_s=20)
        assert lease.members[0].place.node_id == "n2"
        assert set(agents[0].running) == {works["n1"].key}
    # It is known by its node after a restart too.
    daemon.kill()
    daemon.start()
    async with daemon.connected() as calls:
        listed = await calls.pool.ListUnclaimed(pool_pb2.ListUnclaimedRequest())
        assert [(each.node_id, each.lease_id) for each in listed.assignments] == [
            ("n1", "l-forgotten")
        ]


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("node_id", pool_pb2.EndUnclaimedRequest(node_id="n 1", lease_id="l-1")),
        ("lease_id", pool_pb2.EndUnclaimedRequest(node_id="n1")),
    ],
)
@one_loop
async def test_what_names_no_assignment_is_refused_by_its_field(
    daemon: Daemon, field: str, request_: pool_pb2.EndUnclaimedRequest
) -> None:
    async with daemon.connected() as calls:
        with pytest.raises(aio.AioRpcError) as caught:
            await calls.pool.EndUnclaimed(request_)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(f"{field}: ")


@one_loop
async def test_only_operators_end_what_is_unclaimed(daemon: Daemon) -> None:
    forgotten = assignment_on("n1", "l-forgotten", rank=0, gpu=0)
    agent = PlayedAgent("n1", running={forgotten.key: forgotten})
    async with daemon.connected() as calls, playing(calls, agent):
        assert agent.welcome is not None
        with pytest.raises(aio.AioRpcError) as caught:
            await calls.pool.EndUnclaimed(
                pool_pb2.EndUnclaimedRequest(node_id="n1", lease_id="l-forgotten"),
                metadata=(
                    ("gpupool-node-id", "n1"),
                    ("gpupool-forward-key", agent.welcome.forward_key),
                    ("gpupool-user", "alice"),
                    ("gpupool-uid", "1000"),
                    ("gpupool-pid", "4242"),
                    ("gpupool-pid-start-ticks", "1"),
                ),
            )
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        listed = await calls.pool.ListUnclaimed(pool_pb2.ListUnclaimedRequest())
        assert [each.lease_id for each in listed.assignments] == ["l-forgotten"]
