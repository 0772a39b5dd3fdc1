"""The open streams of the agents, and the watch over their silence."""

import asyncio
import time
from typing import Any

from grpc import aio

from gpupool.model.assignment import DesiredState, Welcome
from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.ids import ConnectionId, NodeId
from gpupool.v1 import node_pb2 as pb
from gpupool.wire.assignment import desired_state_to_proto
from gpupool.wire.node import welcome_to_proto
from gpupool_allocator.engine import RefusedError
from gpupool_allocator.rpc.callers import ForwardKeys

Context = aio.ServicerContext[Any, Any]

SWEEP_S = 1.0
"""How often silence is looked for."""


class AgentStream:
    """One agent's stream, from the engine's side: never blocks, holds little.

    Only the newest desired state waits: it replaces whatever a slow agent has not
    been sent yet.
    """

    def __init__(self, node_id: NodeId, forward_key: str, keys: ForwardKeys) -> None:
        self.node_id = node_id
        self.forward_key = forward_key
        self.connection = ConnectionId(0)
        self.heard_at = time.monotonic()
        self.end_reason = ""
        self._keys = keys
        self._welcome: Welcome | None = None
        self._desired: DesiredState | None = None
        self._refused: Refused | None = None
        self._ended = False
        self._wake = asyncio.Event()

    def welcome(self, welcome: Welcome) -> None:
        """Answers Hello; from now on the agent may forward calls."""
        self._keys.put(self.node_id, self.connection, self.forward_key)
        self._welcome = welcome
        self._wake.set()

    def desire(self, desired: DesiredState) -> None:
        """Replaces what the node shall run."""
        self._desired = desired
        self._wake.set()

    def close(self, refused: Refused) -> None:
        """Ends the stream with a refusal; the first one counts."""
        if self._refused is None:
            self._refused = refused
            self.end_reason = self.end_reason or refused.message
        self._wake.set()

    def end(self, reason: str) -> None:
        """The agent has closed its side."""
        self._ended = True
        self.end_reason = self.end_reason or reason
        self._wake.set()

    async def write(self, context: Context) -> None:
        """Writes down what there is until the stream ends. RefusedError when closed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._refused is not None:
                raise RefusedError(self._refused)
            if self._welcome is not None:
                welcome, self._welcome = self._welcome, None
                await context.write(pb.ConnectResponse(welcome=welcome_to_proto(welcome)))
            while self._desired is not None:
                desired, self._desired = self._desired, None
                state = desired_state_to_proto(desired)
                await context.write(pb.ConnectResponse(desired_state=state))
            if self._ended:
                return


class AgentStreams:
    """All open streams; at most ``nodes_max``."""

    def __init__(self, *, nodes_max: int, heartbeat_timeout_s: float) -> None:
        self._streams: set[AgentStream] = set()
        self._nodes_max = nodes_max
        self._timeout_s = heartbeat_timeout_s

    def add(self, stream: AgentStream) -> None:
        """RefusedError when there are too many."""
        if len(self._streams) >= self._nodes_max:
            raise RefusedError(
                Refused(
                    kind=ErrorKind.UNAVAILABLE,
                    message=f"{self._nodes_max} agents are connected, which is nodes_max",
                    retry_after_s=60.0,
                )
            )
        self._streams.add(stream)

    def remove(self, stream: AgentStream) -> None:
        """The stream is gone."""
        self._streams.discard(stream)

    def close_all(self, refused: Refused) -> None:
        """Sends every agent away, as at a stop."""
        for stream in self._streams:
            stream.close(refused)

    async def watch_silence(self) -> None:
        """Closes streams that have been silent for too long; runs for ever.

        Silence is counted only while this process runs: after a pause of its own
        (a suspended machine, a stopped process) the agents' messages still wait to be
        read, so each gets its full time anew.
        """
        swept_at = time.monotonic()
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            paused_s = now - swept_at - SWEEP_S
            swept_at = now
            for stream in self._streams:
                if paused_s > SWEEP_S:
                    stream.heard_at = now
                elif now - stream.heard_at > self._timeout_s:
                    stream.close(
                        Refused(
                            kind=ErrorKind.TIMEOUT,
                            message=f"no message for {self._timeout_s:g} s",
                        )
                    )
