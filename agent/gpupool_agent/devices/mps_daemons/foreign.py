"""Daemons of others on GPUs of the pool: found by the name that the kernel shows.

A daemon manages the GPUs that its CUDA_VISIBLE_DEVICES names, all of them without one.
Where its environment may not be read, it may manage any.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpupool.model.ids import DeviceUuid
from gpupool_agent.devices.sysfs import names_in, read_file

COMM = "nvidia-cuda-mps"
"""Both programs' names, cut to the 15 characters that the kernel keeps."""

SERVER = b"nvidia-cuda-mps-server"
ANCESTORS_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsProcess:
    """A control daemon or server. ``environment`` None: it may not be read."""

    pid: int
    parent: int
    uid: int
    environment: dict[str, str] | None

    def manages(self, gpu: DeviceUuid, index: int) -> bool:
        """Whether it may hand out the GPU with this place in the driver's order."""
        if self.environment is None:
            return True
        names = self.environment.get("CUDA_VISIBLE_DEVICES")
        if names is None:
            return True
        return any(name.strip() in {gpu, str(index)} for name in names.split(","))


class MpsScan:
    """Looks for MPS processes again and again, as ``proc`` shows them.

    A host has thousands of processes. Which of them are none is remembered, so that
    most looks are at new ones only; one that has turned into a daemon later, by exec,
    is found by a look at the whole.
    """

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._others: frozenset[str] = frozenset()

    def look(self, *, whole: bool) -> list[MpsProcess]:
        """Every MPS process, by pid. ``whole``: also at what was none before."""
        skipped = frozenset[str]() if whole else self._others
        found: list[MpsProcess] = []
        others: set[str] = set()
        for name in names_in(str(self._proc)):
            process = None if name in skipped else _mps_process(self._proc, name)
            if process is None:
                others.add(name)
            else:
                found.append(process)
        self._others = frozenset(others)
        return sorted(found, key=lambda each: each.pid)


def mps_processes(proc: Path) -> list[MpsProcess]:
    """Every MPS process of the host."""
    return MpsScan(proc).look(whole=True)


def _mps_process(proc: Path, name: str) -> MpsProcess | None:
    """A process of this name in ``proc``; None: there is none, or it is something else."""
    if not name.isdecimal():
        return None
    directory = proc / name
    try:
        if read_file(f"{proc}/{name}/comm") != COMM:
            return None
        begun = _serves(_command(directory))
        environment = _environment(directory)
        state, parent, *_ = _stat(proc, int(name))
        uid = directory.stat().st_uid
        goes_on = _serves(_command(directory))
    except OSError:
        return None
    # In the middle of an exec, and at its end, a process has neither command nor
    # environment, and an empty environment would say that it manages everything.
    if not (begun and goes_on) or state in {"Z", "X"}:
        return None
    return MpsProcess(pid=int(name), parent=int(parent), uid=uid, environment=environment)


def foreign_on(
    gpus: Sequence[DeviceUuid],
    processes: list[MpsProcess],
    *,
    own_pids: Collection[int],
    own_pipes: Collection[str],
) -> dict[DeviceUuid, str]:
    """GPUs that somebody else's daemon may manage, with the reason to refuse them.

    ``gpus`` in the driver's order. Ours are known by their pid, their daemon's, or
    their pipe directory.
    """
    by_pid = {process.pid: process for process in processes}
    reasons: dict[DeviceUuid, str] = {}
    for process in processes:
        if _is_own(process, by_pid, own_pids, own_pipes):
            continue
        why = "" if process.environment is not None else ", whose GPUs cannot be read,"
        for index, gpu in enumerate(gpus):
            if process.manages(gpu, index):
                reasons.setdefault(
                    gpu,
                    f"a foreign MPS daemon, process {process.pid} of uid {process.uid}{why}"
                    " manages it",
                )
    return reasons


def _serves(command: list[bytes]) -> bool:
    """Tell daemons and servers from the daemon's shell, which has the same name."""
    return command[0].endswith(SERVER) or bool({b"-d", b"-f"} & set(command))


def _is_own(
    process: MpsProcess,
    by_pid: dict[int, MpsProcess],
    own_pids: Collection[int],
    own_pipes: Collection[str],
) -> bool:
    for _ in range(ANCESTORS_MAX):
        if process.pid in own_pids or process.parent in own_pids:
            return True
        environment = process.environment or {}
        if environment.get("CUDA_MPS_PIPE_DIRECTORY") in own_pipes:
            return True
        parent = by_pid.get(process.parent)
        if parent is None:
            return False
        process = parent
    return False


def _command(directory: Path) -> list[bytes]:
    return (directory / "cmdline").read_bytes().split(b"\0")


def _environment(directory: Path) -> dict[str, str] | None:
    try:
        data = (directory / "environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.decode(errors="replace").partition("=") for entry in data.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def runs(proc: Path, pid: int, start_ticks: int) -> bool:
    """Whether exactly this process runs: a dead one that nobody has reaped does not."""
    try:
        stat = _stat(proc, pid)
    except OSError:
        return False
    return stat[0] not in {"Z", "X"} and int(stat[19]) == start_ticks


def _stat(proc: Path, pid: int) -> list[str]:
    """Fields of a process from its state on. The name before may hold blanks and brackets."""
    return read_file(f"{proc}/{pid}/stat").rpartition(")")[2].split()
