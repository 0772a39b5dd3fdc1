"""A pool of this one host, by its real programs: allocator, root helper, agent, clients.

The agent runs as a user without rights and the slices are another user's, where that can be
had; else both are root's (see ``users``). MPS daemons are in sessions of their own, and
everything lies in one short folder that is removed at the end.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.host_pool.machines import ROOT, Machine
from tests.host_pool.smi import SmiGpu, read_smi
from tests.host_pool.users import Users
from tests.integration.allocator_daemon import Daemon

from gpupool import Client
from gpupool.model.views import DeviceState, DeviceView
from gpupool_agent.devices.mps_daemons.foreign import mps_processes
from gpupool_agent.devices.processes import ProcProcessTable

DEADLINE_S = 60.0
LOOK_S = 0.01

Found = TypeVar("Found")


def until(look: Callable[[], Found], what: str, deadline_s: float = DEADLINE_S) -> Found:
    """The first answer that is true."""
    end_s = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < end_s, f"waited {deadline_s:g} s for: {what}"
        time.sleep(LOOK_S)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A lease of a holder, ready to be used."""

    lease_id: str
    ready_ms: float
    environment: dict[str, str]
    devices: list[str]
    sm_count: int


class Talk:
    """A process that answers a line with a line of JSON."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: dict[str, Any] = {}

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.said = json.loads(line)
        return self.said

    def say(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(request)}\n")
        self.process.stdin.flush()
        return self.hear()

    def leave(self) -> int:
        """Have it end in order, by the end of its input."""
        self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode

    def kill(self) -> None:
        """Whatever its state, it is gone afterwards, and so are the pipes to it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Holder(Talk):
    """Who holds leases, and can be killed."""

    def acquire(self, **shape: Any) -> Held:
        answer = self.say({"acquire": shape})
        assert "error" not in answer, answer
        return Held(**answer)

    def release(self, held: Held) -> float:
        """Milliseconds until all of it has been taken back."""
        answer = self.say({"release": held.lease_id})
        assert answer.get("state") == "released", answer
        return float(answer["ended_ms"])


