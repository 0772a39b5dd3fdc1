"""Whether a process may be taken into a lease: whose it is, and what it is on."""

from dataclasses import dataclass

from gpupool.model.assignment import AssignmentState
from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.ids import DeviceUuid
from gpupool_agent.core.adoptions import ADOPTIONS_MAX
from gpupool_agent.core.assignments import Kept
from gpupool_agent.core.book import Book
from gpupool_agent.core.devices import Devices
from gpupool_agent.core.events import AdoptionAsked
from gpupool_agent.core.membership import Bonds, share_of
from gpupool_agent.core.readings import DeviceProcess

ROOT_UID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoptable:
    """The process as it was read, and the GPUs of the lease that it is on."""

    process: DeviceProcess
    device_uuids: tuple[DeviceUuid, ...]


def examine(
    asked: AdoptionAsked, book: Book, devices: Devices, bonds: Bonds
) -> Adoptable | Refused:
    """What would be adopted, or why it may not be."""
    of_lease = [k for k in book.kept.values() if k.assignment.key.lease_id == asked.lease_id]
    ready = [kept for kept in of_lease if kept.state is AssignmentState.PREPARED]
    if not of_lease:
        return _no(ErrorKind.NOT_FOUND, "lease_id", f"lease {asked.lease_id} is not on this node")
    if not ready:
        why = f"lease {asked.lease_id} is {of_lease[-1].state.value} here, not prepared"
        return _no(ErrorKind.WRONG_STATE, "lease_id", why)
    refused = _refuse_stranger(asked, ready)
    if refused is not None:
        return refused
    on: dict[DeviceUuid, tuple[Kept, DeviceProcess]] = {
        share.device_uuid: (kept, process)
        for kept in ready
        for share in kept.assignment.place.devices
        for process in devices.processes(share.device_uuid)
        if (process.pid, process.start_ticks) == (asked.pid, asked.start_ticks)
    }
    if not on:
        why = f"process {asked.pid} is on no GPU of lease {asked.lease_id}"
        return _no(ErrorKind.WRONG_STATE, "pid", why)
    return _refuse_member(asked, on, book, bonds) or Adoptable(
        process=next(iter(on.values()))[1], device_uuids=tuple(on)
    )


def _refuse_stranger(asked: AdoptionAsked, ready: list[Kept]) -> Refused | None:
    if asked.asker_uid == ROOT_UID:
        return None
    if all(kept.assignment.uid != asked.asker_uid for kept in ready):
        why = f"lease {asked.lease_id} is of uid {ready[0].assignment.uid}, not yours"
        return _no(ErrorKind.FORBIDDEN, "lease_id", why)
    if asked.process_uid != asked.asker_uid:
        return _no(ErrorKind.FORBIDDEN, "pid", f"process {asked.pid} is not yours")
    return None


def _refuse_member(
    asked: AdoptionAsked,
    on: dict[DeviceUuid, tuple[Kept, DeviceProcess]],
    book: Book,
    bonds: Bonds,
) -> Refused | None:
    for uuid, (kept, process) in on.items():
        whose, sure = book.owner_of(process, uuid, bonds)
        other = whose.assignment.key.lease_id if whose is not None else asked.lease_id
        if sure and other != asked.lease_id:
            why = f"process {asked.pid} belongs to lease {other}"
            return _no(ErrorKind.WRONG_STATE, "pid", why)
        share = share_of(kept, uuid)
        if share is not None and not share.whole and process.through_mps is False:
            why = (
                f"process {asked.pid} runs on {uuid} without MPS, and so without limits:"
                " a part of a GPU cannot take it in, a lease of whole GPUs can"
            )
            return _no(ErrorKind.WRONG_STATE, "pid", why)
    if asked.pid not in bonds.adopted and len(bonds.adopted) >= ADOPTIONS_MAX:
        why = f"{ADOPTIONS_MAX} processes are adopted on this node, which is the most"
        return _no(ErrorKind.NO_CAPACITY, "pid", why)
    return None


def _no(kind: ErrorKind, field: str, why: str) -> Refused:
    return Refused(kind=kind, field=field, message=why)
