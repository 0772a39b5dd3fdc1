"""Answers of the core that are no shared words, as messages."""

from gpupool.v1 import lease_pb2
from gpupool.wire.times import duration_to_proto
from gpupool_allocator.core.effects import KeptAlive


def kept_alive_to_proto(kept: KeptAlive) -> lease_pb2.KeepAliveResponse:
    """What became of a renewal."""
    message = lease_pb2.KeepAliveResponse(gone_lease_ids=kept.gone)
    if kept.ttl_s is not None:
        message.ttl.CopyFrom(duration_to_proto(kept.ttl_s))
    return message
