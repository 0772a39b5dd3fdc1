"""Carrying out Prepare and CleanUp: today the MPS side of slices.

A step either succeeds or leaves nothing behind. Steps on one GPU go one after the
other, so that a daemon is not stopped under a slice that is just being admitted.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gpupool.model.assignment import Assignment
from gpupool.model.ids import DeviceUuid
from gpupool.model.lease import DeviceShare
from gpupool_agent.core.assignments import AssignmentName
from gpupool_agent.devices.interfaces import MpsControl, MpsError, SliceLimits

STEP_DEADLINE_S = 60.0


class StepFailedError(Exception):
    """A step did not succeed; the text is for people."""


@dataclass(slots=True, kw_only=True)
class Prepared:
    """What preparing gave: for the environment, and what the probes saw."""

    environment: dict[str, str] = field(default_factory=dict[str, str])
    sm_counts: dict[DeviceUuid, int] = field(default_factory=dict[DeviceUuid, int])


class Steps:
    """Prepares and cleans up assignments on this node.

    ``sm_count`` gives the multiprocessors of a device, 0: unknown. ``slices_on`` are the
    assignments that need MPS on one.
    """

    def __init__(
        self,
        mps: MpsControl,
        sm_count: Callable[[DeviceUuid], int],
        slices_on: Callable[[DeviceUuid], frozenset[AssignmentName]],
    ) -> None:
        self._mps = mps
        self._sm_count = sm_count
        self._slices_on = slices_on
        self._swept: set[DeviceUuid] = set()
        self._locks: defaultdict[DeviceUuid, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def prepare(self, assignment: Assignment, *, adopted: bool) -> Prepared:
        """Give what the slices of the assignment add to its environment.

        ``adopted``: its holder may be at work, so no probe runs beside it. Raises
        StepFailedError.
        """
        prepared = Prepared()
        if len(_slices(assignment)) > 1 or 0 < len(_slices(assignment)) < len(_devices(assignment)):
            # CUDA_MPS_PIPE_DIRECTORY has room for one: the other would go unconfined.
            raise StepFailedError("a process can use one MPS daemon, so one slice and nothing else")
        try:
            async with asyncio.timeout(STEP_DEADLINE_S):
                for share in _devices(assignment):
                    async with self._locks[share.device_uuid]:
                        if share.whole:
                            await self._free_of_mps(share.device_uuid)
                        else:
                            await self._admit(assignment, share, prepared, probe=not adopted)
        except (MpsError, TimeoutError) as error:
            if not adopted:
                await self._roll_back(assignment)
            raise StepFailedError(_reason(error)) from error
        return prepared

    async def clean_up(self, assignment: Assignment) -> None:
        """Take back what ``prepare`` did; raises StepFailedError."""
        try:
            async with asyncio.timeout(STEP_DEADLINE_S):
                for share in _slices(assignment):
                    async with self._locks[share.device_uuid]:
                        await self._dismiss(assignment, share.device_uuid)
        except (MpsError, TimeoutError) as error:
            raise StepFailedError(_reason(error)) from error

    async def sweep(self, gpus: Iterable[DeviceUuid]) -> dict[DeviceUuid, str]:
        """End what a former agent has left on GPUs and nobody keeps; why where it stays."""
        stays: dict[DeviceUuid, str] = {}
        for gpu in gpus:
            async with self._locks[gpu]:
                try:
                    await self._sweep(gpu)
                except MpsError as error:
                    stays[gpu] = str(error)
        return stays

    async def _sweep(self, gpu: DeviceUuid) -> None:
        """Once: what this agent has begun it ends itself."""
        if gpu not in self._swept:
            await self._mps.sweep(gpu, self._slices_on(gpu))
            self._swept.add(gpu)

    async def _free_of_mps(self, gpu: DeviceUuid) -> None:
        """A whole GPU is nobody's slice: no daemon of a former agent is left on it."""
        try:
            await self._sweep(gpu)
        except MpsError:
            # Without a helper nobody can tell; a daemon that is known is in the way.
            if (await self._mps.status(gpu)).uid is not None:
                raise

    async def _admit(
        self, assignment: Assignment, share: DeviceShare, prepared: Prepared, *, probe: bool
    ) -> None:
        limits = SliceLimits(
            key=assignment.key,
            token=assignment.token,
            uid=assignment.uid,
            share_pct=share.share_pct,
            memory_mib=share.memory_mib,
            sm_count=self._sm_count(share.device_uuid),
        )
        await self._sweep(share.device_uuid)
        await self._mps.start(share.device_uuid, assignment.uid)
        prepared.environment |= await self._mps.set_limits(share.device_uuid, limits)
        if probe:
            seen = await self._mps.probe(share.device_uuid, limits)
            prepared.sm_counts[share.device_uuid] = seen

    async def _dismiss(self, assignment: Assignment, gpu: DeviceUuid) -> None:
        await self._mps.remove_limits(gpu, assignment.key, assignment.token)
        if (await self._mps.status(gpu)).slices:
            return
        await self._mps.stop(gpu)
        rest = await self._mps.verify(gpu)
        if rest:
            raise MpsError(f"{gpu}: {rest}")

    async def _roll_back(self, assignment: Assignment) -> None:
        try:
            await self.clean_up(assignment)
        except StepFailedError as error:
            raise StepFailedError(f"it failed, and could not be taken back: {error}") from error


def _devices(assignment: Assignment) -> tuple[DeviceShare, ...]:
    return assignment.place.devices


def _slices(assignment: Assignment) -> list[DeviceShare]:
    return [share for share in _devices(assignment) if not share.whole]


def _reason(error: Exception) -> str:
    return str(error) or f"it took longer than {STEP_DEADLINE_S:g} s"
