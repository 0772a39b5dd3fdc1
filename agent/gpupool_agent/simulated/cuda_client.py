"""A stand-in for a CUDA program: it obeys its environment and holds GPU memory.

    python -m gpupool_agent.simulated.cuda_client --memory-mib 100

It finds its node through GPUPOOL_SIMULATED_NODE (the node's directory), or through
GPUPOOL_SIMULATED_NODES (the directory of all nodes) and the lease's GPUPOOL_NODE_ID.
As CUDA does:

* CUDA_VISIBLE_DEVICES names its GPUs; unset means all of them.
* No MPS pipe directory, or one that is not there: it runs without MPS, unconfined.
* Through MPS it waits while clients of another user are served by the same daemon,
  and its memory is limited by CUDA_MPS_PINNED_DEVICE_MEM_LIMIT. Where the directory has
  the ``control`` socket of the daemon's stand-in, that one and its server decide; an
  error that the server tells ends it.
* On a GPU in exclusive-process mode it gets no context beside another process, unless
  both came through MPS.
* It is listed by NVML for as long as it lives, and kill -9 ends that as well.

It prints one line of JSON when it holds its memory. Exit codes: 0 done, 3 out of
memory, 4 no such device, 5 no simulated node found, 6 MPS refused it or told it an
error, 7 the device is busy.
"""

import argparse
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpupool_agent.simulated.gpu_processes import GpuProcess, GpuProcesses, start_ticks_of
from gpupool_agent.simulated.mps_control.client import MpsClient, MpsRefusedError, join

EXIT_OUT_OF_MEMORY = 3
EXIT_NO_DEVICE = 4
EXIT_NO_NODE = 5
EXIT_MPS = 6
EXIT_BUSY = 7
_QUEUE_POLL_S = 0.05
_EXCLUSIVE_PROCESS = 3
_LIMIT = re.compile(r"(?P<device>[^=,]+)=(?P<amount>\d+)(?P<unit>[MG])B?", re.IGNORECASE)


class CudaError(Exception):
    """What CUDA would refuse; ``code`` is the exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpu:
    """A GPU that the client may use. ``usable_mib`` None: the host's memory."""

    uuid: str
    usable_mib: int | None
    sm_count: int = 0
    compute_mode: int = 0


def node_directory(environment: dict[str, str]) -> Path:
    """Directory of the node that this process runs on. Raises CudaError."""
    single = environment.get("GPUPOOL_SIMULATED_NODE")
    every, node_id = (
        environment.get("GPUPOOL_SIMULATED_NODES"),
        environment.get("GPUPOOL_NODE_ID"),
    )
    directory = Path(single) if single else Path(every) / node_id if every and node_id else None
    if directory is None or not (directory / "gpus.json").exists():
        raise CudaError(
            EXIT_NO_NODE,
            f"no simulated node at {directory}: set GPUPOOL_SIMULATED_NODE to its directory, or"
            " GPUPOOL_SIMULATED_NODES and GPUPOOL_NODE_ID",
        )
    return directory


def visible_gpus(directory: Path, environment: dict[str, str]) -> list[VisibleGpu]:
    """GPUs that CUDA would number from 0. Raises CudaError when one is not there."""
    gpus = [VisibleGpu(**row) for row in json.loads((directory / "gpus.json").read_text())]
    names = environment.get("CUDA_VISIBLE_DEVICES")
    chosen = gpus if names is None else []
    for name in filter(None, (part.strip() for part in (names or "").split(","))):
        match = [gpu for index, gpu in enumerate(gpus) if name in {gpu.uuid, str(index)}]
        if not match:
            raise CudaError(EXIT_NO_DEVICE, f"no CUDA-capable device {name}")
        chosen += match
    if not chosen:
        raise CudaError(EXIT_NO_DEVICE, "no CUDA-capable device is visible")
    return chosen


def memory_limits_mib(text: str) -> dict[str, int]:
    """Read CUDA_MPS_PINNED_DEVICE_MEM_LIMIT: MiB by device, ordinal or UUID."""
    return {
        match["device"].strip(): int(match["amount"])
        * (1024 if match["unit"].upper() == "G" else 1)
        for match in _LIMIT.finditer(text)
    }


def pipe_directory(environment: dict[str, str]) -> str:
    """MPS pipe directory, empty when there is none: the client is then unconfined."""
    pipe = environment.get("CUDA_MPS_PIPE_DIRECTORY", "")
    return pipe if pipe and Path(pipe).is_dir() else ""


def join_mps(gpus: list[VisibleGpu], environment: dict[str, str]) -> MpsClient | None:
    """Go through the MPS daemon, if there is one. Raises CudaError when it refuses."""
    pipe = pipe_directory(environment)
    if not pipe or not (Path(pipe) / "control").exists():
        return None
    try:
        return join(pipe, tuple(gpu.uuid for gpu in gpus), environment)
    except MpsRefusedError as error:
        raise CudaError(EXIT_MPS, str(error)) from error


