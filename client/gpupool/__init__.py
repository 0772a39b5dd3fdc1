"""gpupool: the GPUs of many hosts as one pool.

>>> with gpupool.Client().lease(gpus=8, level="node") as lease:
...     subprocess.run(["train"], env=os.environ | lease.env)

``Client`` and ``AsyncClient`` are the SDK, ``gpupool.errors`` what it raises,
``gpupool.model`` the words that it speaks in.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpupool.aio import AsyncClient, AsyncLease
    from gpupool.client import Client, Lease
    from gpupool.errors import GpupoolError

__version__ = "0.1.0"

__all__ = ["AsyncClient", "AsyncLease", "Client", "GpupoolError", "Lease", "__version__"]

# Loaded at first use: the agent imports the words of gpupool.model and must not pay
# for the SDK, nor the command line for what a command does not use.
_HOMES = {
    "AsyncClient": "gpupool.aio",
    "AsyncLease": "gpupool.aio",
    "Client": "gpupool.client",
    "Lease": "gpupool.client",
    "GpupoolError": "gpupool.errors",
}


def __getattr__(name: str) -> Any:
    """Loads a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
