"""Holds: reasons not to use something."""

from dataclasses import dataclass
from enum import StrEnum

from gpupool.model.caller import Caller
from gpupool.model.ids import HoldId


class HoldScope(StrEnum):
    """What a hold covers."""

    DEVICE = "device"
    NODE = "node"


class HoldKind(StrEnum):
    """Who keeps a hold: an operator, or the queue for its head."""

    OPERATOR = "operator"
    QUEUE = "queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A reason not to use something.

    ``target`` is a node id or device UUID, whole, never a prefix. An empty
    ``allowed_tenants`` lets nobody through. ``expire_unix_s`` None: until removed.
    """

    hold_id: HoldId
    kind: HoldKind
    scope: HoldScope
    target: str
    reason: str
    owner: Caller
    allowed_tenants: tuple[str, ...] = ()
    expire_unix_s: float | None = None
    create_unix_s: float = 0.0
    request_id: str = ""