def take_memory(
    processes: GpuProcesses,
    gpus: list[VisibleGpu],
    memory_mib: int,
    environment: dict[str, str],
    client: MpsClient | None = None,
) -> GpuProcess:
    """Become a process on these GPUs. Raises CudaError when they have too little memory.

    ``client``: what the daemon's stand-in has said. Without it a pipe directory that has
    no ``control`` is one of a fleet whose daemons are no programs.
    """
    pipe = pipe_directory(environment)
    if client is None and pipe and (Path(pipe) / "control").exists():
        pipe = ""  # The daemon is dead, and so this client runs without MPS.
    pid = os.getpid()
    limits = memory_limits_mib(environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", ""))
    while True:
        with processes.locked():
            others = processes.list()
            if client is not None or not _queued(others, pipe):
                for ordinal, gpu in enumerate(gpus):
                    limit = limits.get(gpu.uuid, limits.get(str(ordinal))) if pipe else None
                    if client is not None:
                        limit = client.limits_mib.get(gpu.uuid)
                    if not pipe:
                        _check_exclusive(gpu, others)
                    _check_room(gpu, others, memory_mib, limit)
                mine = GpuProcess(
                    pid=pid,
                    start_ticks=start_ticks_of(pid) or 0,  # we live
                    uid=os.getuid(),
                    uuids=tuple(gpu.uuid for gpu in gpus),
                    memory_mib=memory_mib,
                    pipe=pipe,
                )
                processes.add(mine)
                return mine
        time.sleep(_QUEUE_POLL_S)


def _check_exclusive(gpu: VisibleGpu, others: Sequence[GpuProcess]) -> None:
    if gpu.compute_mode == _EXCLUSIVE_PROCESS and any(gpu.uuid in each.uuids for each in others):
        raise CudaError(
            EXIT_BUSY, f"CUDA-capable device is busy or unavailable: {gpu.uuid} is exclusive"
        )


def _queued(others: Sequence[GpuProcess], pipe: str) -> bool:
    # An MPS daemon serves one user at a time: the next waits until all of his are gone.
    return bool(pipe) and any(other.pipe == pipe and other.uid != os.getuid() for other in others)


def _check_room(
    gpu: VisibleGpu, others: Sequence[GpuProcess], memory_mib: int, limit_mib: int | None
) -> None:
    if limit_mib is not None and memory_mib > limit_mib:
        raise CudaError(
            EXIT_OUT_OF_MEMORY, f"out of memory: {memory_mib} MiB wanted, MPS limit {limit_mib} MiB"
        )
    if gpu.usable_mib is None:
        return
    free_mib = gpu.usable_mib - sum(each.memory_mib for each in others if gpu.uuid in each.uuids)
    if memory_mib > free_mib:
        raise CudaError(
            EXIT_OUT_OF_MEMORY,
            f"out of memory: {memory_mib} MiB wanted, {free_mib} MiB free on {gpu.uuid}",
        )


def _hold(arguments: argparse.Namespace, environment: dict[str, str]) -> None:
    directory = node_directory(environment)
    processes = GpuProcesses(directory / "gpu-processes")
    gpus = visible_gpus(directory, environment)
    if arguments.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    client = join_mps(gpus, environment)
    share_pct = 100.0 if client is None else client.share_pct
    mine = take_memory(processes, gpus, arguments.memory_mib, environment, client)
    line = {
        "pid": mine.pid,
        "uuids": mine.uuids,
        "memory_mib": mine.memory_mib,
        "pipe": mine.pipe,
        "sm_count": int(gpus[0].sm_count * share_pct / 100),
    }
    if client is not None and arguments.work != "none":
        client.say(arguments.work)
    print(json.dumps(line), flush=True)
    try:
        _churn(arguments.cycles, processes, mine)
        _wait(arguments, client)
    finally:
        processes.remove(mine.pid)
        if client is not None:
            client.say("idle")
            client.close()


def _churn(cycles: int, processes: GpuProcesses, mine: GpuProcess) -> None:
    """Give the memory back and take it again, so many times, and say so at the end."""
    nothing = replace(mine, memory_mib=0)
    for _ in range(cycles):
        processes.add(nothing)
        processes.add(mine)
    if cycles:
        print(json.dumps({"pid": mine.pid, "cycles": cycles}), flush=True)


def _wait(arguments: argparse.Namespace, client: MpsClient | None) -> None:
    """Wait for the end, or for an error of the server, which is for good."""
    watched: list[int] = [sys.stdin.fileno()] if arguments.until_stdin_closes else []
    end_s = time.monotonic() + arguments.seconds
    while (left_s := end_s - time.monotonic()) > 0:
        server = [] if client is None else [client.fileno()]
        readable, _, _ = select.select([*watched, *server], [], [], min(left_s, 3600.0))
        if client is not None and client.fileno() in readable:
            error = client.hear()
            if not arguments.stubborn:
                raise CudaError(EXIT_MPS, error)
            client = None
        elif readable and not os.read(readable[0], 4096):
            return


def _wait_for_orphan() -> int:
    """Let a child hold the memory in a session of its own; it outlives this process."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    os.setsid()
    return -1


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gpupool_agent.simulated.cuda_client", description="Hold GPU memory."
    )
    parser.add_argument("--memory-mib", type=int, default=100, help="on each visible GPU, MiB")
    parser.add_argument("--seconds", type=float, default=86400.0, help="how long, s")
    parser.add_argument(
        "--orphan", action="store_true", help="hold it in a child that outlives this process"
    )
    parser.add_argument(
        "--cycles", type=int, default=0, help="give its memory back and take it, so many times"
    )
    parser.add_argument(
        "--work",
        choices=("none", "busy", "fatal"),
        default="none",
        help="keep work in flight, or do work that is fatal to the GPU (with MPS)",
    )
    parser.add_argument(
        "--stubborn", action="store_true", help="go on after errors and SIGTERM, until killed"
    )
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="hold it until standard input closes"
    )
    arguments = parser.parse_args(argv)
    if arguments.memory_mib < 1:
        parser.error(f"--memory-mib is {arguments.memory_mib}; accepted are 1 and more")
    if not 0 <= arguments.seconds <= 1e9:
        parser.error(f"--seconds is {arguments.seconds}; accepted are 0 to 1e9")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    arguments = _arguments(argv)
    if arguments.orphan:
        code = _wait_for_orphan()
        if code >= 0:
            return code
    try:
        _hold(arguments, dict(os.environ))
    except CudaError as error:
        print(f"cuda_client: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
