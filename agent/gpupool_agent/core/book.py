"""The assignments of a node: what shall run against what is.

An assignment waits until its devices are free of every other one and of strays, is
prepared, runs, and ends in three steps: what preparing did is taken back, then a
reading of the devices that began later must show nothing of it, then it is ENDED
and buried. A device that the driver has lost can run nothing, so it confirms an
end; a driver that is silent confirms nothing.
"""

from collections.abc import Iterator

from gpupool.model.assignment import (
    Assignment,
    AssignmentKey,
    AssignmentState,
    DesiredState,
)
from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool.model.inventory import StrayCause
from gpupool.model.lease import DeviceShare, ShareGiven
from gpupool_agent.core.assignments import AssignmentName, Kept, Step
from gpupool_agent.core.devices import Devices
from gpupool_agent.core.events import CheckpointEntry, CleanUp, Log, NodeEffect, Prepare, ReadUsage
from gpupool_agent.core.fence import Fence
from gpupool_agent.core.membership import (
    Bonds,
    Stray,
    describe,
    outside,
    owner,
    past_limits,
    share_of,
)
from gpupool_agent.core.readings import DeviceProcess

PREPARE_WAIT_S = 30.0
"""An assignment whose devices are not free within this is reported as failed."""

ENDED_KEPT_MAX = 256
"""Ends that are told again at the next connection."""


