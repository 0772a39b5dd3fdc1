"""The CUDA-client stand-in: a real process that obeys its environment."""

import contextvars
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpupool_agent.simulated.cuda_client import (
    EXIT_NO_DEVICE,
    EXIT_NO_NODE,
    EXIT_OUT_OF_MEMORY,
    memory_limits_mib,
)
from gpupool_agent.simulated.machine import load_machine
from gpupool_agent.simulated.node import CURRENT_NODE, SimulatedNode
from gpupool_agent.simulated.nvml_library import install

DEADLINE_S = 20.0
NOBODY_UID = 65534


class Clients:
    """Starts clients on one node and ends those that are left."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, *flags: str, uid: int | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        client = subprocess.Popen(
            [sys.executable, "-m", "gpupool_agent.simulated.cuda_client", *flags],
            env={
                "PATH": os.environ["PATH"],
                "GPUPOOL_SIMULATED_NODE": str(self.node.directory),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            user=uid,
        )
        self.started.append(client)
        return client

    def hold(self, *flags: str, **environment: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """Start one and wait until it holds its memory."""
        client = self.start(*flags, **environment)
        assert client.stdout is not None
        line = client.stdout.readline()
        assert line, client.communicate()[1]
        return client, json.loads(line)

    def close(self) -> None:
        for client in self.started:
            if client.poll() is None:
                client.kill()
            client.communicate()


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[Clients]:
    install()
    tmp_path.chmod(0o755)
    node = SimulatedNode(node_id="n1", machine=load_machine("dgx-h100"), directory=tmp_path)
    made = Clients(node)
    yield made
    made.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def listed(node: SimulatedNode, index: int) -> dict[int, int]:
    """Return what NVML lists on a GPU: MiB by pid."""

    def read() -> dict[int, int]:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        both = pynvml.nvmlDeviceGetComputeRunningProcesses(
            handle
        ) + pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
        pynvml.nvmlShutdown()
        return {process.pid: process.usedGpuMemory >> 20 for process in both}

    context = contextvars.copy_context()
    context.run(CURRENT_NODE.set, node)
    return context.run(read)


def test_a_client_is_listed_while_it_lives_and_not_after_kill_9(clients: Clients) -> None:
    gpu = clients.node.gpus[2]
    client, said = clients.hold("--memory-mib", "300", CUDA_VISIBLE_DEVICES=gpu.uuid)
    assert said["uuids"] == [gpu.uuid]
    assert said["pipe"] == ""
    assert listed(clients.node, 2) == {client.pid: 300}
    assert listed(clients.node, 1) == {}
    client.send_signal(signal.SIGKILL)
    client.wait(DEADLINE_S)
    assert listed(clients.node, 2) == {}
    assert list(clients.node.processes.directory.iterdir()) == []


def test_a_client_that_is_killed_and_not_yet_reaped_holds_nothing(clients: Clients) -> None:
    client, _ = clients.hold(CUDA_VISIBLE_DEVICES="0")
    client.send_signal(signal.SIGKILL)
    until(lambda: listed(clients.node, 0) == {})
    assert client.poll() is not None


def test_a_client_ends_by_itself_and_leaves_nothing(clients: Clients) -> None:
    client = clients.start("--seconds", "0", CUDA_VISIBLE_DEVICES="0")
    assert client.wait(DEADLINE_S) == 0
    assert list(clients.node.processes.directory.iterdir()) == []


def test_an_orphan_outlives_its_parent_and_still_holds_memory(clients: Clients) -> None:
    client, said = clients.hold("--orphan", "--memory-mib", "50", CUDA_VISIBLE_DEVICES="0")
    assert said["pid"] != client.pid
    client.kill()
    client.wait(DEADLINE_S)
    assert listed(clients.node, 0) == {said["pid"]: 50}
    os.kill(said["pid"], signal.SIGKILL)
    until(lambda: listed(clients.node, 0) == {})


def test_no_more_memory_than_the_gpu_has(clients: Clients) -> None:
    usable_mib = 81559 - 551
    clients.hold("--memory-mib", str(usable_mib - 100), CUDA_VISIBLE_DEVICES="0")
    client = clients.start("--memory-mib", "101", CUDA_VISIBLE_DEVICES="0")
    assert client.wait(DEADLINE_S) == EXIT_OUT_OF_MEMORY
    clients.hold("--memory-mib", "100", CUDA_VISIBLE_DEVICES="0")


def test_the_mps_limit_holds_through_mps_and_not_without(clients: Clients, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    limit = f"{clients.node.gpus[0].uuid}=200M"
    environment = {
        "CUDA_VISIBLE_DEVICES": clients.node.gpus[0].uuid,
        "CUDA_MPS_PIPE_DIRECTORY": str(pipe),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": limit,
    }
    _, unconfined = clients.hold("--memory-mib", "201", **environment)
    assert unconfined["pipe"] == ""
    pipe.mkdir()
    assert clients.start("--memory-mib", "201", **environment).wait(DEADLINE_S) == (
        EXIT_OUT_OF_MEMORY
    )
    _, confined = clients.hold("--memory-mib", "200", **environment)
    assert confined["pipe"] == str(pipe)


@pytest.mark.skipif(os.getuid() != 0, reason="only root starts clients of two users")
def test_a_client_of_another_user_waits_until_mps_is_free_of_the_first(
    clients: Clients, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    pipe.mkdir()
    environment = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_PIPE_DIRECTORY": str(pipe)}
    first, _ = clients.hold(**environment)
    clients.hold(**environment)
    # An interpreter in a directory that is closed to others cannot be started as
    # another user, so the second user is put into the record of the first client.
    path = clients.node.processes.directory / str(first.pid)
    row = json.loads(path.read_text())
    path.write_text(json.dumps({**row, "uid": NOBODY_UID}))
    third = clients.start("--seconds", "0", **environment)
    with pytest.raises(subprocess.TimeoutExpired):
        third.wait(0.5)
    first.kill()
    first.wait(DEADLINE_S)
    assert third.wait(DEADLINE_S) == 0


def test_a_device_that_is_not_there_or_is_lost_is_no_device(clients: Clients) -> None:
    client = clients.start(CUDA_VISIBLE_DEVICES="GPU-none")
    assert client.wait(DEADLINE_S) == EXIT_NO_DEVICE
    gpu = clients.node.gpus[0]
    clients.node.set_lost(gpu, lost=True)
    client = clients.start(CUDA_VISIBLE_DEVICES=gpu.uuid)
    assert client.wait(DEADLINE_S) == EXIT_NO_DEVICE


def test_the_node_is_found_through_the_lease_environment(clients: Clients, tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    (nodes / "n1").symlink_to(clients.node.directory)
    _, said = clients.hold(
        GPUPOOL_SIMULATED_NODE="", GPUPOOL_SIMULATED_NODES=str(nodes), GPUPOOL_NODE_ID="n1"
    )
    assert len(said["uuids"]) == 8
    client = clients.start(
        GPUPOOL_SIMULATED_NODE="", GPUPOOL_SIMULATED_NODES=str(nodes), GPUPOOL_NODE_ID="n2"
    )
    assert client.wait(DEADLINE_S) == EXIT_NO_NODE


def test_a_client_bound_to_its_input_ends_with_it(clients: Clients) -> None:
    client = subprocess.Popen(
        [sys.executable, "-m", "gpupool_agent.simulated.cuda_client", "--until-stdin-closes"],
        env={"GPUPOOL_SIMULATED_NODE": str(clients.node.directory)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert client.stdin is not None
    assert client.stdout is not None
    assert client.stdout.readline()
    client.stdin.close()
    assert client.wait(DEADLINE_S) == 0
    client.stdout.close()


def test_limits_are_read_in_both_units_and_forms() -> None:
    assert memory_limits_mib("0=2G,GPU-a=300M") == {"0": 2048, "GPU-a": 300}
    assert memory_limits_mib("") == {}
