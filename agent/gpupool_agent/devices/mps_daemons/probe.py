"""The probe of a slice: one CUDA client, in and out again, as the lease's user.

    python -m gpupool_agent.devices.mps_daemons.probe

The root helper runs it under the lease's environment. It makes a context on the first
device that it sees and allocates a little, through libcuda itself, and prints as one
line of JSON how many multiprocessors it was given. Exit codes: 0 it got through, 1 not.
"""

import ctypes
import json
import sys
from typing import Any

LIBRARY = "libcuda.so.1"
MULTIPROCESSOR_COUNT = 16
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT."""

ALLOCATED_BYTES = 1 << 20


class ProbeError(Exception):
    """The client did not get through; the text is for people."""


def probe(cuda: Any) -> int:
    """Be a client of ``cuda``, which is libcuda; gives its multiprocessors.

    Raises ProbeError.
    """
    device, context, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
    memory = ctypes.c_uint64()
    _demand(cuda, "cuInit", 0)
    _demand(cuda, "cuDeviceGet", ctypes.byref(device), 0)
    _demand(cuda, "cuCtxCreate_v2", ctypes.byref(context), 0, device)
    try:
        _demand(cuda, "cuDeviceGetAttribute", ctypes.byref(count), MULTIPROCESSOR_COUNT, device)
        _demand(cuda, "cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(ALLOCATED_BYTES))
        _demand(cuda, "cuMemFree_v2", memory)
    finally:
        # A client that leaves in order leaves no work in flight behind.
        _demand(cuda, "cuCtxDestroy_v2", context)
    return count.value


def main() -> int:
    """Run the program; gives its exit code."""
    try:
        seen = probe(ctypes.CDLL(LIBRARY))
    except (OSError, ProbeError) as error:
        print(error)
        return 1
    print(json.dumps({"sm_count": seen}))
    return 0


def _demand(cuda: Any, name: str, *arguments: Any) -> None:
    code = getattr(cuda, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(text))
        said = (text.value or b"unknown error").decode(errors="replace")
        raise ProbeError(f"{name}: {said} ({code})")


if __name__ == "__main__":
    sys.exit(main())
