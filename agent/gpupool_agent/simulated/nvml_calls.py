"""How a C function of NVML is written in Python: arguments, codes, handles.

The bodies are in ``nvml_enumeration`` and ``nvml_readings``; ``nvml_library`` gathers
them.
"""

import ctypes
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from gpupool_agent.simulated.node import CURRENT_NODE, SimulatedGpu, SimulatedNode

HANDLE_INDEX_BITS = 16
"""A handle is the session's serial number, and below it the GPU's index from 1."""


class ReturnCode(IntEnum):
    """NVML's return codes, as far as they occur here."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15


class NvmlFunction:
    """One C function. pynvml sets ``restype`` on some, as on a ctypes function."""

    __slots__ = ("_body", "_name", "restype")

    def __init__(self, name: str, body: Callable[..., int]) -> None:
        self._name = name
        self._body = body
        self.restype: Any = ctypes.c_int

    def __call__(self, *arguments: Any) -> int:
        """Answer for the node of the calling context; blocks while its driver hangs."""
        node = CURRENT_NODE.get()
        if node is None:
            return ReturnCode.DRIVER_NOT_LOADED
        node.answer()
        if self._name in node.machine.missing_symbols:
            return ReturnCode.FUNCTION_NOT_FOUND
        return self._body(node, *arguments)


class ErrorString:
    """nvmlErrorString: text instead of a code, and no node needed."""

    restype: Any = ctypes.c_char_p

    def __call__(self, code: int) -> bytes:
        """Name a return code."""
        known = {int(each): each.name for each in ReturnCode}
        return known.get(code, f"code {code}").replace("_", " ").capitalize().encode()


class Calls:
    """The C functions of one module: ``bodies`` by the library's name for them."""

    def __init__(self) -> None:
        self.bodies: dict[str, Callable[..., int]] = {}

    def function(self, *names: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
        """Add a body that takes the node and the C arguments."""

        def add(body: Callable[..., int]) -> Callable[..., int]:
            for name in names:
                self.bodies[name] = body
            return body

        return add

    def device_function(self, name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
        """Add a body that takes the node, the GPU of the handle, and the other arguments."""

        def add(body: Callable[..., int]) -> Callable[..., int]:
            def resolve(node: SimulatedNode, handle: Any, *arguments: Any) -> int:
                gpu = _gpu_of(node, handle)
                return body(node, gpu, *arguments) if isinstance(gpu, SimulatedGpu) else gpu

            self.bodies[name] = resolve
            return body

        return add


def _gpu_of(node: SimulatedNode, handle: Any) -> SimulatedGpu | ReturnCode:
    session = node.session
    if session is None:
        return ReturnCode.UNINITIALIZED
    # A handle is a pointer: what is in it, not where it points.
    value = ctypes.c_void_p.from_buffer(handle).value or 0
    serial, number = value >> HANDLE_INDEX_BITS, value & ((1 << HANDLE_INDEX_BITS) - 1)
    if serial != session.serial or number == 0:
        return ReturnCode.INVALID_ARGUMENT
    if number > len(session.gpus):
        return ReturnCode.GPU_IS_LOST
    gpu = session.gpus[number - 1]
    return ReturnCode.GPU_IS_LOST if gpu.lost else gpu


def target(pointer: Any) -> Any:
    """Return what a byref() points to: it gives no other way in Python."""
    return pointer._obj  # noqa: SLF001 - ctypes names it so


def number(argument: Any) -> int:
    """Return a C number that was passed as such or as a Python one."""
    return int(getattr(argument, "value", argument))


def fill_text(buffer: Any, size: Any, text: str) -> int:
    """Write text into a character buffer; the code when it does not fit."""
    data = text.encode()
    if len(data) >= number(size):
        return ReturnCode.INSUFFICIENT_SIZE
    buffer.value = data
    return ReturnCode.SUCCESS


def fill_number(pointer: Any, value: int) -> int:
    """Write a number where a byref() points to."""
    target(pointer).value = value
    return ReturnCode.SUCCESS