class Book:
    """Every assignment on this node, by key and token."""

    def __init__(self, fence: Fence, devices: Devices) -> None:
        self.kept: dict[AssignmentName, Kept] = {}
        self.changed = False
        self._fence = fence
        self._devices = devices
        self._before_reboot: dict[AssignmentKey, int] = {}
        # By device; None once anything in ``kept`` that it depends on has changed.
        self._index: dict[DeviceUuid, list[Kept]] | None = None

    # -- over a restart ------------------------------------------------------

    def adopt(self, entries: tuple[CheckpointEntry, ...], now: float) -> None:
        """Take over what ran when the agent stopped, in the same boot."""
        for entry in entries:
            kept = Kept(
                assignment=entry.assignment,
                state=entry.state,
                wait_until_s=now + PREPARE_WAIT_S,
                environment=entry.environment,
                reason=entry.reason,
                cause=entry.reason if entry.state is AssignmentState.ENDING else "",
                given=entry.given,
                touched=entry.touched,
                adopted=entry.state is AssignmentState.PREPARED,
                check_s=now,
            )
            self.kept[kept.name] = kept
        self._index = None

    def forget_over_reboot(self, entries: tuple[CheckpointEntry, ...]) -> None:
        """Nothing of it runs; what is still wanted may be prepared with its old token."""
        for entry in entries:
            if entry.state is AssignmentState.ENDING:
                self._fence.bury(entry.assignment.key, entry.assignment.token)
            else:
                self._before_reboot[entry.assignment.key] = entry.assignment.token

    # -- desired state -------------------------------------------------------

    def apply(self, desired: DesiredState, now: float) -> list[NodeEffect]:
        """Take over a desired state that the fence has let through."""
        self._index = None
        effects: list[NodeEffect] = []
        wanted: dict[AssignmentKey, Assignment] = {}
        # By token: two assignments that come in one message raise a device's floor in
        # the order in which they were granted.
        for each in sorted(desired.assignments, key=lambda each: (each.token, each.key)):
            wanted[each.key] = each
        unclaimed = set(desired.unclaimed)
        for kept in list(self.kept.values()):
            named = wanted.get(kept.assignment.key)
            if named is not None and named.token == kept.assignment.token:
                continue
            if named is None and kept.assignment.key in unclaimed:
                continue
            if _ended(kept):
                del self.kept[kept.name]
            elif named is None or named.token > kept.assignment.token:
                self.end(kept, now, "no longer wanted")
        for assignment in wanted.values():
            refusal = self._want(assignment, now)
            if refusal:
                effects.append(_log("assignment.refused", assignment, refusal))
        for key, token in self._before_reboot.items():
            if key not in wanted and key not in unclaimed:
                self._fence.bury(key, token)
                self.changed = True
        self._before_reboot.clear()
        return effects

    def end(self, kept: Kept, now: float, reason: str) -> None:
        """Begin to end an assignment."""
        self._index = None
        kept.end(now, reason)
        if _ended(kept):
            self._fence.bury(kept.assignment.key, kept.assignment.token)
        self.changed = True

    def _want(self, assignment: Assignment, now: float) -> str:
        """Take an assignment on, or report it as ended or failed; then why."""
        known = self.kept.get((assignment.key, assignment.token))
        if known is not None:
            return self._refresh(known, assignment)
        kept = Kept(
            assignment=assignment,
            state=AssignmentState.PREPARING,
            wait_until_s=now + PREPARE_WAIT_S,
        )
        self.kept[kept.name] = kept
        if self._fence.has_ended(assignment):
            kept.state = AssignmentState.ENDED
            kept.reason = "it has ended here"
            return kept.reason
        kept.reason = self._refuse_token(assignment)
        if kept.reason:
            kept.state = AssignmentState.FAILED
            return kept.reason
        self._fence.accept(assignment)
        self.changed = True
        return ""

    def _refuse_token(self, assignment: Assignment) -> str:
        for key, token in self.kept:
            if key == assignment.key and token > assignment.token:
                return f"token {assignment.token} is lower than {token} of the same member"
        if self._before_reboot.get(assignment.key) == assignment.token:
            return ""
        return self._fence.refuse_token(assignment)

    def _refresh(self, known: Kept, assignment: Assignment) -> str:
        """The same assignment once more: only its time without an allocator may differ."""
        if _ended(known):
            # Told again: the allocator seems not to have heard it.
            known.reason = "it has ended here"
            return known.reason
        if known.assignment.place != assignment.place or known.assignment.uid != assignment.uid:
            return "another place or user under the same token"
        if known.assignment.disconnect_s != assignment.disconnect_s:
            known.assignment = assignment
            self.changed = True
        return ""

    # -- answers of steps ----------------------------------------------------

    def step_done(
        self,
        name: AssignmentName,
        environment: dict[str, str],
        now: float,
        given: tuple[ShareGiven, ...] = (),
    ) -> None:
        """A Prepare or CleanUp succeeded; ``environment`` is the whole one."""
        kept = self.kept.get(name)
        if kept is None or kept.step is None:
            return
        done, kept.step = kept.step, None
        if kept.state is AssignmentState.PREPARING:
            kept.state = AssignmentState.PREPARED
            kept.environment = environment
            kept.given = given
            kept.reason = ""
            self.changed = True
        elif kept.state is AssignmentState.ENDING:
            kept.check_s = now
            if done is Step.CLEAN_UP:
                kept.cleaned_s = now

    def step_failed(self, name: AssignmentName, reason: str, now: float) -> None:
        """A Prepare failed for good, or a CleanUp is to be tried again."""
        kept = self.kept.get(name)
        if kept is None or kept.step is None:
            return
        failed, kept.step = kept.step, None
        if kept.state is AssignmentState.ENDING:
            if failed is Step.CLEAN_UP:
                kept.reason = reason
                kept.check_later(now)
            return
        self._fail(kept, reason)

    def _fail(self, kept: Kept, reason: str) -> None:
        self._index = None
        kept.state = AssignmentState.FAILED
        kept.environment = {}
        kept.given = ()
        kept.reason = reason
        self.changed = True

    # -- settling ------------------------------------------------------------

    def settle(self, now: float, bonds: Bonds) -> list[NodeEffect]:
        """Take every step that can be taken now: ends first, they make room."""
        effects: list[NodeEffect] = []
        for kept in list(self.kept.values()):
            if kept.step is None and kept.state is AssignmentState.ENDING:
                effects += self._settle_ending(kept, now, bonds)
        for kept in sorted(self.kept.values(), key=lambda each: each.assignment.token):
            if kept.step is not None:
                continue
            if kept.adopted and kept.state is AssignmentState.PREPARED:
                kept.adopted = False
                kept.step = Step.PREPARE
                effects.append(Prepare(assignment=kept.assignment, adopted=True))
            elif kept.state is AssignmentState.PREPARING:
                effects += self._settle_preparing(kept, now, bonds)
        ends = [name for name, kept in self.kept.items() if _ended(kept)]
        for name in ends[: max(0, len(ends) - ENDED_KEPT_MAX)]:
            del self.kept[name]
        return effects

    def _settle_preparing(self, kept: Kept, now: float, bonds: Bonds) -> list[NodeEffect]:
        lost, waits_for = self._obstacle(kept, bonds)
        if lost or (waits_for and now >= kept.wait_until_s):
            self._fail(kept, lost or waits_for)
            return []
        kept.reason = waits_for
        if waits_for:
            return []
        # Durable before it is done: after a crash half-done work is found and ended.
        self.changed |= not kept.touched
        kept.touched = True
        self._index = None
        kept.step = Step.PREPARE
        return [Prepare(assignment=kept.assignment)]

    def _obstacle(self, kept: Kept, bonds: Bonds) -> tuple[str, str]:
        """What forbids to prepare: for good, and for now."""
        for share in kept.assignment.place.devices:
            uuid = share.device_uuid
            if uuid in self._devices.known and self._devices.failure(uuid):
                return f"{uuid}: {self._devices.failure(uuid)}", ""
            unreadable = self._devices.unreadable(uuid)
            if unreadable:
                return "", f"{uuid}: {self._devices.failure(uuid) or unreadable}"
            others = [other for other in self.on_device(uuid) if other is not kept]
            for other in others:
                if share.whole or _share(other, uuid).whole:
                    return "", f"{uuid}: lease {other.assignment.key.lease_id} is still on it"
            taken = sum(_share(other, uuid).share_pct for other in others)
            if taken + share.share_pct > 100:
                return "", f"{uuid}: {taken} % of it are still taken"
            trouble = self._devices.mps_troubles.get(uuid)
            if trouble:
                return "", f"{uuid}: {trouble}"
            strays = self.strays(uuid, bonds)
            strangers = [each for each in strays if not self._went_on(each.process, kept, bonds)]
            if strangers:
                return "", f"{uuid}: {strangers[0]}"
            if share.whole and not strays and self._devices.memory_held(uuid):
                return "", f"{uuid}: {self._devices.memory_held(uuid)}"
        return "", ""

    @staticmethod
    def _went_on(process: DeviceProcess, kept: Kept, bonds: Bonds) -> bool:
        """Whether a stray is the lease's own work, which went on while its node forgot it."""
        if process.lease_id is None:
            return False
        return owner(process, {kept.assignment.key.lease_id: kept}, bonds)[0] is kept

    def _settle_ending(self, kept: Kept, now: float, bonds: Bonds) -> list[NodeEffect]:
        if kept.cleaned_s is None:
            if now < kept.check_s:
                return []
            kept.step = Step.CLEAN_UP
            return [CleanUp(assignment=kept.assignment)]
        rest = self._rest(kept, bonds)
        if rest != "":
            kept.reason = rest or kept.reason
            if now < kept.check_s:
                return []
            kept.check_later(now)
            return [ReadUsage()]
        kept.state = AssignmentState.ENDED
        kept.reason = kept.cause
        self._index = None
        self._fence.bury(kept.assignment.key, kept.assignment.token)
        self.changed = True
        return []

    def _rest(self, kept: Kept, bonds: Bonds) -> str | None:
        """What is left of an ending assignment; None: not known yet, empty: nothing."""
        assert kept.cleaned_s is not None
        for share in kept.assignment.place.devices:
            uuid = share.device_uuid
            if self._devices.is_lost(uuid):
                continue
            if self._devices.silent:
                return f"{uuid}: {self._devices.silent}"
            if not self._devices.read_since(uuid, kept.cleaned_s):
                return None
            if self._devices.unreadable(uuid):
                return f"{uuid}: {self._devices.unreadable(uuid)}"
            mine = self.processes_of(kept, uuid, bonds)
            if mine:
                return f"{uuid}: {describe(mine[0])} is still on it"
            if share.whole and not self._devices.processes(uuid):
                held = self._devices.memory_held(uuid)
                if held:
                    return f"{uuid}: {held}"
        return ""

    # -- who is where --------------------------------------------------------

    def on_device(self, uuid: DeviceUuid) -> list[Kept]:
        """Assignments that may have something on a device, those with a holder first."""
        if self._index is None:
            self._index = {}
            order = sorted(
                (kept for kept in self.kept.values() if kept.occupies),
                key=lambda kept: (not kept.active, kept.assignment.token),
            )
            for kept in order:
                for share in kept.assignment.place.devices:
                    self._index.setdefault(share.device_uuid, []).append(kept)
        return self._index.get(uuid, [])

    def processes_of(self, kept: Kept, uuid: DeviceUuid, bonds: Bonds) -> list[DeviceProcess]:
        """Processes of an assignment on one of its devices."""
        return [process for process, _ in self.members(kept, uuid, bonds)]

    def members(
        self, kept: Kept, uuid: DeviceUuid, bonds: Bonds
    ) -> list[tuple[DeviceProcess, bool]]:
        """The same, each with whether it is its for sure."""
        return [
            (process, sure) for process, whose, sure in self._owned(uuid, bonds) if whose is kept
        ]

    def owner_of(
        self, process: DeviceProcess, uuid: DeviceUuid, bonds: Bonds
    ) -> tuple[Kept | None, bool]:
        """Whose a process on a device is, None: nobody's, and whether that is sure."""
        return owner(process, self._leases_on(uuid), bonds)

    def strays(self, uuid: DeviceUuid, bonds: Bonds) -> list[Stray]:
        """Processes on a device that should not be there, in the driver's order."""
        found: dict[int, Stray] = {}
        members: dict[LeaseId, list[DeviceProcess]] = {}
        here = self.on_device(uuid)
        for process, kept, sure in self._owned(uuid, bonds):
            if kept is None:
                found[process.pid] = outside(
                    process,
                    bonds,
                    here=here,
                    everywhere=self.kept.values(),
                    uuid=uuid,
                    has_ended=self._fence.knows_end_of,
                )
            elif kept.cleaned_s is not None and self._devices.read_since(uuid, kept.cleaned_s):
                lease_id = kept.assignment.key.lease_id
                found[process.pid] = Stray(
                    process=process, cause=StrayCause.OUTLIVED, lease_id=lease_id, certain=sure
                )
            elif sure and kept.state is AssignmentState.PREPARED:
                members.setdefault(kept.assignment.key.lease_id, []).append(process)
        for lease_id, mine in members.items():
            of_lease = [kept for kept in here if kept.assignment.key.lease_id == lease_id]
            for stray in past_limits(of_lease, uuid, mine):
                found[stray.process.pid] = stray
        order = self._devices.processes(uuid) if found else ()
        return [found[process.pid] for process in order if process.pid in found]

    def _owned(
        self, uuid: DeviceUuid, bonds: Bonds
    ) -> Iterator[tuple[DeviceProcess, Kept | None, bool]]:
        """Each process on a device with whose it is, None: nobody's, and how sure that is."""
        processes = self._devices.processes(uuid)
        by_lease = self._leases_on(uuid) if processes else {}
        for process in processes:
            yield process, *owner(process, by_lease, bonds)

    def _leases_on(self, uuid: DeviceUuid) -> dict[LeaseId, Kept]:
        """The first of each lease on a device, those with a holder first."""
        found: dict[LeaseId, Kept] = {}
        for kept in self.on_device(uuid):
            found.setdefault(kept.assignment.key.lease_id, kept)
        return found

    def slices_on(self, uuid: DeviceUuid) -> frozenset[AssignmentName]:
        """Assignments that have, or will have, a slice of a device or the rest of one."""
        return frozenset(
            kept.name
            for kept in self.kept.values()
            if not _ended(kept) and kept.state is not AssignmentState.FAILED
            for share in kept.assignment.place.devices
            if share.device_uuid == uuid and not share.whole
        )

    def in_use(self) -> frozenset[DeviceUuid]:
        """Devices that an assignment has something of."""
        return frozenset(
            share.device_uuid
            for kept in self.kept.values()
            if not _ended(kept)
            for share in kept.assignment.place.devices
        )

    def deadlines(self) -> Iterator[float]:
        """When something of the book wants to be settled again."""
        for kept in self.kept.values():
            if kept.step is not None:
                continue
            if kept.state is AssignmentState.PREPARING:
                yield kept.wait_until_s
            elif kept.state is AssignmentState.ENDING:
                yield kept.check_s

    def entries(self) -> tuple[CheckpointEntry, ...]:
        """What a restart must find again."""
        return tuple(
            CheckpointEntry(
                assignment=kept.assignment,
                state=kept.state,
                environment=kept.environment,
                reason=kept.cause or kept.reason,
                touched=kept.touched,
                given=kept.given,
            )
            for kept in self.kept.values()
            if not _ended(kept)
        )

    def check(self) -> None:
        """Assert what must hold: no overlap on a device, and the fence above all tokens."""
        for kept in self.kept.values():
            buried = self._fence.has_ended(kept.assignment)
            if kept.active:
                assert not buried, f"{kept.name} has ended and is active"
            if _ended(kept):
                assert buried, f"{kept.name} has ended without a tombstone"
            assert (kept.state is AssignmentState.PREPARED) or not kept.environment
        for uuid in self.in_use():
            here = self.on_device(uuid)
            assert {kept.name for kept in here} == {
                kept.name
                for kept in self.kept.values()
                if kept.occupies
                and uuid in {share.device_uuid for share in kept.assignment.place.devices}
            }, f"the index of {uuid} is out of date"
            shares = [_share(kept, uuid) for kept in here]
            assert sum(share.share_pct for share in shares) <= 100, f"{uuid} is over-committed"
            assert len(shares) == 1 or not any(share.whole for share in shares), uuid
            floor = self._fence.floor_of(uuid)
            assert all(kept.assignment.token <= floor for kept in here if kept.active), uuid


def _ended(kept: Kept) -> bool:
    return kept.state is AssignmentState.ENDED


def _share(kept: Kept, uuid: DeviceUuid) -> DeviceShare:
    found = share_of(kept, uuid)
    assert found is not None
    return found


def _log(event: str, assignment: Assignment, reason: str) -> Log:
    return Log(
        event=event,
        details={
            "lease_id": assignment.key.lease_id,
            "rank": str(assignment.key.rank),
            "token": str(assignment.token),
            "reason": reason,
        },
    )
