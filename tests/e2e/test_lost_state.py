"""An agent that has lost its state within a boot, under slices with daemons and clients.

The checkpoint alone, or with it all that the agent had written down of its daemons: then
only the root helper knows them.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.e2e.pool_fixture import ACTIVE, ENDED, eventually, part, whole
from tests.real_host.host import RealHost, hosted_pool, mine, place, until

SM_COUNT = 132


def lose(host: RealHost, *, records: bool) -> None:
    """Remove what the agent keeps on disk."""
    shutil.rmtree(host.folder / "state")
    if records:
        shutil.rmtree(host.folder / "agent" / "mps")
    for name in ("state", "agent/mps"):
        host.make_for_agent(name)


@pytest.mark.parametrize("records", [False, True], ids=["checkpoint", "checkpoint-and-records"])
def test_an_agent_that_lost_its_state_takes_its_daemons_over_or_ends_them(
    tmp_path: Path, records: bool
) -> None:
    """What is still wanted goes on, clients too; of what has ended meanwhile nothing is left."""
    with hosted_pool(tmp_path) as (pool, host):
        wanted = [pool.calls.acquire(f"w{number}", mine(part(60))) for number in range(2)]
        over = pool.calls.acquire("over", mine(part(50)))
        assert len({place(lease).device_uuid for lease in (*wanted, over)}) == 3
        clients = [host.hold(lease.members[0].environment)[0] for lease in wanted]
        kept = [pid for pid in host.mps_pids() if gpu_of(host, pid) != place(over).device_uuid]
        tokens = {lease.lease_id: lease.members[0].token for lease in wanted}
        host.kill_agent()
        pool.calls.release(over.lease_id)
        lose(host, records=records)
        host.start_agent()

        def prepared_again() -> bool:
            now = [pool.calls.get(lease.lease_id) for lease in wanted]
            return all(
                lease.state == ACTIVE
                and lease.members[0].token > tokens[lease.lease_id]
                and lease.members[0].environment
                for lease in now
            )

        eventually("the wanted to be prepared again", prepared_again)
        told = {event.subject for event in pool.events("member.preparing")}
        assert told >= set(tokens)
        eventually("the end of the other", lambda: pool.calls.get(over.lease_id).state in ENDED)
        until(lambda: host.mps_pids() == kept, "only the wanted daemons to be left")
        until(lambda: host.compute_modes().count(3) == 2, "its GPU's mode to be restored")
        assert all(client.poll() is None for client in clients)
        for lease in wanted:
            environment = pool.calls.get(lease.lease_id).members[0].environment
            assert differing(environment, lease.members[0].environment) == {"GPUPOOL_TOKEN"}
            # Its limit is the server's: a client without one in its environment has it too.
            loose = dict(environment)
            loose.pop("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
            _, said = host.hold(loose)
            assert said["sm_count"] == SM_COUNT * 60 // 100
        assert not [e for e in pool.events("fault.opened") if "foreign" in e.cause]
        # And the freed GPU is a whole one again.
        assert pool.calls.acquire("rest", whole(6)).state == ACTIVE


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def gpu_of(host: RealHost, pid: int) -> str:
    (found,) = [each for each in host.mps_processes() if each.pid == pid]
    return (found.environment or {})["CUDA_VISIBLE_DEVICES"]


def test_clients_of_nobody_are_named_and_their_daemon_ends_after_them(tmp_path: Path) -> None:
    """A lease that ended while its agent was away and forgot: its client is no longer its."""
    with hosted_pool(tmp_path) as (pool, host):
        lease = pool.calls.acquire("over", mine(part(50)))
        uuid = place(lease).device_uuid
        client, _ = host.hold(lease.members[0].environment)
        host.kill_agent()
        pool.calls.release(lease.lease_id)
        lose(host, records=True)
        host.start_agent()
        eventually("the end", lambda: pool.calls.get(lease.lease_id).state in ENDED)

        def strays() -> list[int]:
            (device,) = [each for each in pool.devices() if each.device.uuid == uuid]
            return [each.pid for each in device.strays]

        eventually("the client to be named", lambda: strays() == [client.pid])
        assert len(host.mps_pids()) == 2
        client.kill()
        client.wait()
        until(lambda: host.left() == [], "the daemon to end after it")
        pool.until_offered(host)  # type: ignore[arg-type]
