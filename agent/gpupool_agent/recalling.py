"""What processes were, for readings that meet them as they end.

A process that ends gives up its environment and its command before the driver has given
up its memory, and then its number too. Whoever is listed all the same is who it was.
"""

from dataclasses import replace

from gpupool_agent.core.readings import DeviceProcess, DeviceState


class Recall:
    """Remembers the processes of the last reading, by pid."""

    def __init__(self) -> None:
        self._known: dict[int, DeviceProcess] = {}

    def complete(self, devices: tuple[DeviceState, ...]) -> tuple[DeviceState, ...]:
        """The same reading, with what is known of its processes from the one before."""
        found = tuple(
            device
            if device.processes is None
            else replace(device, processes=tuple(map(self._complete, device.processes)))
            for device in devices
        )
        self._known = {each.pid: each for device in found for each in device.processes or ()}
        return found

    def _complete(self, process: DeviceProcess) -> DeviceProcess:
        before = self._known.get(process.pid)
        if before is None:
            return process
        if not process.start_ticks:
            # The kernel knows it no more, so the number is nobody else's yet.
            return replace(before, memory_mib=process.memory_mib, through_mps=process.through_mps)
        if process.start_ticks != before.start_ticks:
            return process
        return replace(
            process,
            lease_id=process.lease_id or before.lease_id or process.lease_id,
            command=process.command or before.command,
            ancestors=process.ancestors or before.ancestors,
        )
