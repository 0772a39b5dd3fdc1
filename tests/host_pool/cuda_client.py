"""A CUDA client of the tests: through libcuda itself, without any other library.

python -m tests.host_pool.cuda_client [--memory-mib N] [--until-refused] [--step-mib N]

It makes a context on the first device that it sees, allocates N MiB, and with
--until-refused more and more until it is told that there is no more. It prints what it saw
as one line of JSON and keeps its memory until standard input closes. Exit codes: 0, or 1
with the call that failed.
"""

import argparse
import ctypes
import json
import os
import sys
from typing import Any

LIBRARY = "libcuda.so.1"
MIB = 2**20
MULTIPROCESSOR_COUNT = 16
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT."""

OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


class CudaCallError(Exception):
    """A call failed; the text names it, the error and its number."""

    def __init__(self, name: str, word: str, code: int) -> None:
        super().__init__(f"{name}: {word} ({code})")
        self.code = code


class Context:
    """A context on device 0 of what ``cuda``, which is libcuda, shows. CudaCallError."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._buffers: list[ctypes.c_uint64] = []
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        self._call("cuCtxCreate_v2", ctypes.byref(self._context), 0, self._device)

    def device_count(self) -> int:
        """Devices that the process sees."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def multiprocessors(self) -> int:
        """Those that its kernels may use."""
        count = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(count), MULTIPROCESSOR_COUNT, self._device)
        return count.value

    def allocate(self, mib: int) -> None:
        """Take memory, and keep it."""
        buffer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(buffer), ctypes.c_size_t(mib * MIB))
        self._buffers.append(buffer)

    def allocate_until_refused(self, step_mib: int) -> int:
        """Take ``step_mib`` again and again; what was got, in MiB, until it was refused."""
        got_mib = 0
        while True:
            try:
                self.allocate(step_mib)
            except CudaCallError as error:
                if error.code != OUT_OF_MEMORY:
                    raise
                return got_mib
            got_mib += step_mib

    def close(self) -> None:
        """Leave in order: nothing is in flight afterwards."""
        for buffer in self._buffers:
            self._call("cuMemFree_v2", buffer)
        self._call("cuCtxDestroy_v2", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise CudaCallError(name, (text.value or b"unknown error").decode(), code)


def main(arguments: list[str], cuda: Any = None) -> int:
    parser = argparse.ArgumentParser(prog="cuda_client")
    parser.add_argument("--memory-mib", type=int, default=0)
    parser.add_argument("--until-refused", action="store_true")
    parser.add_argument("--step-mib", type=int, default=64)
    options = parser.parse_args(arguments)
    try:
        context = Context(ctypes.CDLL(LIBRARY) if cuda is None else cuda)
        seen = {
            "pid": os.getpid(),
            "devices": context.device_count(),
            "sm_count": context.multiprocessors(),
            "memory_mib": options.memory_mib,
        }
        if options.memory_mib:
            context.allocate(options.memory_mib)
        if options.until_refused:
            seen["memory_mib"] += context.allocate_until_refused(options.step_mib)
        print(json.dumps(seen), flush=True)
        sys.stdin.read()
        context.close()
    except (CudaCallError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
