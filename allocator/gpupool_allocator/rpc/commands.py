"""Makes the core's lease commands from what came through the door."""

import time
from dataclasses import dataclass

from gpupool.model.errors import ErrorKind, Refused
from gpupool.v1 import lease_pb2 as pb
from gpupool.wire.lease import (
    AcquireAsk,
    lease_id_from_proto,
    lease_ids_from_proto,
    release_reason_from_proto,
)
from gpupool_allocator.core.events import Acquire, KeepAlive, Release
from gpupool_allocator.engine import Engine, RefusedError
from gpupool_allocator.engine.ids import new_lease_id
from gpupool_allocator.rpc.callers import Sender


@dataclass(frozen=True, slots=True)
class LeaseCommands:
    """One handler for plain calls, AcquireMany and sessions alike."""

    engine: Engine

    def acquire(self, ask: AcquireAsk, sender: Sender) -> Acquire:
        """RefusedError where a process shall hold and no agent vouches for one."""
        if ask.caller_process and sender.process is None:
            raise RefusedError(
                Refused(
                    kind=ErrorKind.WRONG_STATE,
                    message="caller_process: only an agent knows the calling process: "
                    "connect to the socket of the agent on this node, or give a ttl",
                    field="caller_process",
                )
            )
        spec = sender.spec_for(ask.spec)
        return Acquire(
            command=self.engine.ids.command(),
            caller=sender.caller_for(spec),
            lease_id=new_lease_id(),
            request_id=ask.request_id,
            spec=spec,
            ttl_s=ask.ttl_s,
            process=sender.process if ask.caller_process else None,
            wait_s=ask.wait_s,
            follow=ask.follow,
            unix_s=time.time(),
        )

    def keep_alive(self, message: pb.KeepAliveRequest, sender: Sender, at: str = "") -> KeepAlive:
        """BadField."""
        return KeepAlive(
            command=self.engine.ids.command(),
            caller=sender.caller,
            lease_ids=lease_ids_from_proto(message.lease_ids, at),
        )

    def release(self, message: pb.ReleaseRequest, sender: Sender, at: str = "") -> Release:
        """BadField."""
        return Release(
            command=self.engine.ids.command(),
            caller=sender.caller,
            lease_id=lease_id_from_proto(message.lease_id, at),
            reason=release_reason_from_proto(message.reason, at),
            unix_s=time.time(),
        )
