"""One order of pods against a live pool: offer, check, give back, check again."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.benchmarks.openb_replay.checks import (
    tokens_by_device,
    wrong_history,
    wrong_tokens,
    wrong_when_empty,
    wrong_when_loaded,
)
from tests.benchmarks.openb_replay.figures import Cost, Figures, Usage, percentiles, share_pct
from tests.benchmarks.openb_replay.holder import Outcome
from tests.benchmarks.openb_replay.live import PROGRESS_S, LivePool
from tests.benchmarks.openb_replay.offering import HolderProcess, offer_all
from tests.benchmarks.openb_replay.picture import look
from tests.benchmarks.openb_replay.trace import TraceNode, TracePod

from gpupool import AsyncClient
from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool.model.views import PoolSummary

STALLED_S = 60.0
"""Longest time after the releases in which no agent confirms any GPU clean."""

LOOK_S = 0.2
SHOWN_MAX = 20


class ChecksFailedError(Exception):
    """Something is not as promised; the text says what."""


@dataclass(slots=True)
class Replay:
    """What all orders on one pool share.

    ``floors``: highest token seen on each device. ``sequence``: last event read.
    """

    pool: LivePool
    client: AsyncClient
    holders: Sequence[HolderProcess]
    hosts: Sequence[TraceNode]
    in_flight: int
    floors: dict[DeviceUuid, int] = field(default_factory=dict[DeviceUuid, int])
    sequence: int = 0

    async def run(self, order: str, pods: Sequence[TracePod]) -> Figures:
        """Offers the pods, keeps and releases them. Raises ChecksFailedError."""
        print(f"{order}: {len(pods)} pods, one after the other", flush=True)
        before = self._usage()
        begun_s = time.monotonic()
        outcomes = await offer_all(
            self.holders, pods, in_flight=self.in_flight, progress=Progress(len(pods)).see
        )
        offering_s = time.monotonic() - begun_s
        after = self._usage()
        await self._check_loaded(pods, outcomes)
        held = [LeaseId(each.lease_id) for each in outcomes if each.granted]
        release_s, empty_s = await self._release(len(held))
        await self._check_history(held)
        return self._figures(
            order,
            pods,
            outcomes,
            (offering_s, release_s, empty_s),
            list(zip(before, after, strict=True)),
        )

    def _usage(self) -> tuple[Usage, Usage, Usage]:
        allocator, fleets = self.pool.usage()
        return allocator, fleets, Usage.of([holder.pid for holder in self.holders])

    async def _check_loaded(self, pods: Sequence[TracePod], outcomes: Sequence[Outcome]) -> None:
        _fail_on(
            f"pod {pods[each.number].name}: {each.problem}" for each in outcomes if each.problem
        )
        held = {LeaseId(each.lease_id): pods[each.number] for each in outcomes if each.granted}
        if len(held) != sum(each.granted for each in outcomes):
            raise ChecksFailedError("two pods were given the same lease")
        refused = [pods[each.number] for each in outcomes if not each.granted]
        picture = await look(self.client, self.pool.fleets)
        _fail_on(wrong_when_loaded(picture, self.hosts, held, refused))
        _fail_on(wrong_tokens(picture.leases, self.floors))
        self.floors |= {uuid: used[-1] for uuid, used in tokens_by_device(picture.leases).items()}
        running = sum(len(runs) for runs in picture.agents.values())
        print(
            f"  checked: {len(picture.leases)} leases held, {running} assignments run on "
            f"{len(picture.agents)} agents, the books agree; "
            f"none of {len(refused)} refused pods would fit",
            flush=True,
        )

    async def _release(self, granted: int) -> tuple[float, float]:
        """Gives everything back; seconds until released, and until the pool was empty."""
        print("  releasing all", flush=True)
        begun_s = time.monotonic()
        released = sum(await asyncio.gather(*(holder.release() for holder in self.holders)))
        release_s = time.monotonic() - begun_s
        if released != granted:
            raise ChecksFailedError(f"{released} of {granted} leases could be released")
        pool, empty_s = await self._until_empty(begun_s)
        picture = await look(self.client, self.pool.fleets)
        _fail_on(wrong_when_empty(picture, self.hosts))
        print(
            f"  checked: empty again, {pool.leases} leases, {pool.devices_free} of "
            f"{pool.devices} GPUs free, the agents run nothing",
            flush=True,
        )
        return release_s, empty_s

    async def _check_history(self, held: Sequence[LeaseId]) -> None:
        events = [event async for event in self.client.events(after=self.sequence)]
        _fail_on(wrong_history(events, self.sequence, frozenset(held)))
        self.sequence += len(events)
        lost = sum(event.kind == "node.unreachable" for event in events)
        print(
            f"  checked: {len(events)} events tell each lease's whole life; "
            f"nodes were lost {lost} times",
            flush=True,
        )

    async def _until_empty(self, begun_s: float) -> tuple[PoolSummary, float]:
        """Waits until nothing is held, or nothing moves; what is left the checks will say."""
        least, moved_s, told_s = None, time.monotonic(), time.monotonic()
        while True:
            pool = await self.client.pool()
            now = time.monotonic()
            left = (pool.leases, pool.devices - pool.devices_free)
            if left != least:
                least, moved_s = left, now
            if left == (0, 0) or now - moved_s > STALLED_S:
                return pool, now - begun_s
            if now - told_s >= PROGRESS_S:
                told_s = now
                print(f"  {left[0]} leases are ending on {left[1]} GPUs", flush=True)
            await asyncio.sleep(LOOK_S)

    def _figures(
        self,
        order: str,
        pods: Sequence[TracePod],
        outcomes: Sequence[Outcome],
        times_s: tuple[float, float, float],
        usage: Sequence[tuple[Usage, Usage]],
    ) -> Figures:
        capacity_milli = 1000 * sum(host.gpus for host in self.hosts)
        granted = [each for each in outcomes if each.granted]
        refused = [each for each in outcomes if not each.granted]
        grant_ms, refusal_ms = percentiles(granted), percentiles(refused)
        allocator, fleets, clients = (Cost.between(*each) for each in usage)
        offering_s, release_s, empty_s = times_s
        return Figures(
            order=order,
            pods=len(pods),
            granted=len(granted),
            refused=len(refused),
            arrived_pct=share_pct(pods, capacity_milli),
            allocated_pct=share_pct([pods[each.number] for each in granted], capacity_milli),
            offering_s=offering_s,
            grants_per_s=len(granted) / offering_s,
            grant_ms_p50=grant_ms[0],
            grant_ms_p99=grant_ms[1],
            refusal_ms_p50=refusal_ms[0],
            refusal_ms_p99=refusal_ms[1],
            allocator=allocator,
            allocator_cpu_ms_per_grant=1000 * allocator.cpu_s / max(1, len(granted)),
            fleets=fleets,
            clients=clients,
            release_s=release_s,
            empty_s=empty_s,
        )


class Progress:
    """Says now and then how far it is."""

    def __init__(self, pods: int) -> None:
        self._pods = pods
        self._answered = self._granted = 0
        self._told_s = self._begun_s = time.monotonic()

    def see(self, outcome: Outcome) -> None:
        """One more pod was answered."""
        self._answered += 1
        self._granted += outcome.granted
        now = time.monotonic()
        if now - self._told_s >= PROGRESS_S:
            self._told_s = now
            print(
                f"  {self._answered} of {self._pods} answered, {self._granted} granted, "
                f"{self._answered / (now - self._begun_s):.0f} a second",
                flush=True,
            )


def _fail_on(wrong: Iterator[str]) -> None:
    """ChecksFailedError with the first of what is wrong, if anything is."""
    found = list(wrong)
    if found:
        shown = "\n  ".join(found[:SHOWN_MAX])
        raise ChecksFailedError(f"{len(found)} things are wrong:\n  {shown}")
