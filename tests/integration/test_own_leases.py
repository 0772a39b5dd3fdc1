"""Users on one node, through its agent's socket: whose lease it is, and who may end it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.host_pool.machines import SimulatedMachine
from tests.host_pool.pool import HostPool, host_folder, host_pool, until
from tests.host_pool.users import AGENT_UID

DAC_READ_SEARCH, SYS_PTRACE = 2, 19
STRANGER_UID = AGENT_UID + 1
"""Neither the agent, nor the holder, nor root."""


@pytest.fixture(scope="module")
def pool() -> Iterator[HostPool]:
    if os.geteuid() != 0:
        pytest.skip("only root can be several users")
    with host_folder() as folder, host_pool(SimulatedMachine(folder), folder) as made:
        if not made.users.slices:
            pytest.skip("other users cannot reach this interpreter")
        yield made


def test_a_user_ends_only_own_leases(pool: HostPool) -> None:
    holder, stranger = pool.holder(), pool.holder(STRANGER_UID)
    held = holder.acquire(gpus=1)
    refused = stranger.say({"end": held.lease_id})["error"]
    assert refused == (
        f"lease_id: {held.lease_id} is held by uid {pool.users.slices}, not by {STRANGER_UID};"
        " its holder, root or an operator can end it"
    )
    assert pool.device(held.devices[0]).lease_ids == (held.lease_id,)
    holder.release(held)
    stranger.leave()


def test_root_ends_anybodys(pool: HostPool) -> None:
    holder, root = pool.holder(), pool.holder(0)
    held = holder.acquire(gpus=1)
    assert root.say({"end": held.lease_id})["state"] in {"releasing", "released"}
    until(pool.all_offered, "the GPU to be offered again")


def test_a_user_cannot_take_a_lease_in_anothers_name(pool: HostPool) -> None:
    """What the request says of the user is replaced by what the kernel says."""
    stranger = pool.holder(STRANGER_UID)
    held = stranger.acquire(gpus=1, uid=pool.users.slices)
    assert pool.client is not None
    lease = pool.client.get_lease(held.lease_id)
    assert (lease.caller.uid, lease.spec.uid) == (STRANGER_UID, STRANGER_UID)
    stranger.release(held)


def test_the_agent_only_reads_by_itself_and_the_helper_answers_it_alone(
    pool: HostPool,
) -> None:
    agent = pool.running["agent"].process.pid
    lines = Path(f"/proc/{agent}/status").read_text().splitlines()
    told = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert set(told["Uid"].split()) == {str(pool.users.agent)}
    # On this machine it reads what others run (see SimulatedMachine), and has no other right.
    assert int(told["CapEff"], 16) == 1 << SYS_PTRACE | 1 << DAC_READ_SEARCH
    with pytest.raises(AssertionError, match="PermissionError"):
        reach_helper(pool, STRANGER_UID)
    assert reach_helper(pool, pool.users.agent) == "{'done': []}"


def reach_helper(pool: HostPool, uid: int) -> str:
    from tests.integration.helper.running import Peer, as_user

    path = pool.folder / "run" / "helper.sock"
    went_well, said = as_user(uid, lambda: Peer(path).ask("cdi_leases"))
    assert went_well, said
    return said
