"""Where the pool is, and the channel to it."""

import os
import stat
from pathlib import Path

from grpc import aio

from gpupool.errors import InvalidRequestError
from gpupool.model.limits import MESSAGE_BYTES_MAX

ADDRESS_VARIABLE = "GPUPOOL_ADDRESS"
AGENT_SOCKET = "/run/gpupool/agent.sock"
DEFAULT_ADDRESS = "127.0.0.1:7070"

_ADDRESS_CHARS_MAX = 1024

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # The default grows to two minutes, which would be added to every outage.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A proxy of the environment has no business between a node and its pool.
    ("grpc.enable_http_proxy", 0),
)


KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    # A host that vanished without a word is noticed within 40 s, also by a call
    # that only waits. A Unix socket cannot vanish like that.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


def resolve_address(address: str | None = None) -> str:
    """Where to call: ``address``, else $GPUPOOL_ADDRESS, else this node's agent, else TCP.

    "host:port", or "unix:/path" (also a bare absolute path) for an agent's socket.
    Raises InvalidRequestError for what is neither.
    """
    found = address or os.environ.get(ADDRESS_VARIABLE)
    if not found:
        return f"unix:{AGENT_SOCKET}" if _is_socket(AGENT_SOCKET) else DEFAULT_ADDRESS
    if found.startswith("/"):
        found = f"unix:{found}"
    if len(found) > _ADDRESS_CHARS_MAX or not (is_agent_socket(found) or _is_host_port(found)):
        raise InvalidRequestError(
            f'address: {found[:80]!r} is not in "host:port" or "unix:/path"', field="address"
        )
    return found


def is_agent_socket(address: str) -> bool:
    """Whether an address is a node's own socket, whose agent can watch the caller."""
    return address.startswith("unix:/")


def open_channel(address: str) -> aio.Channel:
    """A channel to a resolved address; it connects at the first call."""
    options = CHANNEL_OPTIONS if is_agent_socket(address) else CHANNEL_OPTIONS + KEEPALIVE_OPTIONS
    return aio.insecure_channel(address, options=options)


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(Path(path).stat().st_mode)
    except OSError:
        return False


def _is_host_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) <= 65_535
