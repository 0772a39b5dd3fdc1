"""What an agent does for clients on its own node."""

from dataclasses import dataclass

from gpupool.model import limits
from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool.v1 import agent_pb2 as pb
from gpupool.wire import door
from gpupool.wire.resources import PID_MAX

PID_MIN = 2
"""Process 1 is the host's own, and nobody's to give away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptAsk:
    """Names a process of this node and the lease that it shall count to."""

    lease_id: LeaseId
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A process that counts to a lease now: the lease's GPUs that it is on, its command."""

    device_uuids: tuple[DeviceUuid, ...]
    command: str


def adopt_ask_to_proto(ask: AdoptAsk) -> pb.AdoptProcessRequest:
    """Names process and lease."""
    return pb.AdoptProcessRequest(lease_id=ask.lease_id, pid=ask.pid)


def adopt_ask_from_proto(message: pb.AdoptProcessRequest) -> AdoptAsk:
    """Raises BadField."""
    return AdoptAsk(
        lease_id=LeaseId(door.identifier("", "lease_id", message.lease_id)),
        pid=door.integer("", "pid", message.pid, PID_MIN, PID_MAX),
    )


def adopted_to_proto(adopted: Adopted) -> pb.AdoptProcessResponse:
    """A process that counts to a lease now."""
    return pb.AdoptProcessResponse(device_uuids=adopted.device_uuids, command=adopted.command)


def adopted_from_proto(message: pb.AdoptProcessResponse) -> Adopted:
    """Raises BadField."""
    door.count("", "device_uuids", message.device_uuids, 0, limits.DEVICES_PER_NODE_MAX)
    return Adopted(
        device_uuids=tuple(
            DeviceUuid(door.device_uuid("", "device_uuids", uuid)) for uuid in message.device_uuids
        ),
        command=door.long_text("", "command", message.command, most=limits.NAME_CHARS_MAX),
    )
