"""Who sent a command."""

from dataclasses import dataclass
from enum import StrEnum

from gpupool.model.ids import NodeId


class Role(StrEnum):
    """What a caller may do."""

    USER = "user"
    OPERATOR = "operator"
    NODE = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Sender of a command, carried by every command in the core.

    ``uid`` is the user id on the host that the command came from.
    """

    tenant: str = "default"
    user: str = ""
    uid: int = 0
    role: Role = Role.USER


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRef:
    """A process on a pool node.

    ``start_ticks`` (field 22 of /proc/PID/stat) tells it from a later process
    with the same pid.
    """

    node_id: NodeId
    pid: int
    start_ticks: int
