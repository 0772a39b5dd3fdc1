"""The root helper as a process: what it does, for whom, and what it writes down."""

import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.helper.running import (
    AGENT_UID,
    STRANGER_UID,
    Helper,
    Peer,
    as_user,
    running,
    sleeping,
    until,
)

from gpupool_agent.devices.processes import ProcProcessTable
from gpupool_agent.helper.processes import start_ticks

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be the helper")

SLOT = "0123abcd"
UID = 65534


@pytest.fixture(scope="module")
def helper() -> Iterator[Helper]:
    with running() as started:
        yield started


@pytest.fixture
def peer(helper: Helper) -> Iterator[Peer]:
    opened = Peer(helper.socket)
    yield opened
    opened.close()


def start(peer: Peer, helper: Helper, slot: str = SLOT, gpu: int = 0) -> dict[str, object]:
    answer = peer.ask("start_mps", slot=slot, gpu=helper.gpus[gpu], uid=UID)
    assert "done" in answer, answer
    found: dict[str, object] = answer["done"]
    return found


def test_the_socket_is_for_root_and_the_agents_group(helper: Helper) -> None:
    found = helper.socket.stat()
    assert stat.S_IMODE(found.st_mode) == 0o660
    assert (found.st_uid, found.st_gid) == (0, AGENT_UID)


def test_the_agents_user_is_answered(helper: Helper) -> None:
    helper.socket.chmod(0o666)
    good, told = as_user(AGENT_UID, lambda: helper.ask("cdi_leases"))
    assert good, told
    assert told == "{'done': []}"
    assert helper.audit()[-1]["peer_uid"] == AGENT_UID


def test_another_user_is_not_even_with_the_socket_open_to_it(helper: Helper) -> None:
    helper.socket.chmod(0o666)
    before = len(helper.audit())
    good, told = as_user(STRANGER_UID, lambda: helper.ask("cdi_leases"))
    assert not good, told
    refused = [line for line in helper.lines() if line["event"] == "helper.connection_refused"]
    assert refused[-1]["peer_uid"] == STRANGER_UID
    assert len(helper.audit()) == before


def test_the_compute_mode_is_set_and_written_down(helper: Helper, peer: Peer) -> None:
    gpu = helper.gpus[0]
    for _ in range(2):
        assert peer.ask("set_compute_mode", gpu=gpu, mode="exclusive_process") == {"done": None}
    line = helper.audit()[-1]
    assert line["action"] == "set_compute_mode"
    assert line["arguments"] == {"gpu": gpu, "mode": "exclusive_process"}
    assert (line["outcome"], line["peer_uid"], line["peer_pid"]) == ("done", 0, os.getpid())


def test_a_gpu_that_the_driver_does_not_list_is_refused(helper: Helper, peer: Peer) -> None:
    other = "GPU-00000000-0000-0000-0000-000000000000"
    answer = peer.ask("set_compute_mode", gpu=other, mode="default")
    assert answer == {"refused": f"gpu: the driver lists no {other}"}
    assert helper.audit()[-1]["outcome"] == "refused"
    assert helper.audit()[-1]["reason"] == answer["refused"]


def test_a_daemon_is_started_commanded_found_and_stopped(helper: Helper, peer: Peer) -> None:
    facts = start(peer, helper)
    pipe = Path(str(facts["pipe_directory"]))
    pid = int(str(facts["pid"]))
    assert ProcProcessTable().start_ticks(pid) == facts["start_ticks"]
    assert os.getsid(pid) == pid
    assert start(peer, helper) == facts
    assert peer.ask("mps_daemon", slot=SLOT) == {"done": facts}
    lines = ["get_server_list", "set_default_active_thread_percentage 30"]
    answer = peer.ask("mps_commands", slot=SLOT, lines=lines)["done"]
    assert answer["output"] == "".join(f"{pid} {line}\n" for line in lines)
    assert answer["exit_code"] == 0
    for _ in range(2):
        assert peer.ask("stop_mps", slot=SLOT) == {"done": None}
    assert ProcProcessTable().start_ticks(pid) is None
    assert not pipe.parent.exists()
    assert [each.name for each in (helper.folder / "run").glob("mps-*")] == []
    assert peer.ask("mps_daemon", slot=SLOT) == {"done": None}


