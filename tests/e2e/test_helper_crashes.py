"""The root helper is killed in the middle of what it does; its successor leaves nothing half."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from tests.e2e.cases.test_agent_restarts import BOUNDARIES
from tests.e2e.pool_fixture import ACTIVE, ENDED, Pool, eventually, part
from tests.integration.helper.running import Helper, running
from tests.real_host.host import hosted_pool, mine, place, until

SLOT = "0123abcd"
UID = 65534


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_slice_is_prepared_and_ended_wherever_the_helper_is_killed(
    tmp_path: Path, before: bool
) -> None:
    """Killed at each action of a slice's life, and started anew as systemd would."""
    with hosted_pool(tmp_path) as (pool, host):
        for point in BOUNDARIES:
            host.crash_at(point, before=before, whom="helper")
            call = pool.calls.ask(point, mine(part(30)))
            lease_id = next(call).lease.lease_id
            host.until_crashed("helper")
            host.start_helper()
            prepared(pool, lease_id)
            host.hold(pool.calls.get(lease_id).members[0].environment)
            # Killed once more where it ends.
            host.crash_at("stop_mps", before=before, whom="helper")
            pool.calls.release(lease_id)
            host.until_crashed("helper")
            host.start_helper()
            eventually(f"the end, {point}", lambda of=lease_id: pool.calls.get(of).state in ENDED)
            until(lambda: host.left() == [], f"nothing to be left, {point}")


def prepared(pool: Pool, lease_id: str) -> None:
    """Wait until a lease is active; one that failed says why."""
    settled = (ACTIVE, *ENDED)
    eventually("the slice", lambda: pool.calls.get(lease_id).state in settled)
    lease = pool.calls.get(lease_id)
    assert lease.state == ACTIVE, lease.explanation.summary


def test_without_its_helper_a_restarted_agent_keeps_what_runs_and_says_what_it_cannot_do(
    tmp_path: Path,
) -> None:
    """Slices go on, a new one is refused with what to do; all is well once it is back."""
    with hosted_pool(tmp_path) as (pool, host):
        lease = pool.calls.acquire("goes on", mine(part(30)))
        client, _ = host.hold(lease.members[0].environment)
        daemons = host.mps_pids()
        host.kill_helper()
        host.kill_agent()
        host.start_agent()
        eventually(
            "it to be said",
            lambda: [
                each
                for each in pool.events("fault.opened", subject=host.name)
                if each.details["code"] == "no_root_helper"
            ],
        )
        assert "agent.read_only" in host.log()
        refused = pool.calls.acquire("new", mine(part(30)), wait_s=0)
        assert refused.state in ENDED
        assert "gpupool-helper.service" in refused.explanation.summary
        now = pool.calls.get(lease.lease_id)
        assert now.state == ACTIVE, now.explanation.summary
        assert now.members[0].token == lease.members[0].token
        assert host.mps_pids() == daemons
        assert client.poll() is None
        host.start_helper()
        again = pool.calls.acquire("again", mine(part(30)))
        assert again.state == ACTIVE
        assert place(again)


def test_a_helper_that_was_killed_at_a_start_finds_the_daemon_and_what_is_half_made() -> None:
    """Between a daemon's start and its being found; and files that were half written."""
    if os.getuid() != 0:
        pytest.skip("only root can be the helper")
    with running() as helper:
        slow = helper.control.parent / "slow"
        slow.touch()
        peer = helper.peer()
        request = {"id": 1, "action": "start_mps", "slot": SLOT, "gpu": helper.gpus[0], "uid": UID}
        peer.channel.sendall(json.dumps(request).encode())
        pid_file = helper.folder / "run" / f"mps-{SLOT}.pid"
        until(pid_file.exists, "the daemon to be under way")
        helper.stop(signal.SIGKILL)
        pid = int(pid_file.read_text().split()[0])
        # What else a helper may leave: a slot before its daemon, and halves of files.
        (helper.folder / "mps" / "ffffffff" / "pipe").mkdir(parents=True)
        (helper.folder / "run" / "mps-eeeeeeee.env").write_text(
            f"CUDA_VISIBLE_DEVICES={helper.gpus[1]}\nGPUPOOL_UID={UID}\n"
        )
        (helper.folder / "run" / ".mps-eeeeeeee.env.new").write_text("half")
        (helper.folder / "cdi").mkdir()
        (helper.folder / "cdi" / ".gpupool-l-1.json.new").write_text("{")
        helper.start()
        left = {each.name for each in (helper.folder / "run").glob("*mps-*")}
        assert left == {f"mps-{SLOT}.pid", f"mps-{SLOT}.env"}
        assert [each.name for each in (helper.folder / "mps").iterdir()] == [SLOT]
        assert list((helper.folder / "cdi").iterdir()) == []
        slow.unlink()
        found = helper.ask("start_mps", slot=SLOT, gpu=helper.gpus[0], uid=UID)["done"]
        assert found["pid"] == pid
        helper.ask("stop_mps", slot=SLOT)
        until(lambda: not Path(f"/proc/{pid}").exists(), "the daemon to be gone")
        assert list((helper.folder / "mps").iterdir()) == []


def test_a_daemon_is_found_whenever_its_helper_was_killed() -> None:
    """The daemon writes its pid file itself, before it is one: none runs unknown."""
    if os.getuid() != 0:
        pytest.skip("only root can be the helper")
    with running() as helper:
        slot = {"slot": SLOT, "gpu": helper.gpus[0], "uid": UID}
        for _ in range(5):
            peer = helper.peer()
            peer.channel.sendall(json.dumps({"id": 1, "action": "start_mps", **slot}).encode())
            until(lambda: of_slot(helper), "a first process of the slot")
            helper.stop(signal.SIGKILL)
            helper.start()
            helper.ask("start_mps", **slot)
            assert len(of_slot(helper)) == 1
            helper.ask("stop_mps", slot=SLOT)
            until(lambda: of_slot(helper) == [], "nothing of the slot to be left")


def of_slot(helper: Helper) -> list[int]:
    """Processes that have the slot's directory in their environment, or are about to."""
    pipe = f"CUDA_MPS_PIPE_DIRECTORY={helper.folder}/mps/{SLOT}/pipe".encode()
    found: list[int] = []
    for each in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if pipe in each.read_bytes().split(b"\0"):
                found.append(int(each.parent.name))
    return found
