"""Containers under leases: specs on a node with a real agent, and the engine's command."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from tests.integration.allocator_daemon import Daemon
from tests.integration.test_cli import PATIENCE_S, Pool, until

from gpupool import Client

ENGINE = """#!{python}
import json, os, sys
with open({record!r}, "a") as file:
    file.write(json.dumps({{"argv": sys.argv, "lease": os.environ.get("GPUPOOL_LEASE_ID"),
                            "specs": os.listdir({specs!r})}}) + "\\n")
sys.exit(5)
"""


@dataclass
class Node(Pool):
    """A pool of one host that writes CDI specs, with an engine that records its calls."""

    specs: Path = Path()
    record: Path = Path()

    def calls(self) -> list[dict[str, object]]:
        """What the engine was called with, and the specs that were there then."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        self.record.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("containers")
    sockets = tmp_path_factory.mktemp("s")
    control = tmp_path_factory.mktemp("c")
    daemon = Daemon(folder).start()
    address = f"127.0.0.1:{daemon.grpc}"
    ready = folder / "hosts.json"
    specs = control / "nodes" / "h1" / "cdi"
    with (folder / "hosts.log").open("wb") as log:
        hosts = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpupool_agent.simulated", "--allocator", address),
                *("--node", "dgx-h100:h1", "--control", control, "--cdi"),
                *("--local-socket-dir", sockets, "--ready-file", ready),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        until(ready.exists)
        made = Node(address, f"unix:{sockets / 'h1.sock'}", daemon)
        made.specs, made.record = specs, folder / "calls.jsonl"
        assert made.ends_empty()
        yield made
    finally:
        hosts.send_signal(signal.SIGTERM)
        hosts.wait(PATIENCE_S)
        daemon.end()


@pytest.fixture
def engines(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first on PATH with podman and docker that record what they are told."""
    for name in ("podman", "docker"):
        program = tmp_path / name
        program.write_text(
            ENGINE.format(python=sys.executable, record=str(node.record), specs=str(node.specs))
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def words_after(words: list[str], flag: str) -> list[str]:
    return [word for before, word in pairwise(words) if before == flag]


def test_a_slice_runs_in_a_container_with_its_devices_and_environment(
    node: Node, engines: Path
) -> None:
    code, _, errors = node.call(
        *("run", "--gpus", "0.1", "--container", "image:1", "--container-arg=--volume=/d:/d"),
        *("--", "python", "-c", "print(1)"),
        address=node.socket,
    )
    assert code == 5, errors
    [call] = node.calls()
    words = [str(word) for word in call["argv"]]  # type: ignore[attr-defined] # a list
    lease = str(call["lease"])
    assert Path(words[0]).name == "podman"
    assert words[1:3] == ["run", "--rm"]
    variables = dict(word.split("=", 1) for word in words_after(words, "--env"))
    gpu = variables["CUDA_VISIBLE_DEVICES"]
    assert words_after(words, "--device") == [f"gpupool.io/lease={lease}", f"nvidia.com/gpu={gpu}"]
    assert variables["GPUPOOL_LEASE_ID"] == lease
    assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "10"
    assert words[-5:] == ["--volume=/d:/d", "image:1", "python", "-c", "print(1)"]
    assert call["specs"] == [f"gpupool-lease-{lease}.json"]
    assert node.ends_empty()
    assert list(node.specs.iterdir()) == []


def test_the_engine_can_be_chosen_and_the_image_may_say_what_runs(
    node: Node, engines: Path
) -> None:
    code, _, errors = node.call(
        *("run", "--gpus", "2", "--engine", "docker", "--container", "image:2"),
        address=node.socket,
    )
    assert code == 5, errors
    [call] = node.calls()
    words = [str(word) for word in call["argv"]]  # type: ignore[attr-defined] # a list
    assert Path(words[0]).name == "docker"
    assert len(words_after(words, "--device")) == 3
    assert words[-1] == "image:2"
    assert "--user" not in words
    assert node.ends_empty()


def test_the_command_can_be_printed_and_the_lease_is_held_meanwhile(
    node: Node, engines: Path
) -> None:
    process = node.start(
        *("run", "--gpus", "1", "--container", "image:3", "--print", "--", "sh", "-c", "a b"),
        address=node.socket,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("podman run --rm --interactive --device gpupool.io/lease=l-")
    assert line.endswith("image:3 sh -c 'a b'\n")
    with Client(node.address) as client:
        [lease] = client.list_leases()
        assert f"gpupool.io/lease={lease.lease_id}" in line
    spec = json.loads((node.specs / f"gpupool-lease-{lease.lease_id}.json").read_text())
    assert [device["name"] for device in spec["devices"]] == [lease.lease_id]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert node.ends_empty()
    assert node.calls() == []


def test_a_printed_command_ends_with_its_lease(node: Node) -> None:
    process = node.start("run", "--gpus", "1", "--container", "i", "--print", address=node.socket)
    assert process.stdout is not None
    process.stdout.readline()
    with Client(node.address) as client:
        [lease] = client.list_leases()
        client.release(lease.lease_id, "enough")
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "enough" in errors
    assert node.ends_empty()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--print", "--", "true"), "--print needs --container"),
        (("--engine", "docker", "--", "true"), "--engine needs --container"),
        ((), "Missing argument"),
        (("--container", "i", "--engine", "nerdctl-9"), "no nerdctl-9 on this host"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_asked_for(
    words: tuple[str, ...], complaint: str, node: Node
) -> None:
    code, _, errors = node.call("run", "--gpus", "1", *words)
    assert code in (64, 66)
    assert complaint in errors


def test_the_environment_is_printed_for_shells_programs_and_slurm(node: Node) -> None:
    lease = node.rows("lease", "create", "--gpus", "0.3")["lease_id"]
    variables = json.loads(node.call("lease", "env", lease, "-o", "json")[1])
    assert variables["GPUPOOL_LEASE_ID"] == lease
    assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
    shell = node.call("lease", "env", lease)[1]
    assert f"export GPUPOOL_LEASE_ID={lease}\n" in shell
    sourced = subprocess.run(
        ["sh", "-c", f"{shell}\nenv"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {f"{name}={value}" for name, value in variables.items()} <= set(sourced)
    lines = [f"{name}={value}" for name, value in sorted(variables.items())]
    assert node.call("lease", "env", lease, "-o", "env")[1].splitlines() == lines
    slurm = node.call("lease", "env", lease, "-o", "slurm")[1].splitlines()
    assert slurm == [f"export {line}" for line in lines]
    node.call("lease", "release", lease)
    assert node.ends_empty()


def test_the_matrix_of_a_running_node_is_shown(node: Node) -> None:
    code, output, _ = node.call("gpus", "--matrix")
    assert code == 0
    lines = output.splitlines()
    assert lines[0] == "node h1"
    assert lines[2].split()[:3] == ["GPU0", "X", "NV18"]
    assert "NIC0: mlx5_0 (InfiniBand ACTIVE 400 Gb/s rail 0)" in lines
    code, output, _ = node.call("gpus", "--matrix", "--node", "h1", "-o", "yaml")
    assert code == 0
    assert "joined:" in output
    code, _, errors = node.call("gpus", "--matrix", "--node", "h9")
    assert (code, "h9" in errors) == (66, True)
