"""The gRPC server with its services, health and reflection."""

from grpc import aio
from grpc_reflection.v1alpha import reflection

from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.limits import MESSAGE_BYTES_MAX
from gpupool.v1 import lease_pb2, node_pb2, pool_pb2
from gpupool_allocator.engine import Engine
from gpupool_allocator.rpc.agents import AgentStreams
from gpupool_allocator.rpc.callers import ForwardKeys
from gpupool_allocator.rpc.health import SERVICE_NAME, Health
from gpupool_allocator.rpc.lease_service import LeaseService
from gpupool_allocator.rpc.node_service import NodeService
from gpupool_allocator.rpc.pool_service import PoolService
from gpupool_allocator.rpc.registration import service_handler
from gpupool_allocator.settings import Address, AllocatorSettings
from gpupool_allocator.telemetry import TelemetryBook

STREAMS_PER_CONNECTION_MAX = 4096

OPTIONS: tuple[tuple[str, int], ...] = (
    # A busy port must be an error: by default two servers share it silently.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
    # A peer that vanished without a word is noticed within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Peers may ping as often, also between calls; faster ones are sent away.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 3),
    # Messages are small. By default each one that comes is answered with a ping, to
    # measure how fast the way is, which triples the traffic of a thousand heartbeats.
    ("grpc.http2.bdp_probe", 0),
)

SERVICES = (
    lease_pb2.DESCRIPTOR.services_by_name["LeaseService"],
    pool_pb2.DESCRIPTOR.services_by_name["PoolService"],
    node_pb2.DESCRIPTOR.services_by_name["NodeService"],
)

STOPPING = Refused(
    kind=ErrorKind.UNAVAILABLE, message="the allocator is stopping", retry_after_s=1.0
)


class GrpcServer:
    """The bound server; ``port`` is the real one. Made inside the running event loop."""

    def __init__(
        self, engine: Engine, settings: AllocatorSettings, telemetry: TelemetryBook
    ) -> None:
        keys = ForwardKeys()
        self.agents = AgentStreams(
            nodes_max=settings.nodes_max, heartbeat_timeout_s=settings.heartbeat_timeout_s
        )
        self._server = aio.server(options=OPTIONS, maximum_concurrent_rpcs=settings.calls_max)
        handlers = (
            LeaseService(engine, keys),
            PoolService(engine, keys, telemetry),
            NodeService(engine, keys, self.agents, telemetry),
        )
        self._server.add_generic_rpc_handlers(
            tuple(
                service_handler(service, handler)
                for service, handler in zip(SERVICES, handlers, strict=True)
            )
        )
        names = [service.full_name for service in SERVICES]
        self._health = Health(self._server, names)
        reflection.enable_server_reflection(
            (*names, SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self.port = _bind(self._server, settings.grpc_address)

    async def start(self) -> None:
        """Serves from now on."""
        await self._server.start()
        await self._health.serving()

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, sends the agents away, lets calls end within the grace."""
        await self._health.stopping()
        self.agents.close_all(STOPPING)
        await self._server.stop(grace_s)


def _bind(server: aio.Server, address: Address) -> int:
    try:
        port = server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    if port == 0:
        raise OSError(f"cannot listen on {address}")
    return port
