"""MPS without the real programs: the life of each daemon as a value in this process.

It keeps every rule that placement and holders rely on (one user a GPU, shares of at
most 100 percent, the environment that confines a client), and starts nothing.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpupool.model.assignment import AssignmentKey
from gpupool.model.ids import DeviceUuid
from gpupool_agent.core.assignments import AssignmentName
from gpupool_agent.devices.interfaces import MpsError, MpsStatus, ProcessFacts, SliceLimits

SLICES_MAX = 48
"""Clients that one daemon serves."""


@dataclass(slots=True)
class _Daemon:
    uid: int
    slices: dict[tuple[AssignmentKey, int], SliceLimits] = field(
        default_factory=dict[tuple[AssignmentKey, int], SliceLimits]
    )


class InProcessMps:
    """``MpsControl`` that remembers instead of starting daemons.

    ``directory`` is where pipe directories would be. Their names are short, since the
    path of a Unix socket is, and the same after every restart of the agent.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._daemons: dict[DeviceUuid, _Daemon] = {}

    async def start(self, gpu: DeviceUuid, uid: int) -> None:
        """Have a daemon for this user on the GPU."""
        daemon = self._daemons.get(gpu)
        if daemon is None:
            self._daemons[gpu] = _Daemon(uid=uid)
        elif daemon.uid != uid:
            raise MpsError(f"{gpu}: its MPS serves uid {daemon.uid}, not {uid}")

    async def set_limits(self, gpu: DeviceUuid, limits: SliceLimits) -> dict[str, str]:
        """Admit a slice; gives what its holder needs."""
        daemon = self._daemon(gpu)
        name = (limits.key, limits.token)
        others = [each for other, each in daemon.slices.items() if other != name]
        taken = sum(each.share_pct for each in others)
        if limits.uid != daemon.uid:
            raise MpsError(f"{gpu}: its MPS serves uid {daemon.uid}, not {limits.uid}")
        if taken + limits.share_pct > 100:
            raise MpsError(f"{gpu}: {taken} % are taken, {limits.share_pct} % do not fit")
        if len(others) >= SLICES_MAX:
            raise MpsError(f"{gpu}: it has {SLICES_MAX} slices, the most that MPS serves")
        daemon.slices[name] = limits
        environment = {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe_directory(gpu))}
        if limits.share_pct:
            environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(limits.share_pct)
        if limits.memory_mib:
            environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"{gpu}={limits.memory_mib}M"
        return environment

    async def probe(self, gpu: DeviceUuid, limits: SliceLimits) -> int:
        """See that the slice is admitted."""
        if self._daemon(gpu).slices.get((limits.key, limits.token)) != limits:
            raise MpsError(f"{gpu}: the slice is not admitted as asked")
        return 0

    async def status(self, gpu: DeviceUuid) -> MpsStatus:
        """What runs there now."""
        daemon = self._daemons.get(gpu)
        if daemon is None:
            return MpsStatus(uid=None, healthy=True)
        return MpsStatus(uid=daemon.uid, healthy=True, slices=tuple(daemon.slices.values()))

    async def remove_limits(self, gpu: DeviceUuid, key: AssignmentKey, token: int) -> None:
        """Take a slice away."""
        daemon = self._daemons.get(gpu)
        if daemon is not None:
            daemon.slices.pop((key, token), None)

    async def stop(self, gpu: DeviceUuid) -> None:
        """End the daemon."""
        daemon = self._daemons.get(gpu)
        if daemon is not None and daemon.slices:
            raise MpsError(f"{gpu}: {len(daemon.slices)} slices are left")
        self._daemons.pop(gpu, None)

    async def sweep(self, gpu: DeviceUuid, kept: Collection[AssignmentName]) -> None:
        """Forget the slices that nobody keeps, and with the last one the daemon."""
        daemon = self._daemons.get(gpu)
        if daemon is not None:
            for name in set(daemon.slices) - set(kept):
                del daemon.slices[name]
        if not kept:
            await self.stop(gpu)

    async def verify(self, gpu: DeviceUuid) -> str:
        """Empty when nothing is left."""
        return "its MPS daemon still runs" if gpu in self._daemons else ""

    async def watch(
        self,
        gpus: Callable[[], Sequence[DeviceUuid]],
        tell: Callable[[DeviceUuid, str], None],
    ) -> None:
        """Nothing can go wrong with what does not run."""
        del gpus, tell

    def is_own(self, process: ProcessFacts) -> bool:
        """No process is."""
        del process
        return False

    def pipe_directory(self, gpu: DeviceUuid) -> Path:
        """Where clients reach the daemon of a GPU, the same after every restart."""
        return self._directory / hashlib.sha256(gpu.encode()).hexdigest()[:8]

    def _daemon(self, gpu: DeviceUuid) -> _Daemon:
        daemon = self._daemons.get(gpu)
        if daemon is None:
            raise MpsError(f"{gpu}: no MPS daemon runs")
        return daemon
