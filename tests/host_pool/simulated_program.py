"""Runs a program of a host over a simulated driver whose hardware lies in a directory.

python -m tests.host_pool.simulated_program DIRECTORY NODE_ID KIND PROGRAM [ARGUMENTS]

The helper's process is the one that changes the hardware: it alone sets compute modes.
The others look them up in the file that it writes. With GPUPOOL_DRIVER_TIME the time that
the simulated driver takes is counted into that file.
"""

import importlib
import json
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.host_pool.machines import MODULES

from gpupool_agent.simulated.machine import load_machine
from gpupool_agent.simulated.node import CURRENT_NODE, SimulatedNode
from gpupool_agent.simulated.nvml_calls import NvmlFunction
from gpupool_agent.simulated.nvml_library import install

DRIVER_TIME = "GPUPOOL_DRIVER_TIME"
NANOSECONDS = struct.Struct("=Q")


class Hardware(SimulatedNode):
    """A node whose compute modes outlive the process that sets them."""

    def __post_init__(self) -> None:
        modes = modes_in(self.directory)
        super().__post_init__()
        for gpu in self.gpus:
            if modes.get(gpu.uuid):
                self.set_compute_mode(gpu, modes[gpu.uuid])


class Onlooker(SimulatedNode):
    """A node whose compute modes another process sets; they are looked up at each session."""

    def write_gpus(self) -> None:
        """What is written is the other's."""

    def open_session(self) -> None:
        modes = modes_in(self.directory)
        for gpu in self.gpus:
            gpu.compute_mode = modes.get(gpu.uuid, gpu.compute_mode)
        super().open_session()


def modes_in(directory: Path) -> dict[str, int]:
    """Compute modes by UUID, as they were last written."""
    file = directory / "gpus.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    return {row["uuid"]: row["compute_mode"] for row in rows}


class DriverClock:
    """Counts the processor time of the driver's calls, which on a real host is not ours."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(NANOSECONDS.pack(0))
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), NANOSECONDS.size)
        self._total_ns = 0
        self._lock = threading.Lock()

    def timed(self, body: Callable[..., int]) -> Callable[..., int]:
        """The same call, counted."""

        def call(*arguments: Any) -> int:
            begun_ns = time.thread_time_ns()
            try:
                return body(*arguments)
            finally:
                taken_ns = time.thread_time_ns() - begun_ns
                with self._lock:
                    self._total_ns += taken_ns
                    NANOSECONDS.pack_into(self._memory, 0, self._total_ns)

        return call


def count_driver_time(file: Path) -> None:
    """Have every call of the simulated library counted."""
    clock = DriverClock(file)
    library = vars(importlib.import_module("pynvml"))["nvmlLib"]
    for function in vars(library).values():
        if isinstance(function, NvmlFunction):
            function._body = clock.timed(function._body)


def main(arguments: list[str]) -> int:
    directory, node_id, kind, program, *rest = arguments
    make = Hardware if program == "helper" else Onlooker
    CURRENT_NODE.set(make(node_id=node_id, machine=load_machine(kind), directory=Path(directory)))
    install()
    if os.environ.get(DRIVER_TIME):
        count_driver_time(Path(os.environ[DRIVER_TIME]))
    if program == "smi":
        return importlib.import_module("tests.host_pool.smi_program").main(rest)
    if program == "cuda_client":
        from tests.host_pool.played_cuda import PlayedCuda

        os.environ["GPUPOOL_SIMULATED_NODE"] = directory
        client = importlib.import_module(MODULES[program])
        return client.main(rest, PlayedCuda(dict(os.environ)))
    return importlib.import_module(MODULES[program]).main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
