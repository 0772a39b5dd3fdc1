"""CDI specs in a directory that the agent may write itself."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gpupool.model.ids import LeaseId
from gpupool_agent.devices.blocking import BlockingCalls, CallHangsError
from gpupool_agent.devices.privileged import PrivilegedError

T = TypeVar("T")

DEADLINE_S = 10.0
PREFIX, SUFFIX = "gpupool-lease-", ".json"
LEASE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,200}")
"""What may be part of a file's name here."""


class CdiDirectory:
    """``CdiStore`` over a directory that engines read, made where it is missing.

    A spec is written beside its place and renamed: an engine never reads half of one.
    Everybody may read it: engines of users without privileges have to.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._calls = BlockingCalls("CDI directory")

    async def write_cdi(self, lease_id: LeaseId, spec: bytes) -> None:
        """Write a lease's spec, or replace it. Raises PrivilegedError."""
        path = self._path(lease_id)

        def write() -> None:
            self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.new")
            beside.write_bytes(spec)
            beside.chmod(0o644)
            beside.replace(path)

        await self._call(write)

    async def remove_cdi(self, lease_id: LeaseId) -> None:
        """Remove it, if it is there. Raises PrivilegedError."""
        path = self._path(lease_id)
        await self._call(lambda: path.unlink(missing_ok=True))

    async def cdi_leases(self) -> tuple[LeaseId, ...]:
        """Leases that have a spec here. Raises PrivilegedError."""
        return await self._call(self._leases)

    def _leases(self) -> tuple[LeaseId, ...]:
        try:
            names = sorted(os.listdir(self._directory))  # noqa: PTH208 - only the names
        except FileNotFoundError:
            return ()
        return tuple(
            LeaseId(name[len(PREFIX) : -len(SUFFIX)])
            for name in names
            if name.startswith(PREFIX) and name.endswith(SUFFIX)
        )

    def _path(self, lease_id: LeaseId) -> Path:
        if not LEASE_ID.fullmatch(lease_id):
            raise PrivilegedError(f"lease id {lease_id!r} makes no file name")
        return self._directory / f"{PREFIX}{lease_id}{SUFFIX}"

    async def _call(self, work: Callable[[], T]) -> T:
        try:
            return await self._calls.call(work, DEADLINE_S)
        except (OSError, CallHangsError) as error:
            raise PrivilegedError(str(error)) from error
