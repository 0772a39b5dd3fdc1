"""libcuda of a simulated node, as far as ``cuda_client`` calls it: the same names, codes, pointers.

What is refused is decided by the stand-in of a CUDA program: by the MPS daemon of the
environment, by exclusive-process mode and by what memory there is.
"""

import os
from typing import Any

from gpupool_agent.simulated.cuda_client import (
    EXIT_BUSY,
    EXIT_NO_DEVICE,
    EXIT_OUT_OF_MEMORY,
    CudaError,
    join_mps,
    node_directory,
    take_memory,
    visible_gpus,
)
from gpupool_agent.simulated.gpu_processes import GpuProcesses

MIB = 2**20
CONTEXT_MIB = 96
"""What a context takes before anything is allocated; counted against the MPS limit."""

MPS_SERVER_NOT_READY = 807
ERRORS = {
    EXIT_OUT_OF_MEMORY: (2, b"CUDA_ERROR_OUT_OF_MEMORY"),
    EXIT_BUSY: (46, b"CUDA_ERROR_DEVICE_UNAVAILABLE"),
    EXIT_NO_DEVICE: (100, b"CUDA_ERROR_NO_DEVICE"),
}


class PlayedCuda:
    """One process's library. Functions have the C names; each gives a CUresult."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._gpus = visible_gpus(node_directory(environment), environment)
        self._processes = GpuProcesses(node_directory(environment) / "gpu-processes")
        self._client: Any = None
        self._taken_mib = 0
        self._sizes: dict[int, int] = {}

    def cuInit(self, _flags: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = ordinal
        return 0 if ordinal < len(self._gpus) else 101

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._gpus)
        return 0

    def cuCtxCreate_v2(self, context: Any, _flags: int, _device: Any) -> int:  # noqa: N802
        try:
            self._client = join_mps(self._gpus, self._environment)
        except CudaError as error:
            return _code(error)
        context._obj.value = 1
        return self._take(CONTEXT_MIB)

    def cuDeviceGetAttribute(self, value: Any, _attribute: int, _device: Any) -> int:  # noqa: N802
        share_pct = 100.0 if self._client is None else self._client.share_pct
        value._obj.value = int(self._gpus[0].sm_count * share_pct / 100)
        return 0

    def cuMemAlloc_v2(self, buffer: Any, size: Any) -> int:  # noqa: N802
        mib = -(-size.value // MIB)
        code = self._take(mib)
        if not code:
            buffer._obj.value = len(self._sizes) + 1
            self._sizes[buffer._obj.value] = mib
        return code

    def cuMemFree_v2(self, buffer: Any) -> int:  # noqa: N802
        return self._take(-self._sizes.pop(buffer.value))

    def cuCtxDestroy_v2(self, _context: Any) -> int:  # noqa: N802
        self._processes.remove(os.getpid())
        if self._client is not None:
            self._client.close()
        return 0

    def cuGetErrorName(self, code: int, text: Any) -> int:  # noqa: N802
        names = dict(ERRORS.values())
        text._obj.value = names.get(code, b"CUDA_ERROR_MPS_SERVER_NOT_READY")
        return 0

    def _take(self, mib: int) -> int:
        wanted_mib = self._taken_mib + mib
        try:
            take_memory(self._processes, self._gpus, wanted_mib, self._environment, self._client)
        except CudaError as error:
            return _code(error)
        self._taken_mib = wanted_mib
        return 0


def _code(error: CudaError) -> int:
    return ERRORS.get(error.code, (MPS_SERVER_NOT_READY, b""))[0]
