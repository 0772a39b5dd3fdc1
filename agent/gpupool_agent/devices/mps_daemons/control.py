"""Commands to one daemon, and what its answers mean (protocol 2)."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from gpupool.model.ids import DeviceUuid
from gpupool_agent.devices.interfaces import MpsError, SliceLimits
from gpupool_agent.devices.privileged import (
    CommandOutcome,
    DaemonFacts,
    NotPermittedError,
    Privileged,
    PrivilegedError,
)

T = TypeVar("T")

COMMAND_DEADLINE_S = 5.0
SETTING_DEADLINE_S = 15.0
"""Of what a slice depends on: enough for a helper that is being restarted meanwhile."""

SERVER_DEADLINE_S = 30.0
_LOOK_S = 0.01
QUIT_TIMEOUT_S = 2
UNLIMITED_MIB = 9_999_999
"""A limit that no GPU reaches: one that was set cannot be taken away."""

ACTIVE = "ACTIVE"
FAULT = "FAULT"
UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """Most that any client of a server gets; ``memory_mib`` None: was never limited."""

    share_pct: int
    memory_mib: int | None


def ceiling_of(slices: Iterable[SliceLimits], *, limited_before: bool) -> Ceiling:
    """The largest slice decides: each client's own environment only tightens it."""
    every = list(slices)
    memory_mib: int | None = max((each.memory_mib or UNLIMITED_MIB for each in every), default=0)
    if not limited_before and memory_mib == UNLIMITED_MIB:
        memory_mib = None
    return Ceiling(
        share_pct=max((each.share_pct or 100 for each in every), default=100),
        memory_mib=memory_mib,
    )


class _Settings:
    """Commands that set, and after all of them those that read each back by its name."""

    def __init__(self) -> None:
        self._sets: list[str] = []
        self._reads: list[str] = []
        self._expected: list[str] = []

    def add(self, name: str, of: str, value: str) -> None:
        """One more setting; ``of`` is whose, a server or a device."""
        self._sets.append(" ".join(filter(None, (f"set_{name}", of, value.removesuffix(".0")))))
        self._reads.append(" ".join(filter(None, (f"get_{name}", of))))
        self._expected.append(value)

    def __iter__(self) -> Iterator[str]:
        """Every command."""
        return iter((*self._sets, *self._reads))

    def check(self, said: list[str]) -> None:
        """Hold what was read against what was set; raises MpsError."""
        # Some commands echo what they have set; each read gives one line or none.
        read = said[-len(self._expected) :]
        if [_plain(line) for line in read] != [_plain(value) for value in self._expected]:
            raise MpsError(f"{'; '.join(self._sets)}: it reads back as {read}")


