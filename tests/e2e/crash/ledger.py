"""The clients' own book: what was asked, and what they were told."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpupool.model.ids import LeaseId, RequestId
from gpupool.model.lease import ENDED, Lease, LeaseState
from gpupool.model.request import (
    GpuSlice,
    Group,
    LeaseSpec,
    Level,
    TopologyConstraint,
    WholeGpus,
)

_STEPS = {LeaseState.PENDING: 0, LeaseState.GRANTED: 1, LeaseState.ACTIVE: 2}
_ENDING = 3


@dataclass(slots=True)
class Entry:
    """One request. ``told``: the newest state that a client has read of it.

    ``lease_id`` is what the store was seen to have for it, also where no client was told.
    """

    request_id: RequestId
    spec: LeaseSpec
    told: Lease | None = None
    lease_id: LeaseId | None = None
    refused: bool = False
    release_asked: bool = False
    release_told: bool = False

    @property
    def settled(self) -> bool:
        """The clients know how it went."""
        if self.release_asked:
            return self.release_told
        return self.refused or (self.told is not None and self.told.state is LeaseState.ACTIVE)


@dataclass
class Ledger:
    """Requests that are not yet over, by request id; ``wrong`` collects false answers."""

    chance: random.Random
    entries: dict[RequestId, Entry] = field(default_factory=dict[RequestId, Entry])
    held: dict[RequestId, Entry] = field(default_factory=dict[RequestId, Entry])
    over: set[RequestId] = field(default_factory=set[RequestId])
    wrong: list[str] = field(default_factory=list[str])

    def ask(self) -> Entry:
        """A request that was never made before."""
        request_id = RequestId(f"r-{len(self.entries) + len(self.over)}")
        entry = Entry(request_id, _any_spec(self.chance))
        self.entries[request_id] = entry
        return entry

    def hear(self, entry: Entry, lease: Lease) -> None:
        """A client read this state."""
        known = entry.told.lease_id if entry.told is not None else entry.lease_id
        if known is not None and known != lease.lease_id:
            self.wrong.append(f"{entry.request_id} is {lease.lease_id}, it was {known}")
        entry.told = lease
        entry.lease_id = lease.lease_id
        if lease.state is LeaseState.ACTIVE:
            self.held[entry.request_id] = entry
        elif lease.state in ENDED and not entry.release_asked:
            self.wrong.append(f"{entry.request_id} was told {lease.state}, nobody ended it")

    def give_up(self) -> Entry:
        """A held lease that its client releases now."""
        entry = self.held.pop(self.chance.choice(list(self.held)))
        entry.release_asked = True
        return entry

    def unsettled(self) -> list[Entry]:
        """Requests whose outcome no client knows."""
        return [entry for entry in self.entries.values() if not entry.settled]

    def close(self) -> None:
        """Drops what is over, once it was seen to be: its lease must never be alive again."""
        for entry in list(self.entries.values()):
            if entry.refused or entry.release_told:
                self.over.add(entry.request_id)
                del self.entries[entry.request_id]


def wrong_after_restart(ledger: Ledger, leases: Sequence[Lease]) -> Iterator[str]:
    """What the store has against what the clients were told, a sentence for each difference.

    ``leases``: all that the allocator knows, the ended ones too. What was acknowledged
    must be there; anything else is absent, or whole and was asked for.
    """
    yield from ledger.wrong
    stored = {lease.request_id: lease for lease in leases}
    if len(stored) != len(leases):
        yield "two leases have one request id"
    for entry in ledger.entries.values():
        yield from _wrong_entry(entry, stored)
    for lease in leases:
        known = ledger.entries.get(lease.request_id)
        if known is None:
            if lease.request_id not in ledger.over:
                yield f"lease {lease.lease_id} was never asked for"
            elif lease.state not in ENDED and lease.state is not LeaseState.RELEASING:
                yield f"lease {lease.lease_id} is {lease.state} again after its end"
            continue
        if lease.spec != known.spec:
            yield f"lease {lease.lease_id} is not what {known.request_id} asked for"
        yield from _wrong_whole(lease)


def _wrong_entry(entry: Entry, stored: Mapping[RequestId, Lease]) -> Iterator[str]:
    lease = stored.get(entry.request_id)
    told = entry.told
    if lease is None:
        if told is not None or entry.lease_id is not None:
            asked = ", and then asked to release it" if entry.release_asked else ""
            yield f"{entry.request_id} is lost, its client was told{asked}: {told}"
        return
    if entry.refused:
        if lease.state not in ENDED:
            yield f"{entry.request_id} was refused and is {lease.state}"
        return
    if entry.lease_id is not None and entry.lease_id != lease.lease_id:
        yield f"{entry.request_id} is {lease.lease_id}, it was {entry.lease_id}"
    if entry.release_told and lease.state not in (LeaseState.RELEASING, LeaseState.RELEASED):
        yield f"{entry.request_id} was released and is {lease.state}"
    if not entry.release_asked and lease.state not in _STEPS:
        yield f"{entry.request_id} is {lease.state}, nobody ended it: {lease.explanation.summary}"
    if told is None:
        return
    if _STEPS.get(lease.state, _ENDING) < _STEPS.get(told.state, _ENDING):
        yield f"{entry.request_id} is {lease.state}, its client was told {told.state}"
    if told.members and lease.state in _STEPS and _places(lease) != _places(told):
        yield f"{entry.request_id} has moved: {_places(told)} became {_places(lease)}"


def _places(lease: Lease) -> list[tuple[int, int, object]]:
    return [(member.rank, member.token, member.place) for member in lease.members]


def _wrong_whole(lease: Lease) -> Iterator[str]:
    """A lease has all its members with all their devices, or none."""
    if lease.state is LeaseState.PENDING and lease.members:
        yield f"lease {lease.lease_id} is pending and has members"
    if lease.state is LeaseState.PENDING or (lease.state in ENDED and not lease.members):
        return
    wanted = [
        (group.name, _devices(group)) for group in lease.spec.groups for _ in range(group.replicas)
    ]
    found = [(member.group, len(member.place.devices)) for member in lease.members]
    if wanted != found:
        yield f"lease {lease.lease_id} is {lease.state} and not whole: {found} of {wanted}"


def _devices(group: Group) -> int:
    return group.accelerator.count if isinstance(group.accelerator, WholeGpus) else 1


def _any_spec(chance: random.Random) -> LeaseSpec:
    """Mostly slices, some whole GPUs, and gangs over several nodes."""
    kind = chance.random()
    if kind < 0.88:
        return LeaseSpec(groups=(Group(accelerator=GpuSlice(share_pct=chance.choice((10, 20)))),))
    if kind < 0.95:
        return LeaseSpec(groups=(Group(accelerator=WholeGpus(count=1)),))
    gang = Group(
        replicas=chance.randint(2, 4),
        accelerator=WholeGpus(count=1),
        topology=TopologyConstraint(spread=Level.NODE),
    )
    return LeaseSpec(groups=(gang,))
