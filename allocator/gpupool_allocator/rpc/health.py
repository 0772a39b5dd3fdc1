"""The standard gRPC health service."""

# The library's stubs do not know its asyncio half.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

from collections.abc import Sequence
from typing import Any

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SERVICE_NAME: str = health.SERVICE_NAME


class Health:
    """Says SERVING for the server and each of its services while they serve."""

    def __init__(self, server: aio.Server, services: Sequence[str]) -> None:
        self._services = services
        self._servicer: Any = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def serving(self) -> None:
        """From now on."""
        for name in ("", *self._services):
            await self._servicer.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stopping(self) -> None:
        """NOT_SERVING, for good."""
        await self._servicer.enter_graceful_shutdown()
