"""What clients ask of the lease service, and how it refuses."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpupool.model import limits
from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.ids import LeaseId, NodeId, RequestId
from gpupool.model.lease import LeaseState
from gpupool.model.request import LeaseSpec
from gpupool.v1 import lease_pb2 as pb
from gpupool.wire import door
from gpupool.wire.enums import LEASE_STATES
from gpupool.wire.errors import BadField
from gpupool.wire.request import lease_spec_from_proto, lease_spec_to_proto
from gpupool.wire.resources import explanation_from_proto, explanation_to_proto
from gpupool.wire.times import duration_from_proto, duration_to_proto

_RETRY_AFTER_S_MAX = 366 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireAsk:
    """A request for a lease as it came through the door.

    Exactly one of ``ttl_s`` and ``caller_process`` is set. ``wait_s`` None: as
    long as the caller listens or renews; 0: not at all.
    """

    request_id: RequestId
    spec: LeaseSpec
    ttl_s: float | None = limits.TTL_S_DEFAULT
    caller_process: bool = False
    wait_s: float | None = None
    follow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLeasesAsk:
    """Which leases to list; empty tests select all, no states those not ended."""

    page_size: int
    page_token: str
    states: frozenset[LeaseState]
    tenant: str
    node_id: NodeId


def acquire_ask_to_proto(ask: AcquireAsk) -> pb.AcquireRequest:
    """The request of one Acquire."""
    message = pb.AcquireRequest(
        request_id=ask.request_id, spec=lease_spec_to_proto(ask.spec), follow=ask.follow
    )
    if ask.caller_process:
        message.caller_process = True
    elif ask.ttl_s is not None:
        message.ttl.CopyFrom(duration_to_proto(ask.ttl_s))
    if ask.wait_s is not None:
        message.wait.CopyFrom(duration_to_proto(ask.wait_s))
    return message


def acquire_ask_from_proto(message: pb.AcquireRequest, at: str = "") -> AcquireAsk:
    """Raises BadField. A holder that is not named is a TTL of 60 s."""
    process = message.HasField("caller_process")
    if process and not message.caller_process:
        raise BadField(door.path(at, "caller_process"), message.caller_process, "true; else a ttl")
    wait_s: float | None = None
    if message.HasField("wait"):
        wait_s = duration_from_proto(at, "wait", message.wait, 0.0, limits.WAIT_S_MAX)
    return AcquireAsk(
        request_id=RequestId(door.request_id(at, "request_id", message.request_id)),
        spec=lease_spec_from_proto(message.spec, door.path(at, "spec")),
        ttl_s=None if process else _ttl_s(at, message),
        caller_process=process,
        wait_s=wait_s,
        follow=message.follow,
    )


def acquire_asks_from_proto(message: pb.AcquireManyRequest) -> tuple[AcquireAsk, ...]:
    """The requests of one AcquireMany. Raises BadField, also where one follows."""
    door.count("", "requests", message.requests, 1, limits.BATCH_MAX)
    asks = tuple(
        acquire_ask_from_proto(request, f"requests[{index}]")
        for index, request in enumerate(message.requests)
    )
    for index, ask in enumerate(asks):
        door.integer(f"requests[{index}]", "follow", int(ask.follow), 0, 0)
    door.unique("requests[*]", "request_id", [ask.request_id for ask in asks])
    return asks


def lease_id_from_proto(value: str, at: str = "") -> LeaseId:
    """Id in a message that names a lease. Raises BadField."""
    return LeaseId(door.identifier(at, "lease_id", value))


def lease_ids_from_proto(values: Sequence[str], at: str = "") -> tuple[LeaseId, ...]:
    """The 1..1024 ids of a KeepAlive. Raises BadField."""
    door.count(at, "lease_ids", values, 1, limits.KEEP_ALIVE_MAX)
    return tuple(
        LeaseId(door.identifier(at, f"lease_ids[{index}]", value))
        for index, value in enumerate(values)
    )


def release_reason_from_proto(value: str, at: str = "") -> str:
    """Reason of a Release, for the history. Raises BadField."""
    return door.text(at, "reason", value)


def list_leases_ask_from_proto(message: pb.ListLeasesRequest) -> ListLeasesAsk:
    """Raises BadField; what a page token may hold is its maker's to check."""
    door.count("", "states", message.states, 0, 2 * len(LeaseState))
    return ListLeasesAsk(
        page_size=door.page_size(
            message.page_size, default=limits.PAGE_DEFAULT, most=limits.PAGE_MAX
        ),
        page_token=door.text("", "page_token", message.page_token, most=2048),
        states=frozenset(
            LEASE_STATES.from_proto("", f"states[{index}]", state)
            for index, state in enumerate(message.states)
        ),
        tenant=door.text("", "tenant", message.tenant),
        node_id=NodeId(door.node_id("", "node_id", message.node_id) if message.node_id else ""),
    )


def refusal_to_proto(refused: Refused) -> pb.Refusal:
    """A refusal, for an answer or for the trailing metadata of a failed call."""
    message = pb.Refusal(code=refused.kind.value.grpc, message=refused.message, field=refused.field)
    if refused.explanation is not None:
        message.explanation.CopyFrom(explanation_to_proto(refused.explanation))
    if refused.retry_after_s is not None:
        message.retry_after.CopyFrom(duration_to_proto(refused.retry_after_s))
    return message


def refusal_from_proto(message: pb.Refusal, at: str = "refusal") -> Refused:
    """Raises BadField; a code that the table lacks is INTERNAL."""
    return Refused(
        kind=ErrorKind.from_grpc(message.code),
        message=door.long_text(at, "message", message.message),
        field=door.long_text(at, "field", message.field),
        explanation=(
            explanation_from_proto(f"{at}.explanation", message.explanation)
            if message.HasField("explanation")
            else None
        ),
        retry_after_s=(
            duration_from_proto(at, "retry_after", message.retry_after, 0.0, _RETRY_AFTER_S_MAX)
            if message.HasField("retry_after")
            else None
        ),
    )


def _ttl_s(at: str, message: pb.AcquireRequest) -> float:
    if not message.HasField("ttl"):
        return limits.TTL_S_DEFAULT
    return duration_from_proto(at, "ttl", message.ttl, limits.TTL_S_MIN, limits.TTL_S_MAX)
