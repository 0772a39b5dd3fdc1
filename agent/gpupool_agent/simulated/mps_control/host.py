"""Where a daemon runs: its directories, its simulated node, and the faults put into it."""

import os

PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
LOG_DIRECTORY = "CUDA_MPS_LOG_DIRECTORY"
NODE_DIRECTORY = "GPUPOOL_SIMULATED_NODE"
BECOME_UID = "GPUPOOL_SIMULATED_UID"
"""Root's shell or probe goes on as this user, once it is loaded: an interpreter in a
closed directory cannot be started as another one."""

FAULTS_FILE = "mps-faults"
COMMAND_NAME = "nvidia-cuda-mps"
"""What the kernel shows of control daemon and server alike: 15 characters of either."""

SERVER_MEMORY_MIB = 28
"""What a server holds of each of its GPUs."""


def pipe_directory() -> str:
    """Directory of the sockets."""
    return os.environ.get(PIPE_DIRECTORY) or "/tmp/nvidia-mps"  # noqa: S108 the real one's


def log_directory() -> str:
    """Directory of the logs."""
    return os.environ.get(LOG_DIRECTORY) or "/var/log/nvidia-mps"


def faults() -> dict[str, str]:
    """Faults injected into the daemons of this node, by name; read anew each time.

    One a line, "name value": ``refuse_quit 1``, ``hang COMMAND``, ``crash_server 1``,
    ``fault_server 1``, ``slow_start_s 3``, ``no_server 1``.
    """
    node = os.environ.get(NODE_DIRECTORY)
    if not node:
        return {}
    try:
        with open(f"{node}/{FAULTS_FILE}") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}
    return {line.partition(" ")[0]: line.partition(" ")[2] for line in lines if line}


def visible_uuids() -> tuple[str, ...]:
    """GPUs of the node that this daemon manages, in its order; none without a node."""
    import json

    node = os.environ.get(NODE_DIRECTORY)
    if not node:
        return ()
    try:
        with open(f"{node}/gpus.json") as file:
            rows = json.load(file)
    except OSError:
        return ()
    every = tuple(str(row["uuid"]) for row in rows)
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return every
    wanted = [name.strip() for name in names.split(",")]
    by_name = {str(index): uuid for index, uuid in enumerate(every)} | {u: u for u in every}
    return tuple(by_name[name] for name in wanted if name in by_name)


def list_on_gpus(uuids: tuple[str, ...]) -> None:
    """Have the driver list this process, a server, on its GPUs."""
    import json

    pid = os.getpid()
    with open(f"/proc/{pid}/stat") as file:
        stat = file.read()
    row = {
        "pid": pid,
        "start_ticks": int(stat[stat.rindex(")") + 2 :].split()[19]),
        "uid": os.getuid(),
        "uuids": uuids,
        "memory_mib": SERVER_MEMORY_MIB,
        "pipe": "",
    }
    path = f"{os.environ[NODE_DIRECTORY]}/gpu-processes/{pid}"
    with open(f"{path}.new", "w") as file:
        json.dump(row, file)
    os.replace(f"{path}.new", path)


def unlist() -> None:
    """Take this process off its GPUs."""
    try:
        os.unlink(f"{os.environ[NODE_DIRECTORY]}/gpu-processes/{os.getpid()}")
    except OSError:
        return


def become_user(uid: int) -> None:
    """Go on as a user for good, if this is root's process."""
    if os.getuid() == 0 and uid != 0:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


def name_process() -> None:
    """Be called what the real programs are called."""
    with open("/proc/self/comm", "w") as file:
        file.write(COMMAND_NAME)


class LogFile:
    """control.log or server.log, with the real one's line heads."""

    def __init__(self, path: str, who: str, *, echo: bool = False) -> None:
        self._who = who
        self._echo = echo
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, text: str) -> None:
        """Write each line of the text."""
        import time

        now = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        head = f"[{stamp}.{int(now * 1000) % 1000:03d} {self._who} {os.getpid():5d}] "
        for line in text.splitlines():
            data = f"{head}{line}\n".encode()
            os.write(self._descriptor, data)
            if self._echo:
                os.write(1, data)
