"""The error table: a small closed set of kinds, mapped once for every shell.

Expected refusals ("no capacity") are values (``Refused``), not exceptions inside
the cores. The shells turn a kind into a gRPC status, an HTTP status or an exit
code by this table, and the client maps it back.
"""

from dataclasses import dataclass
from enum import Enum

from gpupool.model.lease import Explanation


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One row: gRPC status name, HTTP status, exit code of the command line."""

    grpc: str
    http: int
    exit_code: int


class ErrorKind(Enum):
    """Every kind of refusal and failure.

    Exit codes follow sysexits(3) where it has a fitting one; 75 (EX_TEMPFAIL)
    says that trying again later may help.
    """

    INVALID = ErrorRow("INVALID_ARGUMENT", 400, 64)
    UNAUTHENTICATED = ErrorRow("UNAUTHENTICATED", 401, 77)
    FORBIDDEN = ErrorRow("PERMISSION_DENIED", 403, 77)
    NOT_FOUND = ErrorRow("NOT_FOUND", 404, 66)
    CONFLICT = ErrorRow("ALREADY_EXISTS", 409, 73)
    WRONG_STATE = ErrorRow("FAILED_PRECONDITION", 412, 65)
    NO_CAPACITY = ErrorRow("RESOURCE_EXHAUSTED", 429, 75)
    SUPERSEDED = ErrorRow("ABORTED", 409, 75)
    UNIMPLEMENTED = ErrorRow("UNIMPLEMENTED", 501, 69)
    UNAVAILABLE = ErrorRow("UNAVAILABLE", 503, 75)
    TIMEOUT = ErrorRow("DEADLINE_EXCEEDED", 504, 75)
    CANCELLED = ErrorRow("CANCELLED", 499, 130)
    INTERNAL = ErrorRow("INTERNAL", 500, 70)

    @classmethod
    def from_grpc(cls, name: str) -> "ErrorKind":
        """Kind of a gRPC status name; INTERNAL for one that the table lacks."""
        return next((kind for kind in cls if kind.value.grpc == name), cls.INTERNAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A command was not carried out, and nothing was changed by it.

    ``field`` is the path of the bad field, as "spec.groups[0].slice.share_pct";
    ``retry_after_s`` None: no advice.
    """

    kind: ErrorKind
    message: str
    field: str = ""
    explanation: Explanation | None = None
    retry_after_s: float | None = None
