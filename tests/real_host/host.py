"""A host as it is installed: the agent's program without rights, the helper's as root.

Its GPUs are described, its MPS daemons are processes of the control program's stand-in,
and its clients run as their own user. What is left of MPS is looked for by listing.
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
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.pool_fixture import Pool, running_pool
from tests.real_host.programs import CRASH, shared_node

from gpupool.model.request import LeaseSpec
from gpupool.v1 import resources_pb2
from gpupool_agent.devices.mps_daemons.foreign import MpsProcess, mps_processes
from gpupool_agent.simulated.mps_control.launcher import write_launcher, write_probe
from gpupool_agent.simulated.sysfs import sysfs_root, write_sysfs

ROOT = Path(__file__).resolve().parents[2]
USER_UID = 65534
"""Whose slices and clients they are."""

AGENT_UID = 40961
UNPRIVILEGED = (
    "setpriv",
    f"--reuid={AGENT_UID}",
    f"--regid={AGENT_UID}",
    "--clear-groups",
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
    "--bounding-set=-all,+dac_read_search",
)
"""How the agent is started: as nobody known, with one right, to read files. Where checkout
and interpreter are open to all it would need none."""

SYSTEM_PYTHON = "/usr/bin/python3"

DEADLINE_S = 60.0
PIPE = "CUDA_MPS_PIPE_DIRECTORY"


def mine(spec: LeaseSpec) -> LeaseSpec:
    """The request, for the user."""
    return replace(spec, uid=USER_UID)


def place(lease: resources_pb2.Lease) -> resources_pb2.DeviceShare:
    """Where the only member of a lease is."""
    (share,) = lease.members[0].place.devices
    return share


def until(condition: Callable[[], Any], what: str, within_s: float = DEADLINE_S) -> Any:
    end = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {within_s:g} s in vain for: {what}"
        time.sleep(0.02)
    return found


class RealHost:
    """Made in a short folder of its own, whose name is the node's and is in its GPUs' UUIDs.

    ``python`` runs what runs as the user; ``settings`` are the agent's.
    """

    def __init__(
        self, address: str, python: str, *, machine: str = "dgx-h100", **settings: object
    ) -> None:
        self._python = python
        self.folder = Path(tempfile.mkdtemp(prefix="gr"))
        self.folder.chmod(0o755)
        self.name = self.folder.name
        self.directory = self.folder / "node"
        self.directory.mkdir()
        (self.directory / "machine").write_text(machine)
        (self.directory / "driver-inits").touch()
        (self.directory / "driver-inits").chmod(0o666)
        self.reboot_id()
        self.node = shared_node(self.directory)
        write_sysfs(self.node, self.folder / "pci")
        programs = self.folder / "bin"
        control = write_launcher(programs, node=self.directory, python=python)
        probe = write_probe(programs, node=self.directory, python=python)
        for name in ("state", "agent"):
            self.make_for_agent(name)
        self.agent_settings = {
            "node_id": self.name,
            "allocators": address,
            "state_dir": self.folder / "state",
            "run_dir": self.folder / "agent",
            "socket": self.folder / "agent" / "agent.sock",
            "helper_socket": self.folder / "run" / "helper.sock",
            "sysfs_root": sysfs_root(self.node),
            "metrics_port": -1,
            "usage_period_s": 0.3,
            "inventory_period_s": 1,
            "telemetry_period_s": 0.5,
            "driver_deadline_s": 1,
            **settings,
        }
        self.helper_settings = {
            "socket": self.folder / "run" / "helper.sock",
            "socket_group": AGENT_UID,
            "agent_user": AGENT_UID,
            "run_dir": self.folder / "run",
            "mps_dir": self.folder / "mps",
            "mps_supervisor": "session",
            "mps_control": control,
            "probe_program": probe,
            "cdi_dir": self.folder / "cdi",
            "pci_rescan_file": self.folder / "rescan",
            "stop_deadline_s": 2,
        }
        self.agent: subprocess.Popen[bytes] | None = None
        self.helper: subprocess.Popen[bytes] | None = None
        self._clients: list[subprocess.Popen[str]] = []

    # -- its programs --------------------------------------------------------

    def start(self) -> "RealHost":
        """Both, the helper first; returns when the agent runs."""
        self.start_helper()
        self.start_agent()
        return self

    def start_helper(self) -> None:
        self.helper = self._launch("helper", self.helper_settings)

    def start_agent(self) -> None:
        self.agent = self._launch("agent", self.agent_settings)

    def kill_agent(self) -> None:
        """As a crash does."""
        self._end(self.agent, signal.SIGKILL)

    def stop_agent(self) -> None:
        """As systemd does."""
        assert self._end(self.agent, signal.SIGTERM) == 0, self.log()

    def kill_helper(self) -> None:
        self._end(self.helper, signal.SIGKILL)

    def crash_at(self, point: str, *, before: bool, whom: str) -> None:
        """Have a program be killed at the helper's next action of this kind."""
        assert self.agent is not None
        pid = self.agent.pid if whom == "agent" else 0
        text = json.dumps({"point": point, "before": before, "pid": pid})
        beside = self.directory / f"{CRASH}.new"
        beside.write_text(text)
        beside.replace(self.directory / CRASH)

    def until_crashed(self, whom: str) -> None:
        """Wait until the crash that was asked for has happened."""
        process = self.agent if whom == "agent" else self.helper
        assert process is not None
        assert process.wait(DEADLINE_S) == -signal.SIGKILL

    def log(self, program: str = "agent") -> str:
        return (self.folder / f"{program}.log").read_text()

    def actions(self, *names: str) -> list[dict[str, Any]]:
        """What the helper has done or refused, oldest first, of these kinds."""
        lines = [json.loads(line) for line in self.log("helper").splitlines() if line[:1] == "{"]
        return [
            line
            for line in lines
            if line["event"] == "helper.action" and line["action"] in (names or [line["action"]])
        ]

    def close(self) -> None:
        """End every process of it, and remove it."""
        for client in self._clients:
            if client.poll() is None:
                client.kill()
            client.communicate()
        for program in (self.agent, self.helper):
            self._end(program, signal.SIGKILL)
        for process in self.mps_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        shutil.rmtree(self.folder)

    # -- what a pool's checks ask --------------------------------------------

    @property
    def node_ids(self) -> list[str]:
        return [self.name]

    @property
    def ready(self) -> dict[str, Any]:
        return {"nodes": {self.name: {"gpus": self.gpus}}}

    def running(self) -> dict[str, list[dict[str, Any]]]:
        """What the agent runs, by its checkpoint."""
        file = self.folder / "state" / "checkpoint.json"
        rows = json.loads(file.read_text())["assignments"] if file.exists() else []
        return {self.name: rows}

    def kill(self) -> None:
        """Pools end their hosts so; this one's maker closes it."""
        self.kill_agent()

    # -- its hardware and what is on it --------------------------------------

    @property
    def gpus(self) -> list[str]:
        return [gpu.uuid for gpu in self.node.gpus]

    def reboot_id(self) -> None:
        (self.directory / "boot-id").write_text(str(uuid.uuid4()))

    def make_for_agent(self, name: str) -> None:
        """A folder that the agent may write to, if it is not there."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        os.chown(folder, AGENT_UID, AGENT_UID)

    def client(
        self, environment: Mapping[str, str], *flags: str, uid: int = USER_UID
    ) -> subprocess.Popen[str]:
        """Start a CUDA client under a lease, as its user."""
        started = subprocess.Popen(
            [self._python, "-m", "gpupool_agent.simulated.cuda_client", *flags],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(ROOT / "agent"),
                "GPUPOOL_SIMULATED_NODE": str(self.directory),
                **environment,
            },
            cwd="/",
            user=uid,
            group=uid,
            extra_groups=(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._clients.append(started)
        return started

    def hold(
        self, environment: Mapping[str, str], *flags: str, uid: int = USER_UID
    ) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """Start one, and wait until it holds its memory."""
        started = self.client(environment, *flags, uid=uid)
        assert started.stdout is not None
        line = started.stdout.readline()
        assert line, started.communicate()[1]
        return started, json.loads(line)

    def mps_processes(self) -> list[MpsProcess]:
        """Daemons and servers of this host."""
        root = str(self.folder)
        return [
            each
            for each in mps_processes(Path("/proc"))
            if (each.environment or {}).get(PIPE, "").startswith(root)
        ]

    def mps_pids(self) -> list[int]:
        return sorted(each.pid for each in self.mps_processes())

    def compute_modes(self) -> list[int]:
        self.node.answer()
        return [gpu.compute_mode for gpu in self.node.gpus]

    def left(self) -> list[str]:
        """What of leases is on the host: processes, directories, records, modes, specs."""
        places = ("mps/*", "agent/mps/*", "run/*mps-*", "cdi/*", "cdi/.*")
        return [
            *(f"process {each.pid}" for each in self.mps_processes()),
            *(str(path) for pattern in places for path in self.folder.glob(pattern)),
            *(f"mode {mode}" for mode in self.compute_modes() if mode),
        ]

    # -- inside --------------------------------------------------------------

    def _launch(self, program: str, settings: Mapping[str, object]) -> subprocess.Popen[bytes]:
        ready = self.folder / ("agent" if program == "agent" else "") / f"{program}.ready"
        ready.unlink(missing_ok=True)
        flags = [
            word
            for key, value in {**settings, "ready_file": ready}.items()
            for word in (f"--{key.replace('_', '-')}", str(value))
        ]
        with (self.folder / f"{program}.log").open("ab") as log:
            started = subprocess.Popen(
                [
                    *(UNPRIVILEGED if program == "agent" else ()),
                    *(sys.executable, "-m", "tests.real_host.programs", program),
                    *(str(self.directory), *flags),
                ],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        until(lambda: ready.exists() or started.poll() is not None, f"the {program}")
        assert started.poll() is None, self.log(program)
        return started

    def _end(self, process: subprocess.Popen[bytes] | None, number: int) -> int | None:
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(number)
        return process.wait(DEADLINE_S)


def starts_for_the_user(python: str) -> bool:
    """Whether the user can run what stands for CUDA with it: a checkout may be closed to it."""
    try:
        done = subprocess.run(
            [python, "-c", "import gpupool_agent.simulated.cuda_client"],
            env={"PYTHONPATH": str(ROOT / "agent")},
            cwd="/",
            user=USER_UID,
            group=USER_UID,
            extra_groups=(),
            capture_output=True,
            check=False,
        )
    except OSError:
        return False
    return done.returncode == 0


@contextmanager
def real_host(
    address: str, *, before: Callable[[RealHost], None] = lambda _: None, **settings: Any
) -> Generator[RealHost]:
    """A host whose programs run; skips where they cannot be run as they are on a host.

    ``before`` they run something may happen to it; ``settings`` are the agent's.
    """
    if os.getuid() != 0:
        pytest.skip("only root can be the helper")
    python = next(filter(starts_for_the_user, (sys.executable, SYSTEM_PYTHON)), None)
    if python is None:
        pytest.skip(f"other users cannot start {sys.executable} or {SYSTEM_PYTHON}")
    host = RealHost(address, python, **settings)
    try:
        before(host)
        yield host.start()
    finally:
        host.close()


@contextmanager
def hosted_pool(
    folder: Path,
    *,
    before: Callable[[RealHost], None] = lambda _: None,
    offered: bool = True,
    **settings: Any,
) -> Generator[tuple[Pool, RealHost]]:
    """A pool of one such host; checked and drained at the end, and then nothing is left.

    ``before`` as in ``real_host``; ``offered``: its GPUs are at the beginning; ``settings``
    are the allocator's.
    """
    with running_pool(folder, **settings) as pool, real_host(pool.address, before=before) as host:
        pool.fleets.append(host)  # type: ignore[arg-type] # as far as a pool asks, it is one
        if offered:
            pool.until_offered(host)  # type: ignore[arg-type]
        yield pool, host
        pool.check()
        pool.drain()
        until(lambda: host.left() == [], "nothing to be left")
        pool.fleets.remove(host)  # type: ignore[arg-type]
