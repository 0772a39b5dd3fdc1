"""Leases: asking for them, keeping, watching and ending them."""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from grpc import aio

from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.ids import CommandId
from gpupool.model.lease import Lease
from gpupool.v1 import lease_pb2 as pb
from gpupool.wire.lease import (
    acquire_ask_from_proto,
    acquire_asks_from_proto,
    lease_id_from_proto,
    list_leases_ask_from_proto,
    refusal_to_proto,
)
from gpupool.wire.request import lease_spec_from_proto
from gpupool.wire.resources import lease_to_proto
from gpupool.wire.views import dry_run_result_to_proto
from gpupool_allocator.core.effects import KeptAlive
from gpupool_allocator.core.events import Watch
from gpupool_allocator.core.pool import Pool
from gpupool_allocator.engine import AnswerStream, Engine, FinalAnswer, RefusedError, Result
from gpupool_allocator.rpc.callers import ForwardKeys
from gpupool_allocator.rpc.commands import LeaseCommands
from gpupool_allocator.rpc.messages import kept_alive_to_proto
from gpupool_allocator.rpc.pages import page_after, page_token
from gpupool_allocator.rpc.refusals import accepted
from gpupool_allocator.rpc.session import Session
from gpupool_allocator.rpc.sizes import check_lease_size

Context = aio.ServicerContext[Any, Any]


class LeaseService:
    """Handlers of gpupool.v1.LeaseService."""

    def __init__(self, engine: Engine, keys: ForwardKeys) -> None:
        self._engine = engine
        self._keys = keys
        self._commands = LeaseCommands(engine)

    async def acquire(self, request: pb.AcquireRequest, context: Context) -> None:
        """Streams states until the lease is active, or with follow until it ends."""
        ask = acquire_ask_from_proto(request)
        check_lease_size(ask.spec, request.ByteSize())
        command = self._commands.acquire(ask, self._keys.sender(context))
        answers = AnswerStream()
        self._engine.submit(command, answers)
        await self._stream(command.command, answers, context, pb.AcquireResponse)

    async def acquire_many(
        self, request: pb.AcquireManyRequest, context: Context
    ) -> pb.AcquireManyResponse:
        """Answers when each is active or refused; each stands alone."""
        sender = self._keys.sender(context)
        asks = acquire_asks_from_proto(request)
        for index, (ask, message) in enumerate(zip(asks, request.requests, strict=True)):
            check_lease_size(ask.spec, message.ByteSize(), f"requests[{index}].spec")
        commands = [self._commands.acquire(ask, sender) for ask in asks]
        answers: dict[CommandId, FinalAnswer] = {}
        try:
            for command in commands:
                answers[command.command] = FinalAnswer()
                self._engine.submit(command, answers[command.command])
            results = [await answer.future for answer in answers.values()]
        finally:
            for command_id in answers:
                self._engine.abandon(command_id)
        return pb.AcquireManyResponse(results=[_acquire_result(result) for result in results])

    async def session(self, requests: Any, context: Context) -> None:
        """Carries commands of many leases in batches."""
        session = Session(self._engine, self._commands, self._keys.sender(context))
        await session.run(requests, context)

    async def keep_alive(
        self, request: pb.KeepAliveRequest, context: Context
    ) -> pb.KeepAliveResponse:
        """Renews leases."""
        command = self._commands.keep_alive(request, self._keys.sender(context))
        return kept_alive_to_proto(accepted(await self._engine.ask(command), KeptAlive))

    async def release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        """Ends a lease; answers when that is durable."""
        command = self._commands.release(request, self._keys.sender(context))
        lease = accepted(await self._engine.ask(command), Lease)
        return pb.ReleaseResponse(lease=lease_to_proto(lease))

    async def get_lease(self, request: pb.GetLeaseRequest, context: Context) -> pb.GetLeaseResponse:
        """Reads one lease."""
        self._keys.sender(context)
        lease_id = lease_id_from_proto(request.lease_id)
        found = await self._engine.read(lambda pool: _dated(pool, [pool.lease(lease_id)]))
        lease = next(iter(found), None)
        if lease is None:
            raise RefusedError(
                Refused(kind=ErrorKind.NOT_FOUND, message=f"no lease {lease_id}", field="lease_id")
            )
        return pb.GetLeaseResponse(lease=lease_to_proto(lease))

    async def list_leases(
        self, request: pb.ListLeasesRequest, context: Context
    ) -> pb.ListLeasesResponse:
        """Lists leases by id."""
        self._keys.sender(context)
        ask = list_leases_ask_from_proto(request)
        filters = (*sorted(ask.states), ask.tenant, ask.node_id)
        (after,) = page_after("leases", filters, ask.page_token, 1)
        leases = await self._engine.read(
            lambda pool: _dated(
                pool,
                pool.leases(
                    after=after,
                    limit=ask.page_size + 1,
                    states=ask.states,
                    tenant=ask.tenant,
                    node_id=ask.node_id,
                ),
            )
        )
        shown = leases[: ask.page_size]
        more = len(leases) > len(shown)
        return pb.ListLeasesResponse(
            leases=[lease_to_proto(lease) for lease in shown],
            next_page_token=page_token("leases", filters, [shown[-1].lease_id]) if more else "",
        )

    async def watch_lease(self, request: pb.WatchLeaseRequest, context: Context) -> None:
        """Streams every later change of one lease, its present state first."""
        command = Watch(
            command=self._engine.ids.command(),
            caller=self._keys.sender(context).caller,
            lease_id=lease_id_from_proto(request.lease_id),
        )
        answers = AnswerStream()
        self._engine.submit(command, answers)
        await self._stream(command.command, answers, context, pb.WatchLeaseResponse)

    async def dry_run(self, request: pb.DryRunRequest, context: Context) -> pb.DryRunResponse:
        """Answers as Acquire would, and changes nothing."""
        sender = self._keys.sender(context)
        spec = sender.spec_for(lease_spec_from_proto(request.spec))
        check_lease_size(spec, request.ByteSize())
        result = await self._engine.read(
            lambda pool: pool.dry_run(spec, time.monotonic(), explain=request.explain)
        )
        if isinstance(result, Refused):
            raise RefusedError(result)
        return dry_run_result_to_proto(result)

    async def _stream(
        self,
        command_id: CommandId,
        answers: AnswerStream,
        context: Context,
        response: type[pb.AcquireResponse] | type[pb.WatchLeaseResponse],
    ) -> None:
        try:
            async for result in answers:
                lease = accepted(result, Lease)
                await context.write(response(lease=lease_to_proto(lease)))
        finally:
            self._engine.abandon(command_id)


def _dated(pool: Pool, leases: Iterable[Lease | None]) -> list[Lease]:
    """The leases that there are, with the wall time at which each expires unless renewed."""
    now, unix_s = time.monotonic(), time.time()
    dated: list[Lease] = []
    for lease in leases:
        if lease is not None:
            at = pool.expires_at(lease.lease_id)
            dated.append(lease if at is None else replace(lease, expire_unix_s=unix_s + at - now))
    return dated


def _acquire_result(result: Result) -> pb.AcquireResult:
    if isinstance(result, Refused):
        return pb.AcquireResult(refusal=refusal_to_proto(result))
    return pb.AcquireResult(lease=lease_to_proto(accepted(result, Lease)))
