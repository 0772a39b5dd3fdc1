"""Forwarding calls byte for byte to the allocator, with the caller's credentials added.

Every method of the lease and pool services is forwarded as a stream of messages each
way: on the wire all four kinds of calls are that. What a client says about itself in
the metadata of these names is dropped.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from gpupool.model.assignment import Welcome
from gpupool_agent.devices.processes import user_name

SERVICES = ("/gpupool.v1.LeaseService/", "/gpupool.v1.PoolService/")
PREFIX = "gpupool-"
RESERVED = ("user-agent", "te", "content-type", "grpc-accept-encoding", "grpc-timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A process at the other end of a connection, as the kernel named it."""

    pid: int
    uid: int
    start_ticks: int


class Uplink(Protocol):
    """The connection to the allocator; both are None while there is none."""

    channel: grpc.aio.Channel | None
    welcome: Welcome | None


Context = grpc.aio.ServicerContext[bytes, bytes]


class Forwarder(grpc.GenericRpcHandler):
    """Handles every call of a local client."""

    def __init__(self, node_id: str, uplink: Uplink, peer_of: Callable[[str], Peer | None]) -> None:
        self._node_id = node_id
        self._uplink = uplink
        self._peer_of = peer_of

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Give a handler for the two services; None, so UNIMPLEMENTED, for all others."""
        method = handler_call_details.method
        if not method.startswith(SERVICES):
            return None

        async def forward(
            requests: AsyncIterator[bytes], context: Context
        ) -> AsyncGenerator[bytes, None]:
            async for answer in self._forward(method, requests, context):
                yield answer

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _forward(
        self, method: str, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncGenerator[bytes, None]:
        channel, welcome = self._uplink.channel, self._uplink.welcome
        if channel is None or welcome is None:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE,
                f"the agent of node {self._node_id} has no allocator at the moment",
            )
        peer = self._peer_of(context.peer())
        if peer is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the calling process is not known")
        # Without serializers, so in bytes: typed as Any since the types ask for them.
        opened: Any = channel
        call = opened.stream_stream(method)(
            requests,
            metadata=self._metadata(context, peer, welcome),
            timeout=context.time_remaining(),
        )
        try:
            await context.send_initial_metadata(_public(await call.initial_metadata()))
            async for answer in call:
                yield answer
            await _end(context, call)
        except grpc.aio.AioRpcError:
            await _end(context, call)
        finally:
            call.cancel()

    def _metadata(
        self, context: Context, peer: Peer, welcome: Welcome
    ) -> tuple[tuple[str, str | bytes], ...]:
        return (
            *_public(context.invocation_metadata() or ()),
            ("gpupool-node-id", self._node_id),
            ("gpupool-forward-key", welcome.forward_key),
            ("gpupool-uid", str(peer.uid)),
            ("gpupool-pid", str(peer.pid)),
            ("gpupool-pid-start-ticks", str(peer.start_ticks)),
            ("gpupool-user", user_name(peer.uid)),
        )


async def _end(context: Context, call: Any) -> None:
    """End with the allocator's own status and trailing metadata."""
    code: grpc.StatusCode = await call.code()
    context.set_trailing_metadata(tuple(await call.trailing_metadata()))
    context.set_code(code)
    context.set_details(await call.details() or "")


def _public(metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
    """Metadata without what only an agent may say and what belongs to the hop."""
    return tuple(
        (key, value)
        for key, value in metadata
        if not key.startswith((PREFIX, "grpc-", ":")) and key not in RESERVED
    )
