"""Bonds that have ended still explain readings that began before.

A holder that ends is known at once, what runs on the GPUs only from time to time. A
reading that is judged by newer bonds would name the holder's own work, which may be
gone as well, as a stray of nobody.
"""

from gpupool.model.ids import LeaseId
from gpupool_agent.core.adoptions import Adoption
from gpupool_agent.core.devices import Devices
from gpupool_agent.core.membership import Bonds

LAPSED_S_MAX = 60.0
"""Longest time that a bond outlasts its end, where a device is not read at all."""


class LapsedBonds:
    """Bonds of the past that some device was not read since."""

    def __init__(self) -> None:
        self._last = Bonds()
        self._holders: dict[LeaseId, tuple[int, float]] = {}
        self._adopted: dict[int, tuple[Adoption, float]] = {}

    def with_living(self, living: Bonds, devices: Devices, now: float) -> Bonds:
        """The living ones, and those that have ended since the devices were read."""
        for lease_id, pid in self._last.holders.items():
            if lease_id not in living.holders:
                self._holders[lease_id] = (pid, now)
        for pid, adoption in self._last.adopted.items():
            if pid not in living.adopted:
                self._adopted[pid] = (adoption, now)
        self._last = Bonds(dict(living.holders), dict(living.adopted))
        if not self._holders and not self._adopted:
            return living
        read_s = max(devices.oldest_reading_s(), now - LAPSED_S_MAX)
        self._holders = {key: each for key, each in self._holders.items() if each[1] > read_s}
        self._adopted = {key: each for key, each in self._adopted.items() if each[1] > read_s}
        return Bonds(
            {key: pid for key, (pid, _) in self._holders.items()} | dict(living.holders),
            {pid: adoption for pid, (adoption, _) in self._adopted.items()} | dict(living.adopted),
        )
