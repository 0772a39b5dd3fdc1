"""One Session stream: commands of many leases in, answers and changes out.

Commands of a stream reach the engine in their order. Answers wait in one bounded
queue; a client that does not read it loses its stream, not the allocator's memory.
Its leases live on by their own clocks.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import structlog
from grpc import aio

from gpupool.model import limits
from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.hold import Hold
from gpupool.model.ids import CommandId
from gpupool.model.lease import Lease
from gpupool.v1 import lease_pb2 as pb
from gpupool.wire import door
from gpupool.wire.errors import BadField
from gpupool.wire.lease import acquire_ask_from_proto, refusal_to_proto
from gpupool.wire.resources import lease_to_proto
from gpupool_allocator.core.effects import Done, KeptAlive
from gpupool_allocator.core.events import Acquire, KeepAlive, Release
from gpupool_allocator.engine import Engine, RefusedError, Result
from gpupool_allocator.rpc.callers import Sender
from gpupool_allocator.rpc.commands import LeaseCommands
from gpupool_allocator.rpc.messages import kept_alive_to_proto
from gpupool_allocator.rpc.refusals import bad_input
from gpupool_allocator.rpc.sizes import check_lease_size

log = structlog.stdlib.get_logger("rpc")

Context = aio.ServicerContext[Any, Any]

OUTBOUND_MAX = 8192
"""Answers that wait for a slow reader."""

OPEN_MAX = 8192
"""Commands of one stream that still have answers to come."""

EVENTS_PER_MESSAGE = 256

_TOO_SLOW = Refused(
    kind=ErrorKind.NO_CAPACITY,
    message=f"the client does not read: {OUTBOUND_MAX} answers are waiting for it",
)


_Command = Acquire | KeepAlive | Release


@dataclass(frozen=True, slots=True)
class _Answered:
    """An answer on its way; ``command`` is None for one refused at the door."""

    sequence: int
    command: _Command | None
    result: Result

    def to_proto(self) -> pb.SessionEvent:
        event = pb.SessionEvent(sequence=self.sequence)
        match self.result:
            case Refused():
                event.refusal.CopyFrom(refusal_to_proto(self.result))
            case KeptAlive():
                event.keep_alive.CopyFrom(kept_alive_to_proto(self.result))
            case Lease() if isinstance(self.command, Release):
                event.release.lease.CopyFrom(lease_to_proto(self.result))
            case Lease():
                event.lease.CopyFrom(lease_to_proto(self.result))
            case Hold() | Done():
                raise AssertionError(f"no answer to a session's command: {self.result}")
        return event


class _Answers:
    """Sink of one command of the stream."""

    __slots__ = ("_command", "_sequence", "_session")

    def __init__(self, session: "Session", sequence: int, command: _Command) -> None:
        self._session = session
        self._sequence = sequence
        self._command = command

    def deliver(self, result: Result, *, final: bool) -> None:
        if final:
            self._session.open.pop(self._sequence, None)
        self._session.push(_Answered(self._sequence, self._command, result))


class Session:
    """State of one stream."""

    def __init__(self, engine: Engine, commands: LeaseCommands, sender: Sender) -> None:
        self.open: dict[int, CommandId] = {}
        self._engine = engine
        self._commands = commands
        self._sender = sender
        self._outbound: deque[_Answered] = deque()
        self._overrun = asyncio.Event()
        self._wake = asyncio.Event()

    async def run(self, requests: AsyncIterator[pb.SessionRequest], context: Context) -> None:
        """Serves the stream until the client ends it and every answer is given."""
        reading = asyncio.create_task(self._read(requests))
        reading.add_done_callback(lambda _: self._wake.set())
        writing = asyncio.create_task(self._write(context, reading))
        # A write to a client that does not read never returns: it is not waited for.
        overrun = asyncio.create_task(self._overrun.wait())
        try:
            await asyncio.wait({writing, overrun}, return_when=asyncio.FIRST_COMPLETED)
            if overrun.done():
                log.warning("session.overrun", peer=context.peer(), open=len(self.open))
                raise RefusedError(_TOO_SLOW)
            await writing
        finally:
            for task in (reading, writing, overrun):
                task.cancel()
            for command_id in self.open.values():
                self._engine.abandon(command_id)

    def push(self, answered: _Answered) -> None:
        """Queues an answer; a full queue ends the stream."""
        if len(self._outbound) >= OUTBOUND_MAX:
            self._overrun.set()
        else:
            self._outbound.append(answered)
        self._wake.set()

    async def _write(self, context: Context, reading: "asyncio.Task[None]") -> None:
        while not (reading.done() and not self.open and not self._outbound):
            await self._wake.wait()
            self._wake.clear()
            while self._outbound:
                count = min(len(self._outbound), EVENTS_PER_MESSAGE)
                events = [self._outbound.popleft().to_proto() for _ in range(count)]
                await context.write(pb.SessionResponse(events=events))
            if reading.done():
                reading.result()

    async def _read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        async for request in requests:
            door.count("", "commands", request.commands, 1, limits.BATCH_MAX)
            for index, command in enumerate(request.commands):
                try:
                    self._submit(command, f"commands[{index}]")
                except BadField as error:
                    self.push(_Answered(command.sequence, None, bad_input(error)))
                except RefusedError as error:
                    self.push(_Answered(command.sequence, None, error.refused))

    def _submit(self, message: pb.SessionCommand, at: str) -> None:
        sequence = message.sequence
        if sequence in self.open:
            raise BadField(f"{at}.sequence", sequence, "numbers of no open command")
        if len(self.open) >= OPEN_MAX:
            raise RefusedError(
                Refused(
                    kind=ErrorKind.NO_CAPACITY,
                    message=f"{OPEN_MAX} commands of this stream wait for their answers",
                )
            )
        command = self._command(message, at)
        self._engine.submit(command, _Answers(self, sequence, command))
        self.open[sequence] = command.command

    def _command(self, message: pb.SessionCommand, at: str) -> _Command:
        match message.WhichOneof("command"):
            case "acquire":
                ask = acquire_ask_from_proto(message.acquire, f"{at}.acquire")
                check_lease_size(ask.spec, message.ByteSize(), f"{at}.acquire.spec")
                return self._commands.acquire(ask, self._sender)
            case "keep_alive":
                inner = f"{at}.keep_alive"
                return self._commands.keep_alive(message.keep_alive, self._sender, inner)
            case "release":
                return self._commands.release(message.release, self._sender, f"{at}.release")
            case _:
                raise BadField(f"{at}.command", "nothing", "acquire, keep_alive, release")
