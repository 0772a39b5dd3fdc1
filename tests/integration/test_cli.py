"""The command line against the real allocator and simulated hosts with real agents."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.allocator_daemon import Daemon

from gpupool import Client
from gpupool.model.lease import ENDED, LeaseState

GPUPOOL = (sys.executable, "-m", "gpupool.cli.main")
PATIENCE_S = 60.0


def until(met: Callable[[], Any]) -> Any:
    """What the condition gives once it is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := met()):
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.02)
    return found


@dataclass
class Pool:
    """Eight GPUs of one simulated host."""

    address: str
    socket: str
    daemon: Daemon

    def start(self, *words: str, address: str = "") -> subprocess.Popen[str]:
        """A command that goes on."""
        return subprocess.Popen(
            [*GPUPOOL, "--address", address or self.address, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *words: str, address: str = "") -> tuple[int, str, str]:
        """Exit code, output and errors of a command."""
        process = self.start(*words, address=address)
        output, errors = process.communicate(timeout=PATIENCE_S)
        return process.returncode, output, errors

    def rows(self, *words: str) -> Any:
        """A listing as JSON has it."""
        code, output, errors = self.call(*words, "-o", "json")
        assert (code, errors) == (0, "")
        return json.loads(output)

    def ends_empty(self) -> bool:
        """Every GPU is offered again and no lease is left."""
        with Client(self.address) as client:
            until(lambda: client.pool().devices_free == 8)
            return list(client.list_leases()) == []


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("cli")
    daemon = Daemon(folder).start()
    address = f"127.0.0.1:{daemon.grpc}"
    # The path of a Unix socket is short, so it is not below the test's own folder.
    sockets = tmp_path_factory.mktemp("s")
    ready = folder / "hosts.json"
    with (folder / "hosts.log").open("wb") as log:
        hosts = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpupool_agent.simulated", "--allocator", address),
                *("--node", "dgx-h100:h1", "--control", folder / "control"),
                *("--local-socket-dir", sockets, "--ready-file", ready),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        until(ready.exists)
        made = Pool(address, f"unix:{sockets / 'h1.sock'}", daemon)
        assert made.ends_empty()
        yield made
    finally:
        hosts.send_signal(signal.SIGTERM)
        hosts.wait(PATIENCE_S)
        daemon.end()


def test_a_command_runs_with_the_leases_environment_and_gives_back_its_code(pool: Pool) -> None:
    code, output, errors = pool.call("run", "--gpus", "0.1", "--", "sh", "-c", "env; exit 7")
    assert code == 7
    variables = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    assert variables["CUDA_VISIBLE_DEVICES"].startswith("GPU-")
    assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "10"
    assert variables["GPUPOOL_LEASE_ID"] in errors
    assert pool.ends_empty()


def test_a_signal_that_ends_the_command_is_128_and_its_number(pool: Pool) -> None:
    code, _, _ = pool.call("run", "--gpus", "1", "--", "sh", "-c", "kill -SEGV $$")
    assert code == 128 + signal.SIGSEGV
    assert pool.ends_empty()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1]
)
def test_signals_reach_the_command(pool: Pool, tmp_path: Path, number: signal.Signals) -> None:
    started = tmp_path / "started"
    script = (
        f"trap 'echo heard; exit 9' {number.value}; : > {started}; while :; do sleep 0.05; done"
    )
    process = pool.start("run", "--gpus", "1", "--", "sh", "-c", script)
    until(started.exists)
    process.send_signal(number)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (9, "heard\n")
    assert pool.ends_empty()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_waiting_leaves_the_queue(pool: Pool, number: signal.Signals) -> None:
    with Client(pool.address) as client, client.lease(gpus=8):
        process = pool.start("run", "--gpus", "1", "--", "true")
        until(lambda: client.pool().waiting == 1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 128 + number
        assert "waiting, position 1: " in errors
        assert "Traceback" not in errors
        assert client.pool().waiting == 0
    assert pool.ends_empty()


def test_killing_the_holder_frees_the_gpu(pool: Pool) -> None:
    process = pool.start("run", "--gpus", "1", "--", "sleep", "1000", address=pool.socket)
    with Client(pool.address) as client:
        lease = until(lambda: [x for x in client.list_leases() if x.state is LeaseState.ACTIVE])[0]
        assert lease.process is not None
        assert (lease.process.pid, lease.process.node_id) == (process.pid, "h1")
        assert lease.spec.uid == os.getuid()
        (child,) = until(psutil.Process(process.pid).children)
        process.kill()
        child.kill()  # it holds our pipes open, and no GPU
        process.communicate(timeout=PATIENCE_S)
        until(lambda: client.get_lease(lease.lease_id).state in ENDED)
    assert pool.ends_empty()


def test_a_lease_released_under_the_command_ends_it_and_says_why(pool: Pool) -> None:
    process = pool.start("run", "--gpus", "1", "--", "sleep", "1000")
    with Client(pool.address) as client:
        lease = until(lambda: [x for x in client.list_leases() if x.state is LeaseState.ACTIVE])[0]
        client.release(lease.lease_id, "the operator needs it")
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "the operator needs it" in errors
    assert pool.ends_empty()


def test_members_that_are_not_started_are_pointed_at(pool: Pool) -> None:
    _, _, errors = pool.call("run", "--gpus", "0.1", "--replicas", "3", "--", "true")
    assert "2 more members are not started: see gpupool lease hostfile l-" in errors
    assert pool.ends_empty()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("run", "--gpus", "250", "--", "true"), 64, "gpus: 250.0 is not in"),
        (("run", "--gpus", "nan", "--", "true"), 64, "gpus: nan is not in"),
        (("run", "--", "true"), 64, "say what is needed"),
        (("run", "--gpus", "1", "--", "/no/such/program"), 127, "/no/such/program"),
        (("run", "--gpus", "1", "--", "/etc/passwd"), 126, "Permission denied"),
        (("lease", "create", "--gpus", "9", "--wait", "0"), 75, "would help"),
        (("lease", "create", "--gpus", "0.05"), 64, "share_pct"),
        (("lease", "show", "l-nothing"), 66, "l-nothing"),
        (("lease", "list", "--state", "sleeping"), 64, "sleeping"),
        (("hold", "remove", "h-nothing"), 66, "h-nothing"),
        (("hold", "add", "GPU-", "--reason", "x"), 64, "hold.target"),
        (("events", "--after", "-2"), 64, "-2"),
        (("lease", "create", "--gpus", "1", "--replicas", "9999"), 64, "1..4096"),
    ],
)
def test_a_refusal_has_its_exit_code_and_names_what_is_wrong(
    pool: Pool, words: tuple[str, ...], code: int, said: str
) -> None:
    found, _, errors = pool.call(*words)
    assert said in errors
    assert found == code
    assert "Traceback" not in errors
    assert pool.ends_empty()


