"""Taking processes into leases, for clients on this node.

Who asks is what the kernel says of the connection. Whose the process is, is read here
while a pidfd holds it; that it is on a GPU of the lease, from a reading of the driver
that begins after the question; the rest is the core's to decide.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import structlog

from gpupool.model.errors import ErrorKind, Refused
from gpupool.v1 import agent_pb2, agent_pb2_grpc
from gpupool.wire.agent import AdoptAsk, Adopted, adopt_ask_from_proto, adopted_to_proto
from gpupool.wire.errors import BadField
from gpupool_agent.core.events import AdoptionAnswered, AdoptionAsked, AdoptionComes, NodeEvent
from gpupool_agent.devices.interfaces import ProcessTable
from gpupool_agent.devices.processes import user_name
from gpupool_agent.local.forward import Peer

ANSWER_DEADLINE_S = 20.0
"""Longest wait for a reading of the driver, and for the checkpoint that keeps the adoption."""

Context = grpc.aio.ServicerContext[Any, Any]


class Adopter:
    """Brings the question before the core and the answer back.

    ``read`` returns after a reading of the devices that began after its call.
    """

    def __init__(
        self,
        processes: ProcessTable,
        read: Callable[[], Awaitable[None]],
        handle: Callable[[NodeEvent], None],
    ) -> None:
        self._processes = processes
        self._read = read
        self._handle = handle
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[AdoptionAnswered]] = {}
        self._log = structlog.get_logger()

    async def adopt(self, ask: AdoptAsk, peer: Peer) -> Adopted | Refused:
        """Take a process into a lease; the answer is durable before it is given."""
        asker = user_name(peer.uid) or str(peer.uid)
        # Before the reading, which may be the one that would have the process ended.
        self._handle(AdoptionComes(pid=ask.pid))
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                answer = await self._ask(ask, peer, asker)
        except TimeoutError:
            answer = Refused(
                kind=ErrorKind.TIMEOUT,
                message=f"the node has not read its GPUs for {ANSWER_DEADLINE_S:g} s",
            )
        finally:
            self._handle(AdoptionComes(pid=ask.pid, over=True))
        words = {"pid": ask.pid, "lease_id": ask.lease_id, "user": asker, "uid": peer.uid}
        if isinstance(answer, Refused):
            self._log.warning("process.not_adopted", **words, reason=answer.message)
        else:
            gpus = list(answer.device_uuids)
            self._log.info("process.adopted", **words, gpus=gpus, command=answer.command)
        return answer

    def answered(self, answer: AdoptionAnswered) -> None:
        """The core has decided."""
        waiting = self._waiting.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def _ask(self, ask: AdoptAsk, peer: Peer, asker: str) -> Adopted | Refused:
        await self._read()
        found = self._processes.identify(ask.pid)
        if found is None:
            message = f"there is no process {ask.pid}"
            return Refused(kind=ErrorKind.NOT_FOUND, field="pid", message=message)
        number = next(self._numbers)
        waiting: asyncio.Future[AdoptionAnswered] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            self._handle(
                AdoptionAsked(
                    number=number,
                    lease_id=ask.lease_id,
                    pid=ask.pid,
                    start_ticks=found.start_ticks,
                    process_uid=found.uid,
                    asker_uid=peer.uid,
                    asker=asker,
                )
            )
            answer = await waiting
        finally:
            del self._waiting[number]
        if answer.refused is not None:
            return answer.refused
        return Adopted(device_uuids=answer.device_uuids, command=answer.command)


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """Handlers of gpupool.v1.AgentService on the local socket."""

    def __init__(self, adopter: Adopter, peer_of: Callable[[str], Peer | None]) -> None:
        self._adopter = adopter
        self._peer_of = peer_of

    async def AdoptProcess(  # noqa: N802 - the name is gRPC's
        self, request: agent_pb2.AdoptProcessRequest, context: Context
    ) -> agent_pb2.AdoptProcessResponse:
        """Take a process of this node into a lease."""
        peer = self._peer_of(context.peer())
        if peer is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the calling process is not known")
        try:
            ask = adopt_ask_from_proto(request)
        except BadField as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        answer = await self._adopter.adopt(ask, peer)
        if isinstance(answer, Refused):
            status = grpc.StatusCode[answer.kind.value.grpc]
            await context.abort(status, answer.message)
        return adopted_to_proto(answer)