def test_its_pipe_directory_is_for_its_user_alone(helper: Helper, peer: Peer) -> None:
    control = Path(str(start(peer, helper)["pipe_directory"])) / "control"
    try:
        assert control.parent.stat().st_uid == 0
        control.chmod(0o666)

        def connect() -> None:
            with socket.socket(socket.AF_UNIX) as channel:
                channel.connect(str(control))

        assert as_user(UID, connect)[0]
        assert not as_user(STRANGER_UID, connect)[0]
        good, told = as_user(UID, (control.parent / "mine").touch)
        assert not good, told
    finally:
        peer.ask("stop_mps", slot=SLOT)


def test_a_daemon_lives_through_a_restart_of_the_helper() -> None:
    with running() as helper:
        first = helper.peer()
        facts = start(first, helper)
        first.close()
        assert helper.stop() == 0
        helper.start()
        second = helper.peer()
        assert second.ask("mps_daemon", slot=SLOT) == {"done": facts}
        assert start(second, helper) == facts
        assert helper.stop(signal.SIGKILL) == -signal.SIGKILL
        helper.start()
        third = helper.peer()
        assert third.ask("mps_daemon", slot=SLOT) == {"done": facts}
        third.ask("stop_mps", slot=SLOT)
        # Nobody may have reaped it: its parent is gone.
        assert start_ticks(int(str(facts["pid"]))) is None


def test_a_gpu_has_one_daemon_and_a_daemon_one_user(helper: Helper, peer: Peer) -> None:
    start(peer, helper)
    try:
        gpu = helper.gpus[0]
        other_slot = peer.ask("start_mps", slot="ffffffff", gpu=gpu, uid=UID)
        assert other_slot["failed"] == f"slot {SLOT} serves uid {UID} on {gpu}"
        other_user = peer.ask("start_mps", slot=SLOT, gpu=gpu, uid=1001)
        assert other_user["failed"] == f"slot {SLOT} serves uid {UID} on {gpu}"
        other_gpu = peer.ask("start_mps", slot=SLOT, gpu=helper.gpus[1], uid=UID)
        assert "failed" in other_gpu
        user = peer.ask("mps_commands", slot=SLOT, lines=["start_server -uid 1001"])
        assert user == {"refused": f"lines: slot {SLOT} serves uid {UID}"}
        limit = f"set_default_device_pinned_mem_limit {helper.gpus[1]} 10M"
        assert "refused" in peer.ask("mps_commands", slot=SLOT, lines=[limit])
    finally:
        peer.ask("stop_mps", slot=SLOT)


def test_a_daemon_that_does_not_start_leaves_nothing(helper: Helper, peer: Peer) -> None:
    fails = helper.control.parent / "fails"
    fails.touch()
    try:
        answer = peer.ask("start_mps", slot=SLOT, gpu=helper.gpus[0], uid=UID)
    finally:
        fails.unlink()
    assert "no such device" in answer["failed"]
    assert not (helper.folder / "mps" / SLOT).exists()
    assert list((helper.folder / "run").glob("mps-*")) == []


def test_a_pid_file_of_another_process_ends_nobody(helper: Helper, peer: Peer) -> None:
    facts = start(peer, helper)
    record = helper.folder / "run" / f"mps-{SLOT}.pid"
    os.kill(int(str(facts["pid"])), signal.SIGKILL)
    until(lambda: peer.ask("mps_daemon", slot=SLOT) == {"done": None}, "the daemon's end")
    with sleeping() as other:
        ticks = ProcProcessTable().start_ticks(other.pid)
        assert ticks is not None
        # What stays when the pid is given out again: same pid, another start.
        record.write_text(f"{other.pid} {ticks - 1}\n")
        assert peer.ask("mps_daemon", slot=SLOT) == {"done": None}
        assert peer.ask("stop_mps", slot=SLOT) == {"done": None}
        assert other.poll() is None


def test_a_slow_start_holds_up_no_other_slot() -> None:
    with running(start_deadline_s=600) as helper:
        slow = helper.control.parent / "slow"
        slow.touch()
        peer = helper.peer()
        first = {"id": 1, "action": "start_mps", "slot": SLOT, "gpu": helper.gpus[0], "uid": UID}
        peer.channel.sendall(json.dumps(first).encode())
        until((helper.folder / "run" / f"mps-{SLOT}.pid").exists, "the slow start")
        mode = {"id": 2, "action": "set_compute_mode", "gpu": helper.gpus[1], "mode": "default"}
        assert peer.send(json.dumps(mode).encode()) == {"id": 2, "done": None}
        slow.unlink()
        assert peer.receive()["id"] == 1
        assert "done" in peer.ask("stop_mps", slot=SLOT)


