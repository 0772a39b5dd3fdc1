"""What calls to a pool raise: one class for each kind of the error table."""

from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.lease import Explanation, Lease, LeaseState


class GpupoolError(Exception):
    """A call was not carried out.

    ``kind`` is the row of the error table; ``field`` the path of a bad field, else
    empty; ``explanation`` the counted causes where there are any; ``retry_after_s``
    when to try again, None for no advice.
    """

    kind: ErrorKind = ErrorKind.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        kind: ErrorKind | None = None,
        field: str = "",
        explanation: Explanation | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind or type(self).kind
        self.field = field
        self.explanation = explanation
        self.retry_after_s = retry_after_s


class InvalidRequestError(GpupoolError):
    """A field is outside its accepted range; ``field`` names it."""

    kind = ErrorKind.INVALID


class UnauthenticatedError(GpupoolError):
    """The caller could not be told."""

    kind = ErrorKind.UNAUTHENTICATED


class ForbiddenError(GpupoolError):
    """The caller may not do this."""

    kind = ErrorKind.FORBIDDEN


class NotFoundError(GpupoolError):
    """What was named is not there."""

    kind = ErrorKind.NOT_FOUND


class ConflictError(GpupoolError):
    """The request id was used for something else before."""

    kind = ErrorKind.CONFLICT


class WrongStateError(GpupoolError):
    """The pool's or the lease's state does not allow this now."""

    kind = ErrorKind.WRONG_STATE


class NoCapacityError(GpupoolError):
    """The request does not fit; ``explanation`` counts why."""

    kind = ErrorKind.NO_CAPACITY


class SupersededError(GpupoolError):
    """Something newer took its place."""

    kind = ErrorKind.SUPERSEDED


class UnimplementedError(GpupoolError):
    """A valid field or call that this pool does not carry out; ``field`` names it."""

    kind = ErrorKind.UNIMPLEMENTED


class UnavailableError(GpupoolError):
    """The pool cannot be reached, or refuses changes for now."""

    kind = ErrorKind.UNAVAILABLE


class TimedOutError(GpupoolError):
    """No answer, or no grant, in the time allowed."""

    kind = ErrorKind.TIMEOUT


class CancelledError(GpupoolError):
    """Given up by the caller or an operator."""

    kind = ErrorKind.CANCELLED


class LeaseEndedError(GpupoolError):
    """The lease ended before it was active; ``lease`` is its last state."""

    def __init__(self, lease: Lease) -> None:
        why = lease.explanation.summary or "no reason given"
        super().__init__(
            f"lease {lease.lease_id} ended before it was active: {lease.state}: {why}",
            kind=_ENDED_KINDS.get(lease.state, ErrorKind.UNAVAILABLE),
            explanation=lease.explanation,
        )
        self.lease = lease


_ENDED_KINDS = {
    LeaseState.RELEASED: ErrorKind.CANCELLED,
    LeaseState.CANCELLED: ErrorKind.CANCELLED,
    LeaseState.EXPIRED: ErrorKind.TIMEOUT,
    LeaseState.PREEMPTED: ErrorKind.SUPERSEDED,
    LeaseState.FAILED: ErrorKind.UNAVAILABLE,
}

_CLASSES: dict[ErrorKind, type[GpupoolError]] = {
    error.kind: error
    for error in (
        InvalidRequestError,
        UnauthenticatedError,
        ForbiddenError,
        NotFoundError,
        ConflictError,
        WrongStateError,
        NoCapacityError,
        SupersededError,
        UnimplementedError,
        UnavailableError,
        TimedOutError,
        CancelledError,
    )
}


def error_of(refused: Refused) -> GpupoolError:
    """The exception of a refusal."""
    return _CLASSES.get(refused.kind, GpupoolError)(
        refused.message,
        kind=refused.kind,
        field=refused.field,
        explanation=refused.explanation,
        retry_after_s=refused.retry_after_s,
    )