def test_nobody_there_is_told_apart_from_no_room() -> None:
    nowhere = Pool("127.0.0.1:1", "", Daemon(Path()))
    code, _, errors = nowhere.call("nodes")
    assert code == 75
    assert "no pool can be reached at 127.0.0.1:1" in errors


def test_a_lease_lives_from_create_to_release(pool: Pool) -> None:
    created = pool.rows("lease", "create", "--gpus", "2", "--name", "bench", "--ttl", "1h")
    lease_id = created["lease_id"]
    assert created["state"] == "LEASE_STATE_ACTIVE"
    (row,) = pool.rows("lease", "list")
    assert row["lease_id"] == lease_id
    assert row["spec"]["display_name"] == "bench"
    _, shown, _ = pool.call("lease", "show", lease_id)
    assert "renewals within 3600 s" in shown
    _, hosts, _ = pool.call("lease", "hostfile", lease_id)
    assert hosts == "h1 slots=2\n"
    _, exports, _ = pool.call("lease", "env", lease_id)
    evaluated = subprocess.run(
        ["sh", "-c", exports + 'echo "$GPUPOOL_LEASE_ID"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert evaluated.stdout.strip() == lease_id
    watching = pool.start("lease", "watch", lease_id, "-o", "json")
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())["state"] == "LEASE_STATE_ACTIVE"
    assert pool.call("lease", "release", lease_id)[0] == 0
    last = watching.communicate(timeout=PATIENCE_S)[0].splitlines()[-1]
    assert json.loads(last)["state"] == "LEASE_STATE_RELEASED"
    assert pool.ends_empty()


def test_several_groups_come_from_a_file(pool: Pool, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        """
groups:
- {name: workers, replicas: 2, whole: {count: 2}}
- {name: router, replicas: 1, cpu_milli: 500}
"""
    )
    lease = pool.rows("lease", "create", "--spec", str(spec))
    assert [member["group"] for member in lease["members"]] == ["workers", "workers", "router"]
    pool.call("lease", "release", lease["lease_id"])
    spec.write_text("groups: [{name: workers, replicas: 2, holes: 3}]")
    code, _, errors = pool.call("lease", "create", "--spec", str(spec))
    assert code == 64
    assert "holes" in errors
    assert pool.ends_empty()


def test_explain_answers_both_ways(pool: Pool) -> None:
    assert pool.call("explain", "--gpus", "8")[1].startswith("yes")
    code, output, _ = pool.call("explain", "--gpus", "9", "--nodes")
    assert code == 0
    assert output.startswith("no: ")
    assert "h1" in output
    assert pool.rows("explain", "--gpus", "9")["granted"] is False


def test_listings_have_the_names_of_the_protos(pool: Pool) -> None:
    (node,) = pool.rows("nodes")
    assert (node["node_id"], node["state"]) == ("h1", "NODE_STATE_CONNECTED")
    gpus = pool.rows("gpus", "--node", "h1")
    assert len(gpus) == 8
    assert gpus[0]["device"]["uuid"].startswith("GPU-")
    assert pool.rows("pool")["devices"] == 8
    assert "1/1" in pool.call("top")[1]
    assert pool.call("nodes", "-o", "yaml")[1].startswith("- node_id: h1")


def test_holds_come_and_go(pool: Pool) -> None:
    made = pool.rows("hold", "add", "h1", "--reason", "fan is loud", "--for", "2h")
    assert made["reason"] == "fan is loud"
    code, _, errors = pool.call("lease", "create", "--gpus", "1", "--wait", "0")
    assert code == 75
    assert "held" in errors
    assert [hold["hold_id"] for hold in pool.rows("hold", "list")] == [made["hold_id"]]
    assert pool.call("hold", "remove", made["hold_id"])[0] == 0
    assert pool.ends_empty()


def test_events_follow_the_pool(pool: Pool) -> None:
    past = pool.rows("events")
    assert past[0]["kind"] == "allocator.started"
    process = pool.start("events", "--follow", "--after", past[-1]["sequence"], "-o", "json")
    pool.call("run", "--gpus", "1", "--", "true")
    assert process.stdout is not None
    following = [json.loads(process.stdout.readline()) for _ in range(2)]
    assert [int(event["sequence"]) for event in following] == [
        int(past[-1]["sequence"]) + 1,
        int(past[-1]["sequence"]) + 2,
    ]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors.strip()) == (130, "")


