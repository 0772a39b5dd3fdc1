"""Daemons of ours that no record knows: their agent has lost what it had written down.

The helper knows them, by the name of their slot. They are ours and not foreign, and stay
until it is known which of their slices are still wanted.
"""

from collections.abc import Collection, Iterable

from gpupool.model.ids import DeviceUuid
from gpupool_agent.devices.interfaces import MpsError
from gpupool_agent.devices.mps_daemons.control import COMMAND_DEADLINE_S, within
from gpupool_agent.devices.mps_daemons.records import slot_name
from gpupool_agent.devices.privileged import DaemonFacts, Privileged


class Leftovers:
    """What the helper knows of GPUs whose daemon is not recorded; each is asked about once."""

    def __init__(self, privileged: Privileged) -> None:
        self._privileged = privileged
        self._found: dict[DeviceUuid, DaemonFacts | None] = {}

    async def look(self, gpus: Iterable[DeviceUuid], recorded: Collection[DeviceUuid]) -> None:
        """Ask about GPUs whose daemon is not recorded; what cannot be told is asked next time."""
        for gpu in gpus:
            if gpu not in recorded:
                try:
                    await self._ask(gpu)
                except MpsError:
                    return

    async def take(self, gpu: DeviceUuid) -> DaemonFacts | None:
        """The daemon that is left on a GPU; whoever takes it writes it down. MpsError."""
        await self._ask(gpu)
        found, self._found[gpu] = self._found[gpu], None
        return found

    def pids(self) -> set[int]:
        """Daemons that nobody has taken."""
        return {daemon.pid for daemon in self._found.values() if daemon is not None}

    def settled(self, gpu: DeviceUuid) -> None:
        """Nothing is left on a GPU: it has a record of its own from now on."""
        self._found[gpu] = None

    async def _ask(self, gpu: DeviceUuid) -> None:
        if gpu not in self._found:
            self._found[gpu] = await within(
                self._privileged.mps_daemon(slot_name(gpu)),
                COMMAND_DEADLINE_S,
                "no answer to mps_daemon",
            )
