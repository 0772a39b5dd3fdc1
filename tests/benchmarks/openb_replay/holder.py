"""One client process: takes leases through the SDK as it is told, and keeps them.

    python -m tests.benchmarks.openb_replay.holder HOST:PORT

One JSON object a line on standard input, one answer a line on standard output.
``{"number": N, "pod": {...}}`` asks for a lease and does not wait;
``{"release": true}`` gives everything back. It ends with its input.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.benchmarks.openb_replay.trace import TracePod

from gpupool import AsyncClient, AsyncLease
from gpupool.errors import GpupoolError, NoCapacityError
from gpupool.model.lease import LeaseState

TTL_S = 3600.0
"""Longer than a run on a slow machine; the SDK renews it all the same."""

RELEASES_AT_ONCE = 32
LINE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an offered pod ended: a lease, or a refusal for want of room.

    ``elapsed_ms`` is from the call until the lease was active, or refused. Anything
    else that came of it is a ``problem``.
    """

    number: int
    elapsed_ms: float
    lease_id: str = ""
    causes: tuple[str, ...] = ()
    problem: str = ""

    @property
    def granted(self) -> bool:
        """Whether it has a lease."""
        return bool(self.lease_id)


@dataclass(slots=True)
class Holder:
    """The leases of this process."""

    client: AsyncClient
    leases: list[AsyncLease] = field(default_factory=list[AsyncLease])

    async def offer(self, number: int, pod: TracePod) -> Outcome:
        """Asks for one lease that must fit at once."""
        begun_s = time.perf_counter()
        causes: tuple[str, ...] = ()
        problem = ""
        lease = self.client.lease(spec=pod.spec(), ttl=TTL_S, wait=0)
        try:
            await lease.acquire()
        except NoCapacityError as error:
            if error.explanation is not None:
                causes = tuple(cause.code for cause in error.explanation.causes)
            problem = "" if causes else "refused without a counted cause"
        except GpupoolError as error:
            problem = f"{type(error).__name__}: {error}"
        elapsed_ms = 1000 * (time.perf_counter() - begun_s)
        if causes or problem:
            return Outcome(number=number, elapsed_ms=elapsed_ms, causes=causes, problem=problem)
        self.leases.append(lease)
        return Outcome(
            number=number,
            elapsed_ms=elapsed_ms,
            lease_id=lease.id,
            problem=wrong_environment(lease),
        )

    async def release_all(self) -> int:
        """Releases everything; the number of leases that ended as they should."""
        room = asyncio.Semaphore(RELEASES_AT_ONCE)

        async def release(lease: AsyncLease) -> bool:
            async with room:
                await lease.release()
            return lease.state in (LeaseState.RELEASING, LeaseState.RELEASED)

        ended = await asyncio.gather(*(release(lease) for lease in self.leases))
        self.leases.clear()
        return sum(ended)


def wrong_environment(lease: AsyncLease) -> str:
    """What is wrong with what the holder was given to run with; empty: nothing."""
    granted = ",".join(share.device_uuid for share in lease.members[0].place.devices)
    for variable, value in (("CUDA_VISIBLE_DEVICES", granted), ("GPUPOOL_LEASE_ID", lease.id)):
        if lease.env.get(variable) != value:
            return f"{variable} is {lease.env.get(variable)!r}, not {value!r}"
    return ""


async def serve(address: str) -> None:
    """Carries out orders until there are no more."""
    orders = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        holder = Holder(client)

        async def offer(number: int, pod: TracePod) -> None:
            answer(asdict(await holder.offer(number, pod)))

        async for line in orders:
            order: dict[str, Any] = json.loads(line)
            if "release" in order:
                answer({"released": await holder.release_all()})
            else:
                pod = order["pod"] | {"models": tuple(order["pod"]["models"])}
                group.create_task(offer(order["number"], TracePod(**pod)))


def answer(content: dict[str, Any]) -> None:
    """One line to whoever gives the orders."""
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
