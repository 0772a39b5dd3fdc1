"""Where the programs begin: they say what to install where their libraries are missing.

People who only work with a pool install it without the libraries of its services, and
find the programs on their path all the same.
"""

import importlib
import sys
from collections.abc import Callable
from typing import cast

EXIT_UNAVAILABLE = 69
"""EX_UNAVAILABLE: a library of the program is not installed."""


def agent() -> int:
    """Begins ``gpupool-agent``."""
    return _begin("gpupool-agent", "gpupool_agent.__main__")


def helper() -> int:
    """Begins ``gpupool-helper``."""
    return _begin("gpupool-helper", "gpupool_agent.helper.__main__")


def _begin(program: str, module: str) -> int:
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"{program}: {error.name} is not installed; install gpupool with its extra "
            "[agent] (from a checkout: pip install '.[agent]')\n"
        )
        return EXIT_UNAVAILABLE
    return cast("Callable[[], int]", main)()
