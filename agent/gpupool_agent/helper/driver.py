"""The driver as the helper needs it: is that GPU there, its mode, who is on it.

Calls may block in the kernel for ever. Each GPU's calls run on a thread of their own, one
at a time, so a GPU whose driver hangs takes no other with it.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import pynvml  # pyright: ignore[reportMissingTypeStubs] - it has none, see below

from gpupool_agent.devices.blocking import BlockingCalls, CallHangsError
from gpupool_agent.helper.refusal import FailedError, RefusedError

T = TypeVar("T")

# nvidia-ml-py has no types; this is the edge.
nvml: Any = pynvml

MODES = {"default": 0, "exclusive_process": 3, "prohibited": 2}
"""NVML's numbers of the compute modes."""

GPUS_MAX = 256
"""Threads that may hang at one time: more GPUs than a host has, with their instances."""


class Driver(Protocol):
    """Calls that block. Each raises RefusedError for a GPU that is not listed, FailedError."""

    def set_mode(self, gpu: str, mode: str) -> None:
        """Set the compute mode."""
        ...

    def pids(self, gpu: str) -> frozenset[int]:
        """Processes on the GPU."""
        ...


class NvmlDriver:
    """``Driver`` over NVML.

    The library is initialised for each call: it then sees GPUs that were swapped.
    """

    def set_mode(self, gpu: str, mode: str) -> None:
        """Set the compute mode, where it is another one."""

        def change(handle: Any) -> None:
            if nvml.nvmlDeviceGetComputeMode(handle) != MODES[mode]:
                nvml.nvmlDeviceSetComputeMode(handle, MODES[mode])

        _with_gpu(gpu, change)

    def pids(self, gpu: str) -> frozenset[int]:
        """Processes that compute on it, also through MPS, or draw."""
        return _with_gpu(gpu, _pids)


def _with_gpu(gpu: str, work: Callable[[Any], T]) -> T:
    try:
        nvml.nvmlInit()
        try:
            return work(_handle(gpu))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise FailedError(f"the driver says: {error}") from error


def _handle(gpu: str) -> Any:
    """The handle of a listed GPU: it must answer to this very name."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.encode())
    except (nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument) as error:
        raise RefusedError(f"gpu: the driver lists no {gpu}") from error
    found = nvml.nvmlDeviceGetUUID(handle)
    if (found.decode() if isinstance(found, bytes) else found) != gpu:
        raise RefusedError(f"gpu: the driver lists no {gpu}")
    return handle


def _pids(handle: Any) -> frozenset[int]:
    found = {each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    for more in (
        nvml.nvmlDeviceGetMPSComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        try:
            found |= {each.pid for each in more(handle)}
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            continue
    return frozenset(found)


class GpuCalls:
    """Runs the driver's calls, each GPU's on its own."""

    def __init__(self, driver: Driver, deadline_s: float) -> None:
        self._driver = driver
        self._deadline_s = deadline_s
        self._calls: dict[str, BlockingCalls] = {}

    async def set_mode(self, gpu: str, mode: str) -> None:
        """See ``Driver``; FailedError also where the driver hangs."""
        await self._call(gpu, lambda: self._driver.set_mode(gpu, mode))

    async def pids(self, gpu: str) -> frozenset[int]:
        """See ``Driver``; FailedError also where the driver hangs."""
        return await self._call(gpu, lambda: self._driver.pids(gpu))

    async def _call(self, gpu: str, work: Callable[[], T]) -> T:
        if gpu not in self._calls and len(self._calls) >= GPUS_MAX:
            self._calls = {key: each for key, each in self._calls.items() if each.hangs}
            if len(self._calls) >= GPUS_MAX:
                raise FailedError(f"{GPUS_MAX} driver calls hang")
        calls = self._calls.setdefault(gpu, BlockingCalls("driver"))
        try:
            return await calls.call(work, self._deadline_s)
        except CallHangsError as error:
            raise FailedError(f"{gpu}: {error}") from error
