"""IMEX channels of this host: device nodes by which hosts of an NVLink domain share memory."""

import re
from pathlib import Path

from gpupool_agent.core.environment import IMEX_CHANNELS
from gpupool_agent.devices.sysfs import names_in

CHANNEL = re.compile(r"channel(0|[1-9][0-9]{0,3})")


def imex_channels(directory: Path = Path(IMEX_CHANNELS)) -> tuple[int, ...]:
    """Their numbers, lowest first; none where the host has no IMEX."""
    found = (CHANNEL.fullmatch(name) for name in names_in(str(directory)))
    return tuple(sorted(int(each[1]) for each in found if each))
