"""The CDI specs of the leases on this node: written when one is prepared, gone with it."""

import asyncio
import json
from collections.abc import Callable

import structlog

from gpupool.model.assignment import Assignment, AssignmentKey
from gpupool.model.ids import LeaseId
from gpupool_agent.core.cdi import VARIABLE, CdiMember, reference, spec_document
from gpupool_agent.devices.interfaces import CdiStore
from gpupool_agent.devices.privileged import NotPermittedError, PrivilegedError


class LeaseSpecs:
    """Keeps the specs in ``store`` to what is prepared; None: this node writes none.

    A container is one way to use a lease of many, so a spec that cannot be written
    fails nothing: ``trouble`` hears why, and of its end with an empty text.
    """

    def __init__(self, store: CdiStore | None, trouble: Callable[[str], None]) -> None:
        self._store = store
        self._trouble = trouble
        self._members: dict[LeaseId, dict[AssignmentKey, CdiMember]] = {}
        self._lock = asyncio.Lock()
        self._log = structlog.get_logger()

    async def write(
        self, assignment: Assignment, environment: Callable[[dict[str, str]], dict[str, str]]
    ) -> dict[str, str]:
        """Write the spec of a member; gives what that adds to its environment.

        ``environment`` makes the whole one out of that addition.
        """
        if self._store is None:
            return {}
        key = assignment.key
        added = {VARIABLE: reference(key)}
        member = CdiMember(
            key=key,
            environment=environment(added),
            gpus=tuple(share.device_uuid for share in assignment.place.devices),
        )
        async with self._lock:
            members = self._members.setdefault(key.lease_id, {})
            members[key] = member
            try:
                await self._write(self._store, key.lease_id)
            except (NotPermittedError, PrivilegedError) as error:
                members.pop(key)
                self._trouble(str(error))
                return {}
        self._trouble("")
        return added

    async def remove(self, assignment: Assignment) -> None:
        """Take a member out of its lease's spec; the last one takes the spec along.

        Raises PrivilegedError where it is still there.
        """
        if self._store is None:
            return
        key = assignment.key
        async with self._lock:
            members = self._members.get(key.lease_id, {})
            members.pop(key, None)
            try:
                await self._write(self._store, key.lease_id)
            except NotPermittedError as error:
                # Nobody is there who could; the next start of the agent sweeps.
                self._trouble(str(error))

    async def sweep(self, wanted: Callable[[], set[LeaseId]]) -> None:
        """Remove the specs of leases that are not wanted: a dead agent's, or a last boot's."""
        if self._store is None:
            return
        try:
            for lease_id in await self._store.cdi_leases():
                async with self._lock:
                    if lease_id not in wanted() and not self._members.get(lease_id):
                        await self._store.remove_cdi(lease_id)
                        self._log.warning("cdi.orphan_removed", lease_id=lease_id)
        except (NotPermittedError, PrivilegedError) as error:
            self._trouble(str(error))

    async def _write(self, store: CdiStore, lease_id: LeaseId) -> None:
        members = self._members.get(lease_id)
        if members:
            document = spec_document(lease_id, list(members.values()))
            await store.write_cdi(lease_id, json.dumps(document, indent=1).encode())
            return
        self._members.pop(lease_id, None)
        await store.remove_cdi(lease_id)
