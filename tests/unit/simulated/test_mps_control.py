"""The control daemon's stand-in over a simulated node: servers, users, faults, limits."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpupool_agent.simulated.cuda_client import EXIT_BUSY, EXIT_MPS, EXIT_OUT_OF_MEMORY
from gpupool_agent.simulated.machine import load_machine
from gpupool_agent.simulated.mps_control.host import BECOME_UID, FAULTS_FILE
from gpupool_agent.simulated.mps_control.launcher import write_launcher, write_probe
from gpupool_agent.simulated.node import SimulatedNode

DEADLINE_S = 20.0
EXCLUSIVE_PROCESS = 3
NOBODY_UID = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root has servers of two users")


class Daemon:
    """A daemon on one GPU of a node, its clients, and the faults of the node."""

    def __init__(self, directory: Path) -> None:
        self.node = SimulatedNode(
            node_id="n1", machine=load_machine("dgx-h100"), directory=directory
        )
        self.gpu = self.node.gpus[0]
        self.pipe = directory / "p"
        self.environment = {
            "PATH": os.environ["PATH"],
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(directory / "l"),
            "CUDA_VISIBLE_DEVICES": self.gpu.uuid,
            "GPUPOOL_SIMULATED_NODE": str(directory),
        }
        self.program = write_launcher(directory / "bin", node=directory)
        self.probe = write_probe(directory / "bin", node=directory)
        self.started: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        subprocess.run([self.program, "-d"], env=self.environment, check=True, timeout=DEADLINE_S)

    def ask(self, *lines: str, timeout_s: float = DEADLINE_S) -> list[str]:
        return subprocess.run(
            [self.program],
            env=self.environment,
            input="\n".join(lines),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=timeout_s,
        ).stdout.splitlines()

    def client(self, *flags: str, **environment: str) -> subprocess.Popen[str]:
        client = subprocess.Popen(
            [sys.executable, "-m", "gpupool_agent.simulated.cuda_client", *flags],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(client)
        return client

    def hold(self, *flags: str, **environment: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        client = self.client(*flags, **environment)
        assert client.stdout is not None
        line = client.stdout.readline()
        assert line, client.communicate()[1]
        return client, json.loads(line)

    def run_probe(self, uid: int, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.probe],
            env={**self.environment, BECOME_UID: str(uid), **environment},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )

    def server(self) -> int:
        until(lambda: len(self.ask("get_server_list")) == 1, "one server")
        (server,) = self.ask("get_server_list")
        return int(server)

    def status(self, server: int) -> str:
        return self.ask(f"get_server_status {server}")[0]

    def inject(self, text: str) -> None:
        (self.node.directory / FAULTS_FILE).write_text(text)

    def pid(self) -> int:
        return int((self.pipe / "nvidia-cuda-mps-control.pid").read_text())

    def close(self) -> None:
        for client in self.started:
            if client.poll() is None:
                client.kill()
            client.communicate()
        for path in self.pipe.glob("*.pid"):
            with_children = [int(path.read_text())]
            for pid in with_children:
                children = Path(f"/proc/{pid}/task/{pid}/children")
                with_children += map(int, children.read_text().split() if children.exists() else [])
                if children.exists():
                    os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"did not come true: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    # Pytest's own folders are closed to other users.
    with tempfile.TemporaryDirectory(prefix="gpupool-mps-") as name:
        Path(name).chmod(0o755)
        made = Daemon(Path(name))
        made.start()
        yield made
        made.close()


def test_a_client_starts_a_server_of_its_own_user(daemon: Daemon) -> None:
    client, said = daemon.hold("--memory-mib", "10")
    server = daemon.server()
    assert daemon.status(server) == "ACTIVE"
    assert daemon.ask(f"get_client_list {server}") == [str(client.pid)]
    assert daemon.ask("get_device_client_list") == [f"{daemon.gpu.uuid} {client.pid}"]
    assert daemon.ask("ps")[1].split()[:3] == [str(client.pid), "0", str(server)]
    assert said["sm_count"] == 132
    assert {each.pid for each in daemon.node.processes_on(daemon.gpu)} == {client.pid, server}


def test_the_tighter_limit_counts(daemon: Daemon) -> None:
    daemon.ask(
        "set_default_active_thread_percentage 50",
        f"set_default_device_pinned_mem_limit {daemon.gpu.uuid} 300M",
    )
    _, loose = daemon.hold("--memory-mib", "300", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="100")
    _, tight = daemon.hold("--memory-mib", "20", CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="10")
    assert (loose["sm_count"], tight["sm_count"]) == (66, 13)
    own = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"{daemon.gpu.uuid}=200M"}
    assert daemon.client("--memory-mib", "201", **own).wait(DEADLINE_S) == EXIT_OUT_OF_MEMORY
    own = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4G"}
    assert daemon.client("--memory-mib", "301", **own).wait(DEADLINE_S) == EXIT_OUT_OF_MEMORY


def test_a_default_is_for_future_servers_and_a_setting_for_new_clients(daemon: Daemon) -> None:
    daemon.hold()
    server = daemon.server()
    daemon.ask("set_default_active_thread_percentage 50")
    assert daemon.ask(f"get_active_thread_percentage {server}") == ["100.0"]
    assert daemon.hold()[1]["sm_count"] == 132
    assert daemon.ask(f"set_active_thread_percentage {server} 25") == ["25.0"]
    assert daemon.hold()[1]["sm_count"] == 33


def test_of_two_names_of_a_gpu_the_last_that_was_set_counts(daemon: Daemon) -> None:
    uuid = daemon.gpu.uuid
    daemon.ask(
        f"set_default_device_pinned_mem_limit {uuid} 300M",
        "set_default_device_pinned_mem_limit 0 100M",
    )
    assert daemon.ask(f"get_default_device_pinned_mem_limit {uuid}") == ["300M"]
    assert daemon.client("--memory-mib", "101").wait(DEADLINE_S) == EXIT_OUT_OF_MEMORY


@as_root
def test_a_client_of_another_user_waits_for_the_first_ones_to_go(daemon: Daemon) -> None:
    daemon.ask(f"start_server -uid {NOBODY_UID}")
    server = daemon.server()
    assert Path(f"/proc/{server}").stat().st_uid == NOBODY_UID
    first = daemon.client("--seconds", "0")  # root's: the empty server makes room
    assert first.wait(DEADLINE_S) == 0
    holder, _ = daemon.hold()
    probe = subprocess.Popen(
        [daemon.probe],
        env={**daemon.environment, BECOME_UID: str(NOBODY_UID)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with pytest.raises(subprocess.TimeoutExpired):
        probe.wait(0.5)
    holder.kill()
    assert probe.communicate(timeout=DEADLINE_S)[0].startswith('{"sm_count": 132')
    assert probe.returncode == 0


def test_a_death_with_work_in_flight_is_a_fault_until_all_have_gone(daemon: Daemon) -> None:
    busy, _ = daemon.hold("--work", "busy")
    stays, _ = daemon.hold("--stubborn")
    leaves, _ = daemon.hold()
    server = daemon.server()
    busy.kill()
    assert leaves.wait(DEADLINE_S) == EXIT_MPS
    assert daemon.status(server) == "FAULT"
    late = daemon.client()
    assert late.wait(DEADLINE_S) == EXIT_MPS
    assert late.stderr is not None
    assert "807" in late.stderr.read()
    stays.kill()
    until(lambda: daemon.status(server) == "ACTIVE", "the server recovered")
    daemon.hold()


def test_a_terminated_client_is_told_and_gone(daemon: Daemon) -> None:
    client, _ = daemon.hold("--work", "busy")
    server = daemon.server()
    assert daemon.ask(f"terminate_client {server} {client.pid}") == ["0"]
    assert daemon.ask(f"get_client_list {server}") == []
    assert client.wait(DEADLINE_S) == EXIT_MPS
    assert daemon.status(server) == "ACTIVE"
    assert daemon.ask(f"terminate_client {server} {client.pid}")[-1] == "1"


def test_shutdown_waits_for_clients_unless_forced(daemon: Daemon) -> None:
    client, _ = daemon.hold()
    server = daemon.server()
    daemon.ask(f"shutdown_server {server}")
    assert daemon.ask("get_server_list") == [str(server)]
    daemon.ask(f"shutdown_server {server} -f")
    assert client.wait(DEADLINE_S) == EXIT_MPS
    until(lambda: not alive(server), "the server ended")


def test_a_server_outlives_the_daemon_and_ends_with_its_clients(daemon: Daemon) -> None:
    client, _ = daemon.hold()
    server = daemon.server()
    os.kill(daemon.pid(), signal.SIGKILL)
    until(lambda: not (daemon.pid() and alive(daemon.pid())), "the daemon is dead")
    assert client.poll() is None
    assert alive(server)
    client.kill()
    until(lambda: not alive(server), "the server ended")


def test_without_a_daemon_a_client_runs_unconfined_unless_the_gpu_is_exclusive(
    daemon: Daemon,
) -> None:
    os.kill(daemon.pid(), signal.SIGKILL)
    until(lambda: not alive(daemon.pid()), "the daemon is dead")
    own = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"{daemon.gpu.uuid}=10M"}
    _, said = daemon.hold("--memory-mib", "500", **own)
    assert said["pipe"] == ""
    daemon.node.set_compute_mode(daemon.gpu, EXCLUSIVE_PROCESS)
    assert daemon.client().wait(DEADLINE_S) == EXIT_BUSY
    assert daemon.run_probe(0).returncode == 1


def test_a_server_keeps_unconfined_clients_off_an_exclusive_gpu(daemon: Daemon) -> None:
    daemon.node.set_compute_mode(daemon.gpu, EXCLUSIVE_PROCESS)
    daemon.ask("start_server -uid 0")
    daemon.server()
    assert daemon.client(CUDA_MPS_PIPE_DIRECTORY="/nowhere").wait(DEADLINE_S) == EXIT_BUSY
    assert daemon.hold()[1]["pipe"] == str(daemon.pipe)


def test_injected_a_slow_start_a_fault_and_a_crash(daemon: Daemon) -> None:
    daemon.inject("slow_start_s 3600")
    daemon.ask("start_server -uid 0")
    server = daemon.server()
    assert daemon.status(server) == "INITIALIZING"
    assert daemon.ask(f"get_client_list {server}") == [f"Server {server} is <busy>"]
    os.kill(server, signal.SIGKILL)
    until(lambda: daemon.ask("get_server_list") == [], "it is gone")
    daemon.inject("fault_server 1")
    daemon.ask("start_server -uid 0")
    server = daemon.server()
    until(lambda: daemon.status(server) == "FAULT", "FAULT")
    daemon.inject("")
    until(lambda: daemon.status(server) == "ACTIVE", "ACTIVE")
    daemon.inject("crash_server 1")
    until(lambda: daemon.ask("get_server_list") == [], "it crashed")


def test_injected_a_hung_command_and_a_daemon_that_does_not_quit(daemon: Daemon) -> None:
    daemon.inject("hang get_server_list\nrefuse_quit 1")
    assert daemon.ask("get_default_client_priority") == ["0"]
    for command in ("get_server_list", "quit -t 0"):
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.ask(command, timeout_s=0.5)
    assert alive(daemon.pid())


def test_quit_with_a_time_forces_servers_out(daemon: Daemon) -> None:
    client, _ = daemon.hold()
    done = subprocess.run(
        [daemon.program],
        env=daemon.environment,
        input="quit -t 0\n",
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1
    assert client.wait(DEADLINE_S) == EXIT_MPS
    assert daemon.node.processes_on(daemon.gpu) == []


def test_the_probe_says_what_it_was_given(daemon: Daemon) -> None:
    done = daemon.run_probe(
        0,
        CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="10",
        CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=f"{daemon.gpu.uuid}=100M",
    )
    assert json.loads(done.stdout) == {"sm_count": 13, "memory_mib": 100}
    daemon.inject("no_server 1")
    daemon.ask(f"shutdown_server {daemon.server()}")
    until(lambda: daemon.ask("get_server_list") == [], "the server ended")


def test_it_runs_as_a_module_too(daemon: Daemon) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpupool_agent.simulated.mps_control"],
        env=daemon.environment,
        input="get_default_active_thread_percentage\n",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    assert done.stdout == "100.0\n"
