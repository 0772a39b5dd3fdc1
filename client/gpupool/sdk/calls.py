"""Single calls: deadlines, retries of what may be repeated, errors mapped back."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from grpc import aio

from gpupool.errors import GpupoolError, error_of
from gpupool.model.errors import ErrorKind, Refused
from gpupool.v1 import lease_pb2
from gpupool.wire.errors import BadField
from gpupool.wire.lease import refusal_from_proto

REFUSAL_KEY = "gpupool-refusal-bin"
"""Trailing metadata that carries the whole refusal: a serialized Refusal."""

BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 5.0

OnOutage = Callable[[GpupoolError, float], None]
"""Hears that the pool cannot be reached, and for how long that is tried again, seconds."""

_Result = TypeVar("_Result")


class Backoff:
    """Growing pauses with jitter, so that a thousand clients do not return at once."""

    def __init__(self, patience_s: float | None, on_outage: OnOutage | None = None) -> None:
        """``patience_s``: how long an outage may last in all; None: for ever, and untold."""
        self._patience_s = patience_s
        self._on_outage = on_outage
        self._pause_s = BACKOFF_S_MIN
        self._since: float | None = None

    def reset(self) -> None:
        """The pool has answered."""
        self._pause_s = BACKOFF_S_MIN
        self._since = None

    async def pause(self, error: GpupoolError) -> None:
        """Waits before the next try; raises ``error`` when patience has ended."""
        now = time.monotonic()
        begins = self._since is None
        since = self._since = now if self._since is None else self._since
        if self._patience_s is not None:
            if now - since >= self._patience_s:
                raise error
            if begins and self._on_outage is not None:
                self._on_outage(error, self._patience_s)
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
        self._pause_s = min(self._pause_s * 2, BACKOFF_S_MAX)


def error_from_rpc(error: aio.AioRpcError, address: str) -> GpupoolError:
    """The exception for a failed call: the allocator's refusal, or the transport's failure."""
    metadata = error.trailing_metadata()
    packed = metadata.get(REFUSAL_KEY) if metadata is not None else None
    if isinstance(packed, bytes):
        try:
            return error_of(refusal_from_proto(lease_pb2.Refusal.FromString(packed)))
        except (BadField, DecodeError) as bad:
            return GpupoolError(f"the pool at {address} refused in words that make no sense: {bad}")
    kind = ErrorKind.from_grpc(error.code().name)
    details = error.details() or error.code().name
    if kind is ErrorKind.UNAVAILABLE:
        details = f"no pool can be reached at {address}: {details}"
    return error_of(Refused(kind=kind, message=details))


def worth_retrying(error: GpupoolError) -> bool:
    """Whether the same call may succeed later without any change: an outage."""
    return error.kind is ErrorKind.UNAVAILABLE


async def call(
    method: Callable[..., Any],
    request: object,
    read: Callable[[Any], _Result],
    *,
    address: str,
    timeout_s: float,
    backoff: Backoff,
) -> _Result:
    """One unary call that may be repeated: ``read`` of its response.

    Tried again while the pool cannot be reached, as long as ``backoff`` has patience;
    each try may take ``timeout_s``. Raises GpupoolError.
    """
    while True:
        try:
            return await attempt(method(request, timeout=timeout_s), read, address)
        except GpupoolError as error:
            if not worth_retrying(error):
                raise
            await backoff.pause(error)


async def attempt(answer: Awaitable[Any], read: Callable[[Any], _Result], address: str) -> _Result:
    """``read`` of one answer. Raises GpupoolError, also for one that makes no sense."""
    try:
        return read(await answer)
    except aio.AioRpcError as error:
        raise error_from_rpc(error, address) from error
    except BadField as error:
        raise senseless(error, address) from error


def senseless(error: BadField, address: str) -> GpupoolError:
    """The exception for an answer outside the protocol."""
    return GpupoolError(f"the pool at {address} answered outside the protocol: {error}")
