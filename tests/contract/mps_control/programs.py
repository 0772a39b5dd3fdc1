"""The programs that the suite is run against: the stand-in, and the real one where it is."""

import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpupool_agent.simulated.mps_control.host import BECOME_UID

DEADLINE_S = 20.0
PACKAGE = "nvidia-cuda-mps"
PROGRAM = "nvidia-cuda-mps-control"


class UnavailableError(Exception):
    """The real program cannot be had here; the text says why."""


def fetch_real(folder: Path) -> Path:
    """Fetch Debian's package through the machine's own sources, and unpack it.

    Nothing is installed. Raises UnavailableError.
    """
    lists = [*Path("/etc/apt").glob("sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    deb822 = [path for path in lists if path.suffix == ".sources"]
    plain = [path for path in lists if path.suffix == ".list"]
    parts = folder / "sources.d"
    parts.mkdir(parents=True)
    for path in deb822:
        text = re.sub(r"(?m)^Components:.*$", "Components: non-free", path.read_text())
        (parts / path.name).write_text(text)
    for path in plain:
        lines = re.findall(r"(?m)^(deb\s+(?:\[[^]]*\]\s+)?\S+\s+\S+)\s", path.read_text())
        (parts / path.name).write_text("".join(f"{line} non-free\n" for line in lines))
    options = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": str(parts),
        "Dir::State::lists": str(folder / "lists"),
        "Dir::Cache": str(folder / "cache"),
        "APT::Sandbox::User": "root",
    }
    for name in ("lists", "cache"):
        (folder / name).mkdir()
    flags = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    for step in (
        ["apt-get", *flags, "-qq", "update"],
        ["apt-get", *flags, "-qq", "download", PACKAGE],
    ):
        _step(step, folder)
    packages = list(folder.glob(f"{PACKAGE}_*.deb"))
    if not packages:
        raise UnavailableError(f"apt-get downloaded no {PACKAGE}")
    _step(["dpkg", "-x", str(packages[0]), str(folder / "root")], folder)
    return folder / "root" / "usr" / "bin" / PROGRAM


def _step(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise UnavailableError(f"{' '.join(command[:1])}: {done.stderr.strip()[-300:]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a program printed, on both outputs together, and its exit code."""

    code: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A control program with directories of its own; ``simulated``: it is the stand-in."""

    program: Path
    directory: Path
    simulated: bool

    @property
    def pipe(self) -> Path:
        """Pipe directory."""
        return self.directory / "p"

    @property
    def logs(self) -> Path:
        """Log directory."""
        return self.directory / "l"

    def run(self, *flags: str, lines: str = "", uid: int | None = None) -> Result:
        """Run it to its end."""
        environment = {
            "PATH": os.environ["PATH"],
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
            # A GPU of nobody: agents in other tests look for daemons that have theirs.
            "CUDA_VISIBLE_DEVICES": "GPU-00000000-0000-0000-0000-000000000000",
        }
        if self.simulated and uid is not None:
            environment[BECOME_UID] = str(uid)
            uid = None
        done = subprocess.run(
            [self.program, *flags],
            input=lines,
            check=False,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
        )
        return Result(code=done.returncode, text=done.stdout)

    def ask(self, *commands: str) -> list[str]:
        """Give commands, one a line; the lines of the answer."""
        result = self.run(lines="".join(f"{each}\n" for each in commands))
        assert result.code == 0, result
        return result.text.splitlines()

    def log(self) -> str:
        """control.log."""
        return (self.logs / "control.log").read_text()

    def logged(self, text: str) -> None:
        """Wait until control.log has a text."""
        until(lambda: text in self.log(), f"{text!r} in control.log")


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"did not come true: {what}"
        time.sleep(0.01)
