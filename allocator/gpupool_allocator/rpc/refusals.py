"""The one place where refusals become gRPC statuses."""

from typing import Any, TypeVar

import grpc
from grpc import aio

from gpupool.model.errors import ErrorKind, Refused
from gpupool.wire.errors import BadField
from gpupool.wire.lease import refusal_to_proto
from gpupool_allocator.engine import RefusedError, Result

T = TypeVar("T")
Context = aio.ServicerContext[Any, Any]

REFUSAL_KEY = "gpupool-refusal-bin"
"""Trailing metadata that carries the whole refusal: a serialized Refusal."""

METADATA_BYTES_MAX = 4096
"""Peers accept 8 KiB of metadata by default; a refusal above this goes without causes."""


def bad_input(error: BadField) -> Refused:
    """The refusal for a field outside its range."""
    return Refused(kind=ErrorKind.INVALID, message=str(error), field=error.field)


def status(refused: Refused) -> grpc.StatusCode:
    """The status code of a refusal."""
    return grpc.StatusCode[refused.kind.value.grpc]


def accepted(result: Result, kind: type[T]) -> T:
    """The result of a command, of the kind that it has. RefusedError for a refusal."""
    if isinstance(result, Refused):
        raise RefusedError(result)
    if not isinstance(result, kind):
        raise TypeError(f"the pool answered {type(result).__name__}, not {kind.__name__}")
    return result


async def abort(context: Context, refused: Refused) -> None:
    """Ends a call with a refusal; raises, as grpc does, to leave the handler."""
    packed = refusal_to_proto(refused).SerializeToString()
    if len(packed) > METADATA_BYTES_MAX:
        brief = Refused(
            kind=refused.kind,
            message=refused.message[:1000],
            field=refused.field[:1000],
            retry_after_s=refused.retry_after_s,
        )
        packed = refusal_to_proto(brief).SerializeToString()
    # The message is metadata too.
    await context.abort(status(refused), refused.message[:1000], ((REFUSAL_KEY, packed),))
