"""One client's connection: the channel, its stubs, and how calls go over it."""

from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from grpc import aio

from gpupool.sdk.calls import Backoff, OnOutage, call, error_from_rpc, senseless
from gpupool.sdk.channel import open_channel, resolve_address
from gpupool.v1.agent_pb2_grpc import AgentServiceStub
from gpupool.v1.lease_pb2_grpc import LeaseServiceStub
from gpupool.v1.pool_pb2_grpc import PoolServiceStub
from gpupool.wire.errors import BadField

CALL_TIMEOUT_S = 30.0
RETRY_S = 30.0
READ_RETRY_S = 1.0
"""Somebody who only looks would rather hear at once that nobody is there."""

_Result = TypeVar("_Result")


class Connection:
    """A channel to ``address`` and its stubs.

    ``timeout_s`` bounds each try of a unary call, ``retry_s`` how long a change is
    tried again while the pool cannot be reached, of which ``on_outage`` hears when it
    begins. Made inside a running loop.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        retry_s: float = RETRY_S,
        on_outage: OnOutage | None = None,
    ) -> None:
        self._on_outage = on_outage
        self.address = resolve_address(address)
        self.timeout_s = timeout_s
        self.retry_s = retry_s
        self._channel = open_channel(self.address)
        self.leases: Any = LeaseServiceStub(self._channel)
        self.pool: Any = PoolServiceStub(self._channel)
        self.agent: Any = AgentServiceStub(self._channel)

    async def read(
        self, method: Callable[..., Any], request: object, read: Callable[[Any], _Result]
    ) -> _Result:
        """``read`` of the response of a call that changes nothing. Raises GpupoolError."""
        return await self._call(method, request, read, Backoff(READ_RETRY_S))

    async def change(
        self,
        method: Callable[..., Any],
        request: object,
        read: Callable[[Any], _Result],
        *,
        backoff: Backoff | None = None,
    ) -> _Result:
        """``read`` of the response of a change that may be repeated. Raises GpupoolError."""
        return await self._call(method, request, read, backoff or self.backoff(self.retry_s))

    def backoff(self, patience_s: float) -> Backoff:
        """Pauses between tries, for so long in all; who made the client hears of them."""
        return Backoff(patience_s, self._on_outage)

    async def stream(
        self, method: Callable[..., Any], request: object, read: Callable[[Any], _Result]
    ) -> AsyncGenerator[_Result, None]:
        """``read`` of each response of a stream until the pool ends it.

        Raises GpupoolError. Leaving the iterator ends the call.
        """
        responses = method(request)
        try:
            async for response in responses:
                yield read(response)
        except aio.AioRpcError as error:
            raise error_from_rpc(error, self.address) from error
        except BadField as error:
            raise senseless(error, self.address) from error
        finally:
            responses.cancel()

    async def close(self) -> None:
        """Ends every call and closes the channel."""
        await self._channel.close(grace=None)

    async def _call(
        self,
        method: Callable[..., Any],
        request: object,
        read: Callable[[Any], _Result],
        backoff: Backoff,
    ) -> _Result:
        return await call(
            method,
            request,
            read,
            address=self.address,
            timeout_s=self.timeout_s,
            backoff=backoff,
        )