def test_a_wait_for_events_that_may_never_come_is_told(pool: Pool) -> None:
    newest = int(pool.rows("events")[-1]["sequence"])
    process = pool.start("events", "-f", "--after", str(newest + 1000), "--subject", "h2")
    assert process.stderr is not None
    told = [process.stderr.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_S)[1].strip() == ""
    assert told == [
        f"gpupool: after: the newest event is {newest}, waiting for those after {newest + 1000}\n",
        "gpupool: subject: 'h2' is not known to the pool; waiting for it\n",
    ]


def test_a_lease_that_nobody_renews_shows_when_it_expires(pool: Pool) -> None:
    lease_id = pool.rows("lease", "create", "--gpus", "1", "--ttl", "10m")["lease_id"]
    with Client(pool.address) as client:
        first = client.get_lease(lease_id).expire_unix_s
        assert first is not None
        assert 590 < first - time.time() <= 600
        (listed,) = client.list_leases()
        assert listed.expire_unix_s == pytest.approx(first, abs=1)
        client.keep_alive([lease_id])
        renewed = client.get_lease(lease_id).expire_unix_s
        assert renewed is not None
        assert renewed > first
        assert "unless it is renewed" in pool.call("lease", "show", lease_id)[1]
        client.release(lease_id)
        until(lambda: client.get_lease(lease_id).state is LeaseState.RELEASED)
        assert client.get_lease(lease_id).expire_unix_s is None
    assert pool.ends_empty()


def test_a_lease_outlives_the_allocators_crash_and_is_still_renewed(pool: Pool) -> None:
    with Client(pool.address) as client, client.lease(gpus=1, ttl=2) as lease:
        pool.daemon.kill()
        pool.daemon.start()
        until(lambda: client.get_lease(lease.id).state is LeaseState.ACTIVE)
        outlived = time.monotonic() + 4
        until(lambda: time.monotonic() > outlived)
        assert not lease.lost
        assert client.get_lease(lease.id).state is LeaseState.ACTIVE
    assert pool.ends_empty()