def test_a_driver_that_hangs_on_one_gpu_is_told_and_the_others_answer() -> None:
    with running(driver_deadline_s=0.3) as helper:
        (helper.folder / "hangs").write_text(helper.gpus[0])
        peer = helper.peer()
        answer = peer.ask("set_compute_mode", gpu=helper.gpus[0], mode="default")
        assert "has not answered for 0.3 s" in answer["failed"]
        assert peer.ask("set_compute_mode", gpu=helper.gpus[1], mode="default") == {"done": None}
        again = peer.ask("set_compute_mode", gpu=helper.gpus[0], mode="default")
        assert "an earlier call" in again["failed"]
        (helper.folder / "hangs").unlink()
        until(
            lambda: (
                peer.ask("set_compute_mode", gpu=helper.gpus[0], mode="default") == {"done": None}
            ),
            "the driver",
        )


def test_a_process_on_the_gpu_is_ended_and_only_there(helper: Helper, peer: Peer) -> None:
    with sleeping() as process:
        ticks = helper.list_on_gpu(process.pid, helper.gpus[0])
        asked = {"pid": process.pid, "start_ticks": ticks, "number": int(signal.SIGTERM)}
        wrong = peer.ask("end_process", gpu=helper.gpus[1], **asked)
        assert "lists no process" in wrong["refused"]
        assert process.poll() is None
        assert peer.ask("end_process", gpu=helper.gpus[0], **asked) == {"done": None}
        assert process.wait(20) == -signal.SIGTERM
        assert peer.ask("end_process", gpu=helper.gpus[0], **asked) == {"done": None}
    told = [line for line in helper.audit() if line["action"] == "end_process"]
    whose = {"uid": os.getuid(), "command": "sleep 600"}
    assert [line.get("process") for line in told] == [whose, whose, None]


def test_a_process_that_is_not_on_any_gpu_is_not_ended(helper: Helper, peer: Peer) -> None:
    with sleeping() as process:
        ticks = ProcProcessTable().start_ticks(process.pid)
        answer = peer.ask(
            "end_process", gpu=helper.gpus[0], pid=process.pid, start_ticks=ticks, number=9
        )
        assert "lists no process" in answer["refused"]
        assert process.poll() is None


def test_a_pid_that_was_given_out_again_is_not_ended(helper: Helper, peer: Peer) -> None:
    with sleeping() as process:
        ticks = helper.list_on_gpu(process.pid, helper.gpus[0])
        answer = peer.ask(
            "end_process", gpu=helper.gpus[0], pid=process.pid, start_ticks=ticks - 1, number=9
        )
        assert "started at" in answer["refused"]
        assert process.poll() is None


def test_the_lease_of_another_users_process_is_read(helper: Helper, peer: Peer) -> None:
    with sleeping(GPUPOOL_LEASE_ID="l-1") as with_lease, sleeping() as without:
        for process, expected in ((with_lease, "l-1"), (without, "")):
            ticks = helper.list_on_gpu(process.pid, helper.gpus[2])
            answer = peer.ask("lease_of", gpu=helper.gpus[2], pid=process.pid, start_ticks=ticks)
            assert answer == {"done": expected}
        other = peer.ask("lease_of", gpu=helper.gpus[3], pid=process.pid, start_ticks=ticks)
        assert "refused" in other


