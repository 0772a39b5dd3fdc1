"""Offers pods to the pool in their order, through several client processes.

The published protocol is one by one. A pod that is on its way to its node does not
hold up the next: pod N is offered as soon as pod N - ``in_flight`` and all before it
were answered, to the clients in turn. So no pod overtakes more than ``in_flight - 1``
others, and with 1 the order is exact.
"""

import asyncio
import json
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from tests.benchmarks.openb_replay.holder import LINE_BYTES_MAX, Outcome
from tests.benchmarks.openb_replay.trace import TracePod

ENDING_S = 15.0
ANSWER_S = 120.0
"""Longest time for one answer: a pool that is alive has refused or granted long before."""


class HolderLostError(Exception):
    """A client process ended by itself."""


class HolderProcess:
    """One client process, and the answers that it owes."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.pid = process.pid
        self._process = process
        self._log = log
        self._offered: dict[int, asyncio.Future[Outcome]] = {}
        self._released: asyncio.Future[int] | None = None
        self._reading = asyncio.create_task(self._read())

    def offer(self, number: int, pod: TracePod) -> asyncio.Future[Outcome]:
        """Hands out a pod; the future is done when the pool has answered."""
        future = asyncio.get_running_loop().create_future()
        self._offered[number] = future
        self._order({"number": number, "pod": asdict(pod)})
        return future

    async def release(self) -> int:
        """Gives all leases back; how many ended as they should."""
        self._released = asyncio.get_running_loop().create_future()
        self._order({"release": True})
        return await self._released

    async def end(self) -> None:
        """Ends the process, whatever it does."""
        self._reading.cancel()
        await asyncio.wait({self._reading})
        for future in self._owed():
            future.cancel()
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), ENDING_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    def _order(self, content: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(content).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if "released" in answer:
                assert self._released is not None
                self._released.set_result(answer["released"])
            else:
                answer["causes"] = tuple(answer["causes"])
                outcome = Outcome(**answer)
                self._offered.pop(outcome.number).set_result(outcome)
        status = await self._process.wait()
        lost = HolderLostError(f"client process {self.pid} ended with {status}: see {self._log}")
        for future in self._owed():
            future.set_exception(lost)

    def _owed(self) -> list[asyncio.Future[Any]]:
        owed: list[asyncio.Future[Any]] = [*self._offered.values()]
        if self._released is not None:
            owed.append(self._released)
        return [future for future in owed if not future.done()]


@asynccontextmanager
async def holders(
    address: str, count: int, logs: Path
) -> AsyncGenerator[list[HolderProcess], None]:
    """Client processes that are there inside the block."""
    started: list[HolderProcess] = []
    try:
        for number in range(count):
            log = logs / f"client-{number}.log"
            with log.open("wb") as errors:
                started.append(HolderProcess(await _start(address, errors), log))
        yield started
    finally:
        await asyncio.gather(*(holder.end() for holder in started))


async def _start(address: str, errors: IO[bytes]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.benchmarks.openb_replay.holder", address),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        limit=LINE_BYTES_MAX,
        # Ctrl-C reaches the one who ends them in order, and nobody else.
        start_new_session=True,
    )


async def offer_all(
    clients: Sequence[HolderProcess],
    pods: Sequence[TracePod],
    *,
    in_flight: int,
    progress: Callable[[Outcome], None],
) -> list[Outcome]:
    """Offers the pods; their outcomes in the same order. HolderLostError, TimeoutError."""
    outcomes: list[Outcome] = []
    window: deque[asyncio.Future[Outcome]] = deque()

    async def answered() -> None:
        outcomes.append(await asyncio.wait_for(window.popleft(), ANSWER_S))
        progress(outcomes[-1])

    for number, pod in enumerate(pods):
        if len(window) == in_flight:
            await answered()
        window.append(clients[number % len(clients)].offer(number, pod))
    while window:
        await answered()
    return outcomes
