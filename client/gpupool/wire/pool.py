"""Holds and events of the pool service."""

from dataclasses import dataclass

from gpupool.model import limits
from gpupool.model.event import Event
from gpupool.model.hold import Hold, HoldKind, HoldScope
from gpupool.model.ids import HoldId
from gpupool.v1 import pool_pb2 as pb
from gpupool.wire import door
from gpupool.wire.enums import HOLD_SCOPES
from gpupool.wire.errors import BadField
from gpupool.wire.resources import caller_from_proto, caller_to_proto
from gpupool.wire.times import timestamp_from_proto, timestamp_to_proto

_TENANTS_MAX = 64
_EVENT_DETAILS_MAX = 1024
_EVENT_DETAIL_CHARS_MAX = 1_048_576
"""An event of a big gang names every place of it."""

_KINDS = {kind.value: kind for kind in HoldKind}


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldAsk:
    """A request for an operator's hold as it came through the door."""

    request_id: str
    scope: HoldScope
    target: str
    reason: str
    allowed_tenants: tuple[str, ...] = ()
    expire_unix_s: float | None = None


def hold_ask_to_proto(ask: HoldAsk) -> pb.CreateHoldRequest:
    """The request of one CreateHold."""
    hold = pb.Hold(
        scope=HOLD_SCOPES.to_proto(ask.scope),
        target=ask.target,
        reason=ask.reason,
        allowed_tenants=ask.allowed_tenants,
    )
    if ask.expire_unix_s is not None:
        hold.expire_time.CopyFrom(timestamp_to_proto(ask.expire_unix_s))
    return pb.CreateHoldRequest(request_id=ask.request_id, hold=hold)


def hold_ask_from_proto(message: pb.CreateHoldRequest) -> HoldAsk:
    """Raises BadField."""
    hold = message.hold
    scope = HOLD_SCOPES.from_proto("hold", "scope", hold.scope)
    return HoldAsk(
        request_id=door.request_id("", "request_id", message.request_id),
        scope=scope,
        target=_target("hold", scope, hold.target),
        reason=door.text("hold", "reason", hold.reason, least=1),
        allowed_tenants=_allowed_tenants("hold", hold),
        expire_unix_s=_expire_unix_s("hold", hold),
    )


def hold_to_proto(hold: Hold) -> pb.Hold:
    """A hold as operators see it; the request id stays in the pool."""
    message = pb.Hold(
        hold_id=hold.hold_id,
        kind=hold.kind.value,
        scope=HOLD_SCOPES.to_proto(hold.scope),
        target=hold.target,
        reason=hold.reason,
        owner=caller_to_proto(hold.owner),
        allowed_tenants=hold.allowed_tenants,
    )
    if hold.expire_unix_s is not None:
        message.expire_time.CopyFrom(timestamp_to_proto(hold.expire_unix_s))
    if hold.create_unix_s:
        message.create_time.CopyFrom(timestamp_to_proto(hold.create_unix_s))
    return message


def hold_from_proto(message: pb.Hold, at: str = "hold") -> Hold:
    """The hold of a message, without its request id. Raises BadField."""
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise BadField(door.path(at, "kind"), message.kind, ", ".join(_KINDS))
    scope = HOLD_SCOPES.from_proto(at, "scope", message.scope)
    return Hold(
        hold_id=HoldId(door.identifier(at, "hold_id", message.hold_id)),
        kind=kind,
        scope=scope,
        target=_target(at, scope, message.target),
        reason=door.text(at, "reason", message.reason),
        owner=caller_from_proto(f"{at}.owner", message.owner),
        allowed_tenants=_allowed_tenants(at, message),
        expire_unix_s=_expire_unix_s(at, message),
        create_unix_s=timestamp_from_proto(at, "create_time", message.create_time),
    )


def hold_id_from_proto(value: str) -> HoldId:
    """Id in a message that names a hold. Raises BadField."""
    return HoldId(door.identifier("", "hold_id", value))


def event_to_proto(event: Event) -> pb.Event:
    """One change with its cause."""
    return pb.Event(
        sequence=event.sequence,
        time=timestamp_to_proto(event.unix_s),
        kind=event.kind,
        subject=event.subject,
        cause=event.cause,
        details=event.details,
    )


def event_from_proto(message: pb.Event, at: str = "event") -> Event:
    """Raises BadField."""
    door.count(at, "details", message.details, 0, _EVENT_DETAILS_MAX)
    for key, value in message.details.items():
        door.text(at, "details key", key)
        door.long_text(at, f"details[{key!r}]", value, most=_EVENT_DETAIL_CHARS_MAX)
    return Event(
        sequence=door.integer(at, "sequence", message.sequence, 1, door.INT64_MAX),
        unix_s=timestamp_from_proto(at, "time", message.time),
        kind=door.word(at, "kind", message.kind),
        subject=door.long_text(at, "subject", message.subject),
        cause=door.long_text(at, "cause", message.cause),
        details=dict(message.details),
    )


def page_size_from_proto(value: int) -> int:
    """Entries in a page, 1..1000; 0 means 100. Raises BadField."""
    return door.page_size(value, default=limits.PAGE_DEFAULT, most=limits.PAGE_MAX)


def after_sequence_from_proto(value: int, *, least: int = 0) -> int:
    """Where to go on in the events; ``least`` -1 where "only new ones" is meant."""
    return door.integer("", "after_sequence", value, least, door.INT64_MAX)


def _target(at: str, scope: HoldScope, value: str) -> str:
    if scope is HoldScope.DEVICE:
        return door.device_uuid(at, "target", value)
    return door.node_id(at, "target", value)


def _allowed_tenants(at: str, message: pb.Hold) -> tuple[str, ...]:
    door.count(at, "allowed_tenants", message.allowed_tenants, 0, _TENANTS_MAX)
    tenants = tuple(
        door.text(at, f"allowed_tenants[{index}]", tenant, least=1)
        for index, tenant in enumerate(message.allowed_tenants)
    )
    door.unique(at, "allowed_tenants", tenants)
    return tenants


def _expire_unix_s(at: str, message: pb.Hold) -> float | None:
    if not message.HasField("expire_time"):
        return None
    return timestamp_from_proto(at, "expire_time", message.expire_time)
