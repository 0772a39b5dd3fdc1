"""A machine whose init is a real systemd, over a copy-on-write view of this one.

systemd-nspawn boots it in less than a second; nothing of this machine is changed. Commands
run in its namespaces. It has its own network, but the installation has this machine's, since
packages come from there.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 40.0
CGROUP_S = 5.0
CGROUPS = (Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
LEFT = ("payload", "supervisor")


class CannotBootError(Exception):
    """A systemd cannot be booted here; the text says why."""


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {deadline_s} s for: {what}"
        time.sleep(0.05)
    return found


class Machine:
    """Booted when made; ``close`` switches it off and removes it."""

    def __init__(self) -> None:
        if os.geteuid() != 0:
            raise CannotBootError("only root can boot a systemd")
        if shutil.which("systemd-nspawn") is None:
            raise CannotBootError("systemd-nspawn is not installed (package systemd-container)")
        self._before = {path: path.exists() for path in self._left_over()}
        self._folder = Path(tempfile.mkdtemp(prefix="gpupool-machine-"))
        self.root = self._folder / "root"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0
        try:
            self._mount()
            self._boot()
        except BaseException:
            self.close()
            raise

    def run(
        self,
        *command: str,
        network: bool = False,
        check: bool = True,
        deadline_s: float = DEADLINE_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in it; ``network``: on this machine's network."""
        namespaces = ["-m", "-u", "-i", "-p"] if network else ["-a"]
        done = subprocess.run(
            ["nsenter", "-t", str(self._leader), *namespaces, *command],
            capture_output=True,
            text=True,
            timeout=deadline_s,
            stdin=subprocess.DEVNULL,
            env={**_pip_environment(), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"},
            check=False,
        )
        if check:
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def say(self, *command: str) -> str:
        """What a command prints."""
        return self.run(*command).stdout.strip()

    def state(self, unit: str, name: str = "ActiveState") -> str:
        """A property of a unit."""
        return self.say("systemctl", "show", f"--property={name}", "--value", unit)

    def journal(self, unit: str) -> str:
        """What a unit has logged."""
        return self.say("journalctl", "--no-pager", "--output=cat", "-u", unit)

    def close(self) -> None:
        """Switch it off, and leave nothing of it."""
        if self._nspawn is not None:
            if self._nspawn.poll() is None:
                self._leader = self._find_leader()
            if self._leader:
                # What systemd takes for the power button.
                self._signal(signal.SIGRTMIN + 4)
            try:
                self._nspawn.wait(10)
            except subprocess.TimeoutExpired:
                # Its init goes on without it; the kernel ends what is in there with it.
                if self._leader:
                    self._signal(signal.SIGKILL)
                self._nspawn.kill()
                self._nspawn.wait(10)
        for where in (self.root, self._folder):
            subprocess.run(["umount", "-l", where], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)
        for path, was_there in self._before.items():
            if not was_there and path.exists():
                _remove_cgroup(path)

    def _mount(self) -> None:
        _must("mount", "-t", "tmpfs", "tmpfs", str(self._folder))
        for name in ("up", "work", "root"):
            (self._folder / name).mkdir()
        layers = f"lowerdir=/,upperdir={self._folder}/up,workdir={self._folder}/work"
        _must("mount", "-t", "overlay", "overlay", "-o", layers, str(self.root))

    def _boot(self) -> None:
        self._nspawn = subprocess.Popen(
            [
                "systemd-nspawn",
                "-q",
                "-D",
                str(self.root),
                "--register=no",
                "--keep-unit",
                "--private-network",
                "-b",
                "systemd.unit=basic.target",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(self._is_up, "the machine to be up")

    def _find_leader(self) -> int:
        assert self._nspawn is not None
        if self._nspawn.poll() is not None:
            raise CannotBootError(f"systemd-nspawn ended with {self._nspawn.returncode}")
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text()
        return int(children.split()[0]) if children.split() else 0

    def _is_up(self) -> bool:
        # Its first child is not yet its last: that one is gone once init is there.
        self._leader = self._find_leader()
        if not self._leader:
            return False
        done = self.run("systemctl", "is-system-running", check=False)
        return done.stdout.strip() in ("running", "degraded")

    def _signal(self, number: int) -> None:
        try:
            os.kill(self._leader, number)
        except ProcessLookupError:
            return

    def _left_over(self) -> list[Path]:
        return [group / name for group in CGROUPS for name in LEFT]


def _remove_cgroup(path: Path) -> None:
    """Remove a tree of cgroups, once its processes are gone; one in use for long stays."""
    end = time.monotonic() + CGROUP_S
    while path.exists() and time.monotonic() < end:
        _try_to_remove(path)
        time.sleep(0.05)


def _try_to_remove(path: Path) -> None:
    folders = sorted((each for each in path.rglob("*") if each.is_dir()), reverse=True)
    for each in (*folders, path):
        with contextlib.suppress(OSError):
            each.rmdir()


def _must(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotBootError(f"{command[0]}: {done.stderr.strip()}")


def _pip_environment() -> dict[str, str]:
    """What tells pip, and its connections, where packages are."""
    kept = ("PIP_", "SSL_", "REQUESTS_", "HTTP", "http", "NO_PROXY", "no_proxy")
    return {name: value for name, value in os.environ.items() if name.startswith(kept)}
