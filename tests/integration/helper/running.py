"""A helper that runs as root over a simulated driver, and peers of other users."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration.helper.helper_program import simulated_node

from gpupool_agent.devices.processes import ProcProcessTable
from gpupool_agent.simulated.gpu_processes import GpuProcess

DEADLINE_S = 20.0
AGENT_UID = 40961
STRANGER_UID = 40962
HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {DEADLINE_S} s for: {what}"
        time.sleep(0.01)
    return found


class Helper:
    """The program, started and stopped by tests. Its folder is short: sockets lie in it."""

    def __init__(self, **settings: object) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gh"))
        self.folder.chmod(0o755)
        self.node = simulated_node(self.folder)
        self.gpus = [gpu.uuid for gpu in self.node.gpus]
        self.socket = self.folder / "run" / "helper.sock"
        self.control = self.folder / "control" / "mps-control"
        self.control.parent.mkdir()
        text = (HERE / "mps_stand_in.py").read_text()
        self.control.write_text(f"#!{sys.executable}\n{text}")
        self.control.chmod(0o755)
        self.rescan = self.folder / "rescan"
        self.settings = {
            "socket": self.socket,
            "socket_group": AGENT_UID,
            "agent_user": AGENT_UID,
            "run_dir": self.folder / "run",
            "mps_dir": self.folder / "mps",
            "mps_supervisor": "session",
            "mps_control": self.control,
            "cdi_dir": self.folder / "cdi",
            "pci_rescan_file": self.rescan,
            "stop_deadline_s": 2,
            **settings,
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.log = self.folder / "log"
        self._peers: list[Peer] = []

    def start(self) -> None:
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        flags = [
            word
            for key, value in self.settings.items()
            for word in (f"--{key.replace('_', '-')}", str(value))
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.integration.helper.helper_program",
                    str(self.folder),
                    "--ready-file",
                    str(ready),
                    *flags,
                ],
                cwd=ROOT,
                stderr=log,
            )
        running = self.process
        until(lambda: ready.exists() or running.poll() is not None, "the helper")
        assert running.poll() is None, self.log.read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)

    def peer(self) -> "Peer":
        """A connection that lasts at most as long as the test's helper."""
        self._peers.append(Peer(self.socket))
        return self._peers[-1]

    def ask(self, action: str, **arguments: Any) -> dict[str, Any]:
        """One request on a connection of its own."""
        opened = Peer(self.socket)
        try:
            return opened.ask(action, **arguments)
        finally:
            opened.close()

    def end(self) -> None:
        for each in self._peers:
            each.close()
        if self.process is not None and self.process.poll() is None:
            self.stop()
        for file in (self.folder / "run").glob("mps-*.pid"):
            pid, ticks = map(int, file.read_text().split())
            ProcProcessTable().signal(pid, ticks, signal.SIGKILL)
        shutil.rmtree(self.folder)

    def audit(self) -> list[dict[str, Any]]:
        """Every line that tells of an action, oldest first."""
        return [line for line in self.lines() if line["event"] == "helper.action"]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def list_on_gpu(self, pid: int, gpu: str) -> int:
        """Have the driver list a process on a GPU; gives its start time."""
        ticks = ProcProcessTable().start_ticks(pid)
        assert ticks is not None
        self.node.processes.add(
            GpuProcess(pid=pid, start_ticks=ticks, uid=0, uuids=(gpu,), memory_mib=100)
        )
        return ticks


@contextmanager
def running(**settings: object) -> Generator[Helper]:
    helper = Helper(**settings)
    try:
        helper.start()
        yield helper
    finally:
        helper.end()


class Peer:
    """A connection of this process, which is root's, or of a child that is somebody else."""

    def __init__(self, path: Path) -> None:
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(DEADLINE_S)
        try:
            self.channel.connect(str(path))
        except OSError:
            self.channel.close()
            raise
        self._number = 0

    def send(self, data: bytes) -> dict[str, Any]:
        self.channel.sendall(data)
        return self.receive()

    def receive(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.channel.recv(2**20))
        return found

    def ask(self, action: str, **arguments: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "action": action, **arguments}
        answer = self.send(json.dumps(message).encode())
        assert answer.pop("id") == self._number
        return answer

    def close(self) -> None:
        self.channel.close()


def as_user(uid: int, work: Callable[[], object]) -> tuple[bool, str]:
    """Do something in a child that is another user; whether it went well, and what it gave."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(out)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.write(into, str(work()).encode())
            code = 0
        except BaseException as error:
            os.write(into, repr(error).encode())
        finally:
            os._exit(code)
    os.close(into)
    with os.fdopen(out, "rb") as told:
        text = told.read().decode()
    return os.waitpid(pid, 0)[1] == 0, text


@contextmanager
def sleeping(**environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.kill()
        process.wait()
