"""Processes that hold GPU memory on a simulated node and belong to no lease."""

import asyncio
import os
import sys
from pathlib import Path

STRAYS_MAX = 64
_END_S = 10.0


class StrayError(ValueError):
    """A stray process could not be started; says why."""


class Strays:
    """CUDA-client stand-ins of one node, each a real process.

    They hold on to their standard input: it closes with this process however that
    ends, so that none is left behind.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self, uuid: str, memory_mib: int) -> int:
        """Hold memory on a GPU; returns the pid. Raises StrayError."""
        if len(self._processes) >= STRAYS_MAX:
            raise StrayError(f"{STRAYS_MAX} stray processes run already, which is the most")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gpupool_agent.simulated.cuda_client",
            "--until-stdin-closes",
            "--memory-mib",
            str(memory_mib),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                "PATH": os.environ.get("PATH", ""),
                "CUDA_VISIBLE_DEVICES": uuid,
                "GPUPOOL_SIMULATED_NODE": str(self._directory),
            },
        )
        self._processes.append(process)
        if process.stdout is None or not await process.stdout.readline():
            _, stderr = await process.communicate()
            self._processes.remove(process)
            raise StrayError(stderr.decode().strip())
        return process.pid

    async def clear(self) -> int:
        """End them all; returns how many there were."""
        processes, self._processes = self._processes, []
        for process in processes:
            if process.returncode is None:
                process.kill()
        for process in processes:
            await asyncio.wait_for(process.communicate(), _END_S)
        return len(processes)
