"""Binds handlers to a service as its proto describes it.

Instead of the generated servicers: a request that does not parse is refused as bad
input, every refusal leaves by one door, and a method without a handler is found at
the start and not by its first caller.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from gpupool.model.errors import ErrorKind, Refused
from gpupool.wire.errors import BadField
from gpupool_allocator.engine import RefusedError
from gpupool_allocator.rpc.refusals import abort, bad_input

Context = aio.ServicerContext[Any, Any]
Handler = Callable[[Any, Any], Awaitable[Any]]

log = structlog.stdlib.get_logger("rpc")


class _Malformed:
    """Bytes that are not the message they should be."""

    def __init__(self, name: str) -> None:
        self.refused = Refused(
            kind=ErrorKind.INVALID, message=f"the request is no valid {name} message"
        )


def service_handler(service: ServiceDescriptor, handlers: object) -> grpc.GenericRpcHandler:
    """All methods of ``service``, each served by the method of its name in snake case.

    A handler takes the request (an iterator of requests where the client streams)
    and the context. It returns the response, or writes responses to the context
    where the server streams.
    """
    methods = {
        method.name: _method_handler(method, getattr(handlers, _snake_case(method.name)))
        for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _method_handler(method: MethodDescriptor, handler: Handler) -> Any:
    streams = (bool(method.client_streaming), bool(method.server_streaming))
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[streams]
    return make(
        _guarded(method, _checked_stream(handler) if streams[0] else _checked(handler)),
        request_deserializer=_parser(GetMessageClass(method.input_type)),
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


def _parser(message_class: type[Message]) -> Callable[[bytes], Message | _Malformed]:
    malformed = _Malformed(message_class.DESCRIPTOR.name)

    def parse(data: bytes) -> Message | _Malformed:
        try:
            return message_class.FromString(data)
        except DecodeError:
            return malformed

    return parse


def _checked(handler: Handler) -> Handler:
    async def handle(request: Any, context: Context) -> Any:
        if isinstance(request, _Malformed):
            raise RefusedError(request.refused)
        return await handler(request, context)

    return handle


def _checked_stream(handler: Handler) -> Handler:
    async def parsed(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            if isinstance(request, _Malformed):
                raise RefusedError(request.refused)
            yield request

    async def handle(requests: AsyncIterator[Any], context: Context) -> Any:
        return await handler(parsed(requests), context)

    return handle


def _guarded(method: MethodDescriptor, handler: Handler) -> Handler:
    async def handle(request: Any, context: Context) -> Any:
        try:
            return await handler(request, context)
        except RefusedError as error:
            refused = error.refused
        except BadField as error:
            refused = bad_input(error)
        except aio.AbortError:
            raise
        except Exception:
            # Ours, not the caller's: whole in the log, without insides on the wire.
            log.exception("rpc.failed", method=method.full_name)
            refused = Refused(kind=ErrorKind.INTERNAL, message="internal error, see the log")
        return await abort(context, refused)

    return handle