class Control:
    """The control program of one slot. Every method raises MpsError."""

    def __init__(self, privileged: Privileged, slot: str, gpu: DeviceUuid) -> None:
        self._privileged = privileged
        self._slot = slot
        self._gpu = gpu

    async def ask(self, *lines: str, deadline_s: float = COMMAND_DEADLINE_S) -> list[str]:
        """Give commands; the lines of the answer."""
        outcome = await within(
            self._privileged.mps_commands(self._slot, lines),
            deadline_s,
            f"{lines[0].split()[0]}: the MPS daemon does not answer",
        )
        if outcome.exit_code:
            said = (outcome.errors or outcome.output).strip() or f"exit code {outcome.exit_code}"
            raise MpsError(f"{lines[0].split()[0]}: {said}")
        return outcome.output.split("\n")[:-1] if outcome.output else []

    async def set_limits(self, ceiling: Ceiling, server: int) -> None:
        """Set what future servers and new clients of this one have, and read it back."""
        settings = self._defaults(ceiling)
        settings.add("active_thread_percentage", str(server), f"{ceiling.share_pct}.0")
        if ceiling.memory_mib is not None:
            settings.add(
                "device_pinned_mem_limit", f"{server} {self._gpu}", f"{ceiling.memory_mib}M"
            )
        settings.check(await self.ask(*settings, deadline_s=SETTING_DEADLINE_S))

    async def _begin_server(self, ceiling: Ceiling, uid: int) -> list[int]:
        settings = self._defaults(ceiling)
        begin = (*settings, f"start_server -uid {uid}", "get_server_list")
        said = await self.ask(*begin, deadline_s=SETTING_DEADLINE_S)
        # No setting reads back as a whole number: 10.0, 1000M or 1G.
        servers = list(itertools.takewhile(str.isdecimal, reversed(said)))
        settings.check(said[: len(said) - len(servers)])
        return [int(server) for server in reversed(servers)]

    def _defaults(self, ceiling: Ceiling) -> "_Settings":
        settings = _Settings()
        settings.add("default_active_thread_percentage", "", f"{ceiling.share_pct}.0")
        if ceiling.memory_mib is not None:
            limit = f"{ceiling.memory_mib}M"
            settings.add("default_device_pinned_mem_limit", str(self._gpu), limit)
        return settings

    async def servers(self) -> list[int]:
        """Process ids of the servers."""
        return _numbers(await self.ask("get_server_list"))

    async def have_server(
        self, ceiling: Ceiling, uid: int, start_ticks: Callable[[int], int | None]
    ) -> DaemonFacts:
        """Set what future servers have, read it back, have a server for a user that serves.

        Gives the last of the servers.
        """
        deadline_s = time.monotonic() + SERVER_DEADLINE_S
        servers = await self._begin_server(ceiling, uid)
        while True:
            ticks = start_ticks(servers[-1]) if servers else None
            if ticks is None:
                raise MpsError(f"{self._gpu}: its MPS server ended at its start")
            state = await self.status(servers[-1], deadline_s=SETTING_DEADLINE_S)
            if state in (ACTIVE, UNKNOWN):
                return DaemonFacts(pid=servers[-1], start_ticks=ticks)
            if time.monotonic() > deadline_s:
                raise MpsError(f"{self._gpu}: its MPS server stays in state {state}")
            await asyncio.sleep(_LOOK_S)
            servers = await self.servers()

    async def status(self, server: int, *, deadline_s: float = COMMAND_DEADLINE_S) -> str:
        """State of a server; UNKNOWN where the daemon is too old to say."""
        said = await self.ask(f"get_server_status {server}", deadline_s=deadline_s)
        if not said or said[0].startswith("Unknown command"):
            return UNKNOWN
        return said[0].strip()

    async def clients(self, server: int) -> list[int]:
        """Process ids of a server's clients; none when the server is gone."""
        said = await self.ask(f"get_client_list {server}")
        return [int(line) for line in said if line.strip().isdecimal()]

    async def terminate(self, server: int, client: int) -> bool:
        """Tear a client's work down; whether the server did."""
        said = await self.ask(f"terminate_client {server} {client}")
        return said[-1:] == ["0"]

    async def shut_down(self, server: int, *, force: bool) -> None:
        """Have a server end."""
        await self.ask(f"shutdown_server {server}{' -f' if force else ''}")

    async def quit(self) -> None:
        """Have the daemon end, and every server with it."""
        outcome = await within(
            self._privileged.mps_commands(self._slot, (f"quit -t {QUIT_TIMEOUT_S}",)),
            COMMAND_DEADLINE_S,
            "quit: the MPS daemon does not answer",
        )
        del outcome  # Its exit code says whether servers ended well, not whether they ended.


async def within(work: Coroutine[Any, Any, T], deadline_s: float, late: str) -> T:
    """Wait for a privileged action. Raises MpsError: ``late``, refused, or failed."""
    try:
        async with asyncio.timeout(deadline_s):
            return await work
    except TimeoutError as error:
        raise MpsError(f"{late} within {deadline_s:g} s") from error
    except (NotPermittedError, PrivilegedError) as error:
        raise MpsError(str(error)) from error


def seen_by_probe(gpu: DeviceUuid, outcome: CommandOutcome, limits: SliceLimits) -> int:
    """Multiprocessors that a slice's probe saw; MpsError where it is not as it should be."""
    if outcome.exit_code:
        said = (outcome.errors or outcome.output).strip() or f"exit code {outcome.exit_code}"
        raise MpsError(f"{gpu}: the probe got no client through: {said}")
    try:
        seen = int(json.loads(outcome.output)["sm_count"])
    except (ValueError, KeyError, TypeError) as error:
        raise MpsError(f"{gpu}: the probe said {outcome.output[:200]!r}") from error
    allowed = limits.sm_count * (limits.share_pct or 100)
    if limits.sm_count and seen * 100 > allowed:
        raise MpsError(
            f"{gpu}: the probe saw {seen} multiprocessors, of {limits.share_pct} % of"
            f" {limits.sm_count}"
        )
    return seen


def _numbers(lines: list[str]) -> list[int]:
    if not all(line.strip().isdecimal() for line in lines):
        raise MpsError(f"the MPS daemon lists servers as {lines}")
    return [int(line) for line in lines]


def _plain(text: str) -> str:
    """An amount in its smaller unit: a daemon reads 1024M back as 1G."""
    return f"{int(text[:-1]) * 1024}M" if text[:-1].isdecimal() and text[-1:] == "G" else text