@dataclass(slots=True)
class Running:
    """A program that is running, and where it logs."""

    process: subprocess.Popen[bytes]
    log: Path

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(slots=True)
class HostPool:
    """Started by ``host_pool``."""

    machine: Machine
    folder: Path
    users: Users
    allocator: Daemon
    agent_settings: dict[str, object]
    environment: dict[str, str] = field(default_factory=dict[str, str])
    running: dict[str, Running] = field(default_factory=dict[str, Running])
    talks: list[Talk] = field(default_factory=list[Talk])
    client: Client | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "agent" / "agent.sock"

    def start(self) -> None:
        """Start everything; all GPUs are offered afterwards."""
        own = self.folder / "agent"
        own.mkdir()
        os.chown(own, self.users.agent, self.users.agent)
        self.allocator.start()
        self.start_helper()
        self.start_agent()
        self.client = Client(f"127.0.0.1:{self.allocator.grpc}")
        until(self.all_offered, "all GPUs to be offered")

    def start_helper(self) -> None:
        settings = {
            "socket": self.folder / "run" / "helper.sock",
            "socket_group": self.users.agent,
            "agent_user": self.users.agent,
            "run_dir": self.folder / "run",
            "mps_dir": self.folder / "mps",
            "mps_supervisor": "session",
            "cdi_dir": self.folder / "cdi",
            "allow_root": str(self.users.slices == 0).lower(),
            **self.machine.helper_settings(),
        }
        self._start("helper", settings, uid=0, environment={})

    def start_agent(self) -> None:
        settings = {
            "node_id": self.folder.name,
            "allocators": f"127.0.0.1:{self.allocator.grpc}",
            "state_dir": self.folder / "agent" / "state",
            "socket": self.socket,
            "run_dir": self.folder / "agent" / "run",
            "helper_socket": self.folder / "run" / "helper.sock",
            "metrics_port": 0,
            **self.machine.agent_settings(),
            **self.agent_settings,
        }
        self._start(
            "agent",
            settings,
            uid=self.users.agent,
            environment=self.environment,
            capabilities=self.machine.agent_capabilities,
        )

    def ready(self, program: str) -> dict[str, Any]:
        """What a program wrote when it served."""
        found: dict[str, Any] = json.loads(self._ready_file(program).read_text())
        return found

    def holder(self, uid: int | None = None) -> Holder:
        """Somebody who can hold leases: the user whom slices are for, or another one."""
        command = [sys.executable, "-m", "tests.host_pool.holder", f"unix:{self.socket}"]
        made = Holder(self.users.command(command, self._uid(uid)), os.environ)
        self.talks.append(made)
        made.hear()
        return made

    def cuda_client(self, environment: Mapping[str, str], *flags: str) -> Talk:
        """A CUDA client under a lease, as its user; it has said what it sees."""
        made = self.cuda_client_started(environment, *flags)
        made.hear()
        return made

    def cuda_client_started(self, environment: Mapping[str, str], *flags: str) -> Talk:
        command = self.machine.command("cuda_client", *flags)
        command = self.users.command(command, self.users.slices)
        made = Talk(command, os.environ | dict(environment))
        self.talks.append(made)
        return made

    def devices(self) -> list[DeviceView]:
        assert self.client is not None
        return list(self.client.devices())

    def device(self, uuid: str) -> DeviceView:
        return next(each for each in self.devices() if each.device.uuid == uuid)

    def all_offered(self) -> bool:
        self.check_alive()
        found = self.devices()
        return bool(found) and all(each.state is DeviceState.FREE for each in found)

    def check_alive(self) -> None:
        for name, each in self.running.items():
            assert each.process.poll() is None, f"{name}: {each.log.read_text()[-4000:]}"

    def smi(self) -> list[SmiGpu]:
        """The GPUs as nvidia-smi shows them now."""
        return read_smi(self._output(self.machine.smi("-q", "-x")))

    def listing(self) -> dict[str, Any]:
        """The GPUs as our driver code reads them now, in a process of its own."""
        found: dict[str, Any] = json.loads(self._output(self.machine.command("listing")))
        return found

    def left(self) -> list[str]:
        """What of MPS, leases and containers is on the host, by looking."""
        own = [
            f"process {each.pid}"
            for each in mps_processes(Path("/proc"))
            if (each.environment or {})
            .get("CUDA_MPS_PIPE_DIRECTORY", "")
            .startswith(str(self.folder))
        ]
        patterns = ("mps/*", "run/mps-*", "agent/run/mps/*", "cdi/*")
        return own + [str(path) for pattern in patterns for path in self.folder.glob(pattern)]

    def end(self) -> None:
        """End everything that was started, and remove it."""
        for each in self.talks:
            each.kill()
        if self.client is not None:
            with contextlib.suppress(AssertionError):
                until(self.all_offered, "the leases to end", 10)
            self.client.close()
        for name in ("agent", "helper"):
            if name in self.running:
                self.running[name].end()
        self._end_daemons()
        self.allocator.end()

    def _start(
        self,
        program: str,
        settings: Mapping[str, object],
        *,
        uid: int,
        environment: Mapping[str, str],
        capabilities: tuple[str, ...] = (),
    ) -> None:
        flags = [
            word
            for key, value in settings.items()
            for word in (f"--{key.replace('_', '-')}", str(value))
        ]
        ready, log = self._ready_file(program), self.folder / f"{program}.log"
        ready.unlink(missing_ok=True)
        ready.parent.mkdir(exist_ok=True)
        os.chown(ready.parent, uid, uid)
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.users.command(
                    self.machine.command(program, *flags, "--ready-file", str(ready)),
                    uid,
                    capabilities,
                ),
                cwd=ROOT,
                env=os.environ | dict(environment),
                stderr=output,
            )
        self.running[program] = Running(process, log)
        until(lambda: ready.exists() or process.poll() is not None, f"the {program}")
        self.check_alive()

    def _uid(self, uid: int | None) -> int:
        return self.users.slices if uid is None else uid

    def _ready_file(self, program: str) -> Path:
        return self.folder / f"ready-{program}" / "json"

    def _output(self, command: list[str]) -> str:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=DEADLINE_S
        ).stdout

    def _end_daemons(self) -> None:
        """What a test that failed has left of MPS."""
        for file in (self.folder / "run").glob("mps-*.pid"):
            pid, ticks = map(int, file.read_text().split())
            if ProcProcessTable().start_ticks(pid) == ticks:
                # Each leads a session and a process group of its own.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)


@contextmanager
def host_folder() -> Generator[Path]:
    """A short folder that every user may look into: sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="gp"))
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def host_pool(
    machine: Machine,
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    check_invariants: bool = True,
    **agent_settings: object,
) -> Generator[HostPool]:
    """The pool while the block lasts.

    ``environment`` is added to the agent's; without ``check_invariants`` the allocator is
    as fast as an operator's.
    """
    pool = HostPool(
        machine=machine,
        folder=folder,
        users=Users.found(folder),
        allocator=Daemon(folder, check_invariants=str(check_invariants).lower()),
        agent_settings=agent_settings,
        environment=dict(environment or {}),
    )
    try:
        pool.start()
        yield pool
    finally:
        pool.end()
