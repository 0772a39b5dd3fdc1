"""``MpsControl`` for real: one control daemon a GPU, through the privileged helper.

On a GPU it goes: no foreign daemon, the found compute mode written down, the mode
exclusive, the daemon started, defaults set and read back, a server started, a probe.
And back the same way, checked at the end. The default of a daemon is its largest slice,
so that the environment of a lease can only tighten what its server enforces.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from gpupool.model.assignment import AssignmentKey
from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool_agent.devices.interfaces import (
    MpsError,
    MpsStatus,
    ProcessFacts,
    ProcessTable,
    SliceLimits,
)
from gpupool_agent.devices.mps_daemons.control import (
    ACTIVE,
    COMMAND_DEADLINE_S,
    UNKNOWN,
    Control,
    ceiling_of,
    seen_by_probe,
    within,
)
from gpupool_agent.devices.mps_daemons.foreign import MpsScan, foreign_on, runs
from gpupool_agent.devices.mps_daemons.leftovers import Leftovers
from gpupool_agent.devices.mps_daemons.modes import ComputeModes, FoundModes, ModeLeftError
from gpupool_agent.devices.mps_daemons.records import (
    Records,
    SliceName,
    Slot,
    SlotRecord,
    slot_name,
)
from gpupool_agent.devices.mps_daemons.release import Release
from gpupool_agent.devices.mps_daemons.troubles import Tell, Troubles
from gpupool_agent.devices.privileged import (
    DaemonFacts,
    MpsSlot,
    Privileged,
    ProbeRequest,
)

T = TypeVar("T")

ACTION_DEADLINE_S = 20.0
PROBE_DEADLINE_S = 10.0


class MpsDaemons:
    """``MpsControl`` over the helper.

    ``records_dir`` is where the agent keeps what its restart must find. ``exclusive``
    False leaves the compute mode as it is found: then a client that bypasses MPS is
    only detected.
    """

    def __init__(
        self,
        *,
        privileged: Privileged,
        modes: ComputeModes,
        processes: ProcessTable,
        records_dir: Path,
        boot_id: str,
        exclusive: bool = True,
        proc: Path = Path("/proc"),
    ) -> None:
        self._privileged = privileged
        self._modes = FoundModes(privileged, modes, exclusive=exclusive)
        self._processes = processes
        self._records = Records(records_dir, boot_id)
        self._boot_id = boot_id
        self._proc = proc
        self._scan = MpsScan(proc)
        self._locks: defaultdict[DeviceUuid, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._slots = {record.gpu: Slot(record, limited=True) for record in self._records.load()}
        self._gpus: Callable[[], Sequence[DeviceUuid]] = tuple
        self._leftovers = Leftovers(privileged)
        self._starting: set[asyncio.Task[DaemonFacts]] = set()
        self._pipes_left: dict[DeviceUuid, str] = {}
        self._troubles = Troubles()
        self._log = structlog.get_logger()

    # -- what steps ask for --------------------------------------------------

    async def start(self, gpu: DeviceUuid, uid: int) -> None:
        """Have a daemon for this user on the GPU; adopts the one that a former agent left."""
        async with self._locks[gpu]:
            slot = self._slots.get(gpu)
            if slot is not None and slot.record.uid != uid:
                if slot.record.slices:
                    raise MpsError(f"{gpu}: its MPS serves uid {slot.record.uid}, not {uid}")
                await self._close(slot)
                slot = None
            if slot is not None and self._lives(slot):
                return
            foreign = await self.foreign(whole=True)
            self._troubles.found_foreign(foreign)
            if gpu in foreign:
                raise MpsError(f"{gpu}: {foreign[gpu]}")
            if slot is None:
                mode = await self._modes.found(gpu)
                slot = Slot(SlotRecord(gpu=gpu, uid=uid, boot_id=self._boot_id, found_mode=mode))
            try:
                await self._open(slot)
            except MpsError as error:
                self._troubles.start_failed(gpu, str(error))
                if not slot.record.slices:
                    await self._close(slot)
                raise

    async def set_limits(self, gpu: DeviceUuid, limits: SliceLimits) -> dict[str, str]:
        """Admit a slice: the server's ceiling covers it, its environment confines it."""
        async with self._locks[gpu]:
            slot = self._need(gpu)
            before = slot.record
            known = before.slices.get((limits.key, limits.token))
            if known is not None and not limits.sm_count:
                # The devices are not read yet, right after a restart.
                limits = replace(limits, sm_count=known.sm_count)
            if known == limits and before.settled and not self._gone(slot):
                # As a former agent has left it: its clients may be at work.
                return before.environment(limits)
            before.check_room(limits)
            self._keep(slot, before.with_slice(limits))
            try:
                await self._apply(slot)
            except MpsError:
                self._keep(slot, replace(before, settled=False))
                raise
            return slot.record.environment(limits)

    async def probe(self, gpu: DeviceUuid, limits: SliceLimits) -> int:
        """Run a client as the slice's user; gives the multiprocessors that it saw."""
        async with self._locks[gpu]:
            return await self._probe(self._need(gpu), limits)

    async def status(self, gpu: DeviceUuid) -> MpsStatus:
        """What runs there now."""
        slot = self._slots.get(gpu)
        if slot is None:
            return MpsStatus(uid=None, healthy=True)
        reason = self._troubles.of(gpu)
        return MpsStatus(
            uid=slot.record.uid,
            healthy=not reason,
            slices=tuple(slot.record.slices.values()),
            reason=reason,
        )

    async def remove_limits(self, gpu: DeviceUuid, key: AssignmentKey, token: int) -> None:
        """End the clients of a slice and take it away."""
        async with self._locks[gpu]:
            slot = self._slots.get(gpu)
            if slot is None or (key, token) not in slot.record.slices:
                return
            left = slot.record.without_slice((key, token))
            if self._lives(slot):
                await self._end_clients(slot, key.lease_id if left.slices else None)
            self._keep(slot, left)
            if left.slices and self._lives(slot):
                await self._apply(slot)

    async def stop(self, gpu: DeviceUuid) -> None:
        """End the daemon and restore the GPU's mode; refuses while slices are left."""
        async with self._locks[gpu]:
            slot = self._slots.get(gpu)
            if slot is None:
                return
            if slot.record.slices:
                raise MpsError(f"{gpu}: {len(slot.record.slices)} slices are left")
            try:
                await self._close(slot)
            except MpsError as error:
                self._troubles.report(gpu, f"quarantined: {error}")
                if isinstance(error, ModeLeftError):
                    return  # Nothing of the slice is left; the watch goes on with the GPU.
                raise
            self._troubles.report(gpu, "")

    async def sweep(self, gpu: DeviceUuid, kept: Collection[SliceName]) -> None:
        """End what a former agent has left, and none of ``kept`` needs; see ``MpsControl``."""
        async with self._locks[gpu]:
            slot = self._slots.get(gpu) or await self._take_over(gpu)
            if slot is None:
                return
            for name in set(slot.record.slices) - set(kept):
                self._log.warning("mps.slice_swept", gpu=gpu, lease_id=name[0].lease_id)
                self._keep(slot, slot.record.without_slice(name))
            if kept:
                return
            clients = await self._clients(slot)
            if clients:
                raise MpsError(f"{gpu}: {len(clients)} clients of nobody are on its MPS daemon")
            self._log.warning("mps.daemon_swept", gpu=gpu)
            await self._close(slot)

    async def _clients(self, slot: Slot) -> list[int]:
        if not self._lives(slot):
            return []
        control = self._control(slot)
        return [pid for server in await control.servers() for pid in await control.clients(server)]

    async def _take_over(self, gpu: DeviceUuid) -> Slot | None:
        """Have a record of the daemon that is left; its GPU's mode was the usual one before."""
        daemon = await self._leftovers.take(gpu)
        if daemon is None:
            return None
        found = SlotRecord(
            gpu=gpu, uid=daemon.uid, boot_id=self._boot_id, found_mode=self._modes.usual
        )
        slot = Slot(replace(found, daemon=daemon), limited=True)
        self._keep(slot, slot.record)
        self._slots[gpu] = slot
        self._log.warning("mps.taken_over", gpu=gpu, pid=daemon.pid, uid=daemon.uid)
        for server in await self._control(slot).servers():
            ticks = self._processes.start_ticks(server)
            if ticks is not None:
                facts = DaemonFacts(pid=server, start_ticks=ticks)
                self._keep(slot, replace(slot.record, server=facts))
        return slot

    async def verify(self, gpu: DeviceUuid) -> str:
        """Empty when no daemon, directory or record of ours is left."""
        name = slot_name(gpu)
        if gpu in self._slots and gpu not in self.mode_left():
            return "its MPS daemon is not forgotten"
        daemon = await within(
            self._privileged.mps_daemon(name), COMMAND_DEADLINE_S, "no answer to mps_daemon"
        )
        if daemon is not None:
            return f"its MPS daemon {daemon.pid} still runs"
        pipe = self._pipes_left.get(gpu, "")
        if pipe and _is_directory(pipe):
            return f"its directory {pipe} is there"
        self._pipes_left.pop(gpu, None)
        return ""

    async def watch(
        self,
        gpus: Callable[[], Sequence[DeviceUuid]],
        tell: Tell,
    ) -> None:
        """Look after the daemons until cancelled."""
        from gpupool_agent.devices.mps_daemons.watching import Watch

        self._gpus = gpus
        self._troubles.tell_to(tell)
        await Watch(self).run()

    def is_own(self, process: ProcessFacts) -> bool:
        """Whether a process is a daemon or a server of ours."""
        own = self._own_pids()
        return process.pid in own or any(pid in own for pid in process.ancestors[:1])

    # -- what the watch asks for ---------------------------------------------

    @property
    def troubles(self) -> Troubles:
        """What is wrong, by GPU."""
        return self._troubles

    def sliced(self) -> list[DeviceUuid]:
        """GPUs with slices on them."""
        return [gpu for gpu, slot in self._slots.items() if slot.record.slices]

    def mode_left(self) -> list[DeviceUuid]:
        """GPUs without slice or daemon whose mode is not as it was found."""
        records = (slot.record for slot in self._slots.values())
        return [each.gpu for each in records if not each.slices and each.daemon is None]

    async def restore_mode(self, gpu: DeviceUuid) -> None:
        """Try again to leave a GPU as it was found; raises MpsError. Its lock is held."""
        if gpu in self.mode_left():
            await self._close(self._slots[gpu])

    async def foreign(self, *, whole: bool) -> dict[DeviceUuid, str]:
        """GPUs that a daemon of somebody else may manage; ``whole`` as of ``MpsScan``.

        One of ours may not be known by its process: because no record has it, so the helper
        is asked first, or because it is just being started, so where something is found
        the starts that are under way are waited for.
        """
        known = {gpu for gpu, slot in self._slots.items() if slot.record.daemon is not None}
        await self._leftovers.look({*self._gpus(), *self._slots}, known)
        while (found := self._unknown(whole=whole)) and self._starting:
            await asyncio.wait(self._starting)
        return found

    def _unknown(self, *, whole: bool) -> dict[DeviceUuid, str]:
        pipes = {slot.record.pipe for slot in self._slots.values()} - {""}
        gpus = self._gpus() or tuple(self._slots)
        return foreign_on(
            gpus,
            self._scan.look(whole=whole),
            own_pids=self._own_pids(),
            own_pipes=pipes,
        )

    def lock(self, gpu: DeviceUuid) -> asyncio.Lock:
        """One thing at a time on a GPU."""
        return self._locks[gpu]

    async def examine(self, gpu: DeviceUuid, *, ask: bool) -> str:
        """What is wrong with the daemon of a GPU; ``ask``: not only whether it runs."""
        slot = self._slots.get(gpu)
        if slot is None or not slot.record.slices:
            return ""
        gone, server = self._gone(slot), slot.record.server
        if gone or not ask or server is None:
            return gone
        try:
            state = await self._control(slot).status(server.pid)
        except MpsError as error:
            return self._gone(slot) or str(error)
        if state in (ACTIVE, UNKNOWN):
            return ""
        return self._gone(slot) or f"its MPS server is in state {state}"

    async def repair(self, gpu: DeviceUuid) -> None:
        """Have a working daemon and server again, and show it with a probe."""
        slot = self._slots.get(gpu)
        if slot is None or not slot.record.slices:
            return
        release = self._release(slot)
        if slot.record.daemon is None or not self._runs(slot.record.daemon):
            if slot.record.server is not None:
                await release.kill_server(slot.record.server.pid, slot.record.server.start_ticks)
            await self._open(slot)
        elif slot.record.server is not None and self._runs(slot.record.server):
            await self._end_servers(slot, release)
        await self._apply(slot)
        await self._probe(slot, next(iter(slot.record.slices.values())))

    def _gone(self, slot: Slot) -> str:
        daemon, server = slot.record.daemon, slot.record.server
        if daemon is None or not self._runs(daemon):
            return "its MPS daemon is gone"
        if server is None or not self._runs(server):
            return "its MPS server is gone"
        return ""

    # -- inside --------------------------------------------------------------

    async def _end_clients(self, slot: Slot, lease_id: LeaseId | None) -> None:
        try:
            await self._release(slot).end_clients(lease_id)
        except MpsError as error:
            # With the last slice the daemon goes too, by force if need be.
            if lease_id is not None:
                raise
            self._log.warning("mps.release", gpu=slot.record.gpu, failed=str(error))

    async def _end_servers(self, slot: Slot, release: Release) -> None:
        """Clients first: a server in FAULT recovers, or can be ended, without them."""
        try:
            await release.end_clients(None)
            for server in await self._control(slot).servers():
                await self._control(slot).shut_down(server, force=True)
        except MpsError as error:
            self._log.warning("mps.repair", gpu=slot.record.gpu, failed=str(error))
            await release.end_daemon()
            await self._open(slot)
        if slot.record.server is not None:
            await release.kill_server(slot.record.server.pid, slot.record.server.start_ticks)

    async def _open(self, slot: Slot) -> None:
        """Have mode and daemon; the record is written before anything is changed."""
        record = replace(slot.record, daemon=None, server=None, settled=False)
        self._keep(slot, record)
        slot.limited = False
        self._slots[record.gpu] = slot
        await self._modes.take(record.gpu)
        # What a former daemon has left must not be taken for this one's.
        await self._do(self._privileged.stop_mps(record.name), "stop_mps")
        # A task, so that others can wait for it too.
        starting = asyncio.create_task(self._start_daemon(slot))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        daemon = await starting
        self._leftovers.settled(record.gpu)
        self._log.info("mps.started", gpu=record.gpu, pid=daemon.pid, uid=record.uid)

    async def _start_daemon(self, slot: Slot) -> DaemonFacts:
        record = slot.record
        wanted = MpsSlot(name=record.name, gpu=record.gpu, uid=record.uid)
        daemon = await self._do(self._privileged.start_mps(wanted), "start_mps")
        self._keep(slot, replace(record, daemon=daemon))
        return daemon

    async def _apply(self, slot: Slot) -> None:
        """Set the ceiling for future servers and new clients; have a server."""
        control = self._control(slot)
        ceiling = ceiling_of(slot.record.slices.values(), limited_before=slot.limited)
        # Told before it is set: a limit that was set, ever, cannot be taken away again.
        slot.limited |= ceiling.memory_mib is not None
        server = slot.record.server
        if server is not None and self._runs(server):
            await control.set_limits(ceiling, server.pid)
            self._keep(slot, replace(slot.record, settled=True))
            return
        facts = await control.have_server(ceiling, slot.record.uid, self._processes.start_ticks)
        self._keep(slot, replace(slot.record, server=facts, settled=True))

    async def _probe(self, slot: Slot, limits: SliceLimits) -> int:
        gpu = slot.record.gpu
        request = ProbeRequest(
            slot=slot.record.name,
            uid=limits.uid,
            environment={
                "CUDA_VISIBLE_DEVICES": gpu,
                "GPUPOOL_LEASE_ID": limits.key.lease_id,
                **slot.record.environment(limits),
            },
            deadline_s=PROBE_DEADLINE_S,
        )
        outcome = await within(
            self._privileged.probe(request), PROBE_DEADLINE_S, f"{gpu}: the probe did not end"
        )
        return seen_by_probe(gpu, outcome, limits)

    async def _close(self, slot: Slot) -> None:
        """End the daemon, restore the mode, forget it; raises MpsError, and keeps it then."""
        record = slot.record
        release = self._release(slot)
        self._pipes_left[record.gpu] = record.pipe or self._pipes_left.get(record.gpu, "")
        await release.end_daemon()
        if record.server is not None:
            await release.kill_server(record.server.pid, record.server.start_ticks)
        self._keep(slot, replace(record, daemon=None, server=None, settled=False))
        # A GPU that is off the bus has no mode to restore: then all else has ended all the same.
        await self._modes.restore(record.gpu, record.found_mode)
        self._records.remove(record)
        self._slots.pop(record.gpu, None)
        self._log.info("mps.stopped", gpu=record.gpu)

    async def _do(self, work: Coroutine[Any, Any, T], what: str) -> T:
        return await within(work, ACTION_DEADLINE_S, f"{what}: no answer")

    def _lives(self, slot: Slot) -> bool:
        """Whether the daemon runs that the record names: same process, with its directory."""
        known = slot.record.daemon
        return known is not None and self._runs(known) and _is_directory(known.pipe_directory)

    def _keep(self, slot: Slot, record: SlotRecord) -> None:
        try:
            self._records.save(record)
        except OSError as error:
            raise MpsError(f"{record.gpu}: its record cannot be written: {error}") from error
        slot.record = record

    def _need(self, gpu: DeviceUuid) -> Slot:
        slot = self._slots.get(gpu)
        if slot is None or slot.record.daemon is None:
            raise MpsError(f"{gpu}: no MPS daemon runs")
        return slot

    def _control(self, slot: Slot) -> Control:
        return Control(self._privileged, slot.record.name, slot.record.gpu)

    def _release(self, slot: Slot) -> Release:
        return Release(
            privileged=self._privileged,
            processes=self._processes,
            control=self._control(slot),
            slot=slot.record.name,
            gpu=slot.record.gpu,
            proc=self._proc,
        )

    def _runs(self, process: DaemonFacts) -> bool:
        return runs(self._proc, process.pid, process.start_ticks)

    def _own_pids(self) -> set[int]:
        records = [slot.record for slot in self._slots.values()]
        known = [each for record in records for each in (record.daemon, record.server)]
        return self._leftovers.pids() | {each.pid for each in known if each is not None}


def _is_directory(path: str) -> bool:
    """A look into memory: directories of daemons lie in /run."""
    return Path(path).is_dir()