def test_a_probe_runs_as_the_slots_user_under_listed_names_only() -> None:
    script = "id -u; id -G; env | sort; exit 3"
    with running(probe_program=f"sh,-c,{script}") as helper:
        peer = helper.peer()
        pipe = start(peer, helper)["pipe_directory"]
        asked = {"slot": SLOT, "uid": UID, "deadline_s": 10}
        given = {"CUDA_VISIBLE_DEVICES": helper.gpus[0], "GPUPOOL_LEASE_ID": "l-1"}
        answer = peer.ask("probe", environment=given, **asked)["done"]
        assert answer["exit_code"] == 3
        uid, groups, *variables = answer["output"].splitlines()
        assert uid == str(UID)
        assert "0" not in groups.split()
        names = {each.partition("=")[0] for each in variables} - {"PWD", "OLDPWD", "SHLVL", "_"}
        assert names == {*given, "CUDA_MPS_PIPE_DIRECTORY", "PATH"}
        assert f"CUDA_MPS_PIPE_DIRECTORY={pipe}" in variables
        other = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"}
        assert "refused" in peer.ask("probe", environment=other, **asked)
        assert "refused" in peer.ask("probe", environment={"LD_PRELOAD": "/tmp/x.so"}, **asked)
        assert "refused" in peer.ask("probe", environment={}, **{**asked, "uid": 1001})
        peer.ask("stop_mps", slot=SLOT)


def test_a_probe_that_takes_too_long_is_killed_with_its_children() -> None:
    with running(probe_program="sh,-c,sleep 4711 & sleep 4712") as helper:
        peer = helper.peer()
        start(peer, helper)
        answer = peer.ask("probe", slot=SLOT, uid=UID, environment={}, deadline_s=0.3)
        assert "took longer than 0.3 s" in answer["failed"]
        peer.ask("stop_mps", slot=SLOT)

        def left() -> list[int]:
            found = []
            for each in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = each.read_bytes().split(b"\0")
                except OSError:
                    continue
                if words[:2] in ([b"sleep", b"4711"], [b"sleep", b"4712"]):
                    found.append(int(each.parent.name))
            return found

        until(lambda: not left(), "the probe's children to be gone")


SPEC = {
    "cdiVersion": "0.6.0",
    "kind": "gpupool.dev/lease",
    "devices": [{"name": "l-1", "containerEdits": {"env": ["GPUPOOL_LEASE_ID=l-1"]}}],
}


def test_cdi_specs_are_written_listed_and_removed(helper: Helper, peer: Peer) -> None:
    text = json.dumps(SPEC)
    assert peer.ask("write_cdi", lease_id="l-1", spec=text) == {"done": None}
    file = helper.folder / "cdi" / "gpupool-l-1.json"
    assert json.loads(file.read_text()) == SPEC
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    line = helper.audit()[-1]["arguments"]
    assert set(line["spec"]) == {"bytes", "sha256"}
    assert peer.ask("cdi_leases") == {"done": ["l-1"]}
    for _ in range(2):
        assert peer.ask("remove_cdi", lease_id="l-1") == {"done": None}
    assert peer.ask("cdi_leases") == {"done": []}


def test_a_gpu_with_a_process_or_a_daemon_is_not_reset(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    smi = tmp_path / "smi"
    smi.write_text('#!/bin/sh\necho "$@" >> "$0.calls"\n[ ! -e "$0.fails" ]\n')
    smi.chmod(0o755)
    with running(smi_program=smi) as helper:
        peer = helper.peer()
        gpu = helper.gpus[0]
        with sleeping() as process:
            helper.list_on_gpu(process.pid, gpu)
            assert peer.ask("reset_gpu", gpu=gpu) == {"refused": f"gpu: 1 processes are on {gpu}"}
        start(peer, helper)
        assert "the MPS daemon" in peer.ask("reset_gpu", gpu=gpu)["refused"]
        peer.ask("stop_mps", slot=SLOT)
        assert not (tmp_path / "smi.calls").exists()
        assert peer.ask("reset_gpu", gpu=gpu) == {"done": None}
        assert (tmp_path / "smi.calls").read_text() == f"--gpu-reset -i {gpu}\n"
        (tmp_path / "smi.fails").touch()
        assert "gave 1" in peer.ask("reset_gpu", gpu=gpu)["failed"]


def test_the_bus_is_scanned(helper: Helper, peer: Peer) -> None:
    assert peer.ask("rescan_pci") == {"done": None}
    assert helper.rescan.read_text() == "1\n"


def test_a_second_helper_on_the_socket_does_not_start(helper: Helper) -> None:
    second = Helper(socket=helper.socket)
    try:
        with pytest.raises(AssertionError, match="another helper serves"):
            second.start()
    finally:
        second.end()
    assert helper.ask("cdi_leases") == {"done": []}


def test_a_helper_that_ends_removes_its_socket() -> None:
    with running() as helper:
        assert helper.stop() == 0
        assert not helper.socket.exists()
