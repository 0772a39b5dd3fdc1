"""The NVML library of simulated nodes, in the place of libnvidia-ml.so.1.

pynvml keeps the loaded library in one variable and fetches each C function from it
as an attribute, once. ``install`` puts an object there whose attributes take the
same ctypes arguments, fill the same pointers and return the same codes, so that
everything above the C calls is the real thing. There is one library in a process
and there may be hundreds of nodes: a call answers for the node that its context
names (``CURRENT_NODE``), on the thread that it was made on.

A function that is not here is missing as from an older driver: pynvml raises
NVMLError_FunctionNotFound when it is called.
"""

import importlib

from gpupool_agent.simulated import nvml_enumeration, nvml_readings
from gpupool_agent.simulated.nvml_calls import ErrorString, NvmlFunction


class NvmlLibrary:
    """Holds every function as an attribute, which is how pynvml finds them."""

    def __init__(self) -> None:
        for name, body in (nvml_enumeration.CALLS.bodies | nvml_readings.CALLS.bodies).items():
            setattr(self, name, NvmlFunction(name, body))
        self.nvmlErrorString = ErrorString()


class LibraryLoadedError(RuntimeError):
    """pynvml has loaded a real library in this process already."""


def install() -> None:
    """Make pynvml of this process speak to simulated nodes; done twice is done once.

    Raises LibraryLoadedError when the process has opened real hardware before.
    """
    namespace = vars(importlib.import_module("pynvml"))
    loaded = namespace["nvmlLib"]
    if isinstance(loaded, NvmlLibrary):
        return
    if loaded is not None:
        raise LibraryLoadedError("pynvml has loaded libnvidia-ml.so.1; simulate in another process")
    namespace["nvmlLib"] = NvmlLibrary()
