"""C74: the allocator is killed again and again, and nobody is told a lie.

500 leases are held and at least 50 calls are in flight at each ``kill -9``. The moments
are spread over start, commit and reply; a seed decides, so that a failure can be had
again as far as two busy cores allow.
"""

import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path

import pytest
from tests.e2e.crash.ledger import Ledger, wrong_after_restart
from tests.e2e.crash.load import HELD_MIN, Load
from tests.e2e.crash.pool import CrashingPool, crashing_pool

from gpupool.model.ids import DeviceUuid
from gpupool.model.lease import Lease

IN_FLIGHT_MIN = 50
SHOWN_MAX = 20


class Moment(StrEnum):
    """When the allocator is killed."""

    START = "start"
    COMMIT = "commit"
    REPLY = "reply"
    ANY = "any"


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.timeout(1200)
async def test_c74_20_kills_lose_nothing_that_was_acknowledged() -> None:
    await crash_again_and_again(kills=20, seed=74)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.timeout(3600)
async def test_c74_100_kills_lose_nothing_that_was_acknowledged() -> None:
    await crash_again_and_again(kills=100, seed=int(os.environ.get("GPUPOOL_SEED", "7474")))


async def crash_again_and_again(*, kills: int, seed: int) -> None:
    """Kills, restarts and checks, so many times."""
    chance = random.Random(seed)
    moments = [list(Moment)[number % len(Moment)] for number in range(kills)]
    chance.shuffle(moments)
    # Paths of Unix sockets are short, those of pytest's own folders are not.
    with tempfile.TemporaryDirectory(prefix="gpupool-crash-") as folder:
        async with crashing_pool(Path(folder)) as pool:
            crashes = Crashes(pool, chance)
            for moment in moments:
                await crashes.crash(moment)
            await crashes.restart_and_check()
            print(crashes.summary(seed))
            assert crashes.killed.total() == kills


class Crashes:
    """One run: what clients were told so far, and which tokens were seen."""

    def __init__(self, pool: CrashingPool, chance: random.Random) -> None:
        self.killed: Counter[Moment] = Counter()
        self._pool = pool
        self._chance = chance
        self._ledger = Ledger(chance)
        self._tokens: dict[DeviceUuid, int] = {}
        self._leases: set[str] = set()
        self._answers = 0
        self._in_flight: list[int] = []
        self._held: list[int] = []
        self._begun_s = time.monotonic()

    async def crash(self, moment: Moment) -> None:
        """Restarts the allocator if it is down, and kills it at such a moment."""
        if moment is Moment.START and self._ledger.entries:
            await self._kill_at_start()
            return
        if not self._pool.daemon.is_alive:
            await self.restart_and_check()
        async with Load(self._pool.address, self._ledger) as load:
            await load.until_held()
            await self._kill(moment, load)
            self._count(moment, load)

    async def _kill_at_start(self) -> None:
        """From the first instruction until after calls are served again."""
        if self._pool.daemon.is_alive:
            self._pool.daemon.kill()
        async with Load(self._pool.address, self._ledger) as load:
            await load.busy.wait()
            self._pool.daemon.launch()
            await asyncio.sleep(self._chance.uniform(0, 1.3 * self._pool.start_s))
            self._pool.daemon.kill()
            self._count(Moment.START, load)

    async def _kill(self, moment: Moment, load: Load) -> None:
        pool = self._pool
        match moment:
            case Moment.COMMIT:
                delay_s = self._chance.uniform(0, 0.005)
                assert await asyncio.to_thread(pool.kill_in_commit, delay_s, 60.0)
            case Moment.REPLY:
                await load.until_answers(self._chance.randint(1, 64))
                pool.daemon.kill()
            case Moment.START | Moment.ANY:
                await asyncio.sleep(self._chance.uniform(0, 0.5))
                pool.daemon.kill()

    def _count(self, moment: Moment, load: Load) -> None:
        self._in_flight.append(load.in_flight)
        self._held.append(len(self._ledger.held))
        assert load.in_flight >= IN_FLIGHT_MIN
        assert len(self._ledger.held) >= HELD_MIN
        self.killed[moment] += 1
        self._answers += load.answers

    async def restart_and_check(self) -> None:
        """What was acknowledged is there; then, when all is calm, all books agree."""
        assert not self._pool.daemon.is_alive
        self._pool.start_allocator()
        leases = await self._pool.everything()
        self._fail_on(wrong_after_restart(self._ledger, leases))
        for lease in leases:
            entry = self._ledger.entries.get(lease.request_id)
            if entry is not None:
                entry.lease_id = lease.lease_id
        self._ledger.close()
        picture, wrong = await self._pool.until_calm()
        self._fail_on(wrong)
        self._fail_on(self._wrong_tokens(picture.leases))

    def _wrong_tokens(self, leases: Sequence[Lease]) -> list[str]:
        """A lease that is new on a device has a higher token than any before it there."""
        wrong: list[str] = []
        highest = dict(self._tokens)
        for lease in leases:
            for member in lease.members:
                for share in member.place.devices:
                    before = self._tokens.get(share.device_uuid, 0)
                    if lease.lease_id not in self._leases and member.token <= before:
                        wrong.append(f"{lease.lease_id} has token {member.token}, {before} was")
                    highest[share.device_uuid] = max(
                        highest.get(share.device_uuid, 0), member.token
                    )
        self._tokens = highest
        self._leases = {lease.lease_id for lease in leases}
        return wrong

    def _fail_on(self, wrong: Iterable[str]) -> None:
        found = list(wrong)
        if found:
            shown = "\n".join(found[:SHOWN_MAX])
            pytest.fail(
                f"after {self.killed.total()} kills {len(found)} things are wrong:\n{shown}\n"
                f"{self._pool.daemon.log()[-4000:]}"
            )

    def summary(self, seed: int) -> str:
        """Figures of the run."""
        moments = ", ".join(f"{count} at {moment}" for moment, count in self.killed.items())
        return (
            f"seed {seed}: {self.killed.total()} kills ({moments}) in "
            f"{time.monotonic() - self._begun_s:.0f} s; held at least {min(self._held)}, in flight "
            f"at least {min(self._in_flight)}, {self._answers} answers; "
            f"last start {self._pool.start_s:.2f} s, load {os.getloadavg()[0]:.1f}"
        )
