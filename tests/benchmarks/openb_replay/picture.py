"""What the pool and its agents say of themselves at one moment, asked from outside."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpupool import AsyncClient
from gpupool.model.assignment import AssignmentState
from gpupool.model.ids import LeaseId, NodeId
from gpupool.model.lease import DeviceShare, Lease, Place
from gpupool.model.views import DeviceView, NodeView, PoolSummary
from gpupool_agent.simulated.control import inject


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """One assignment, as either side has it in its books."""

    lease_id: LeaseId
    rank: int
    token: int
    uid: int
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Everything that can be seen. ``agents``: what each node's agent says it runs."""

    leases: Sequence[Lease]
    devices: Sequence[DeviceView]
    nodes: Sequence[NodeView]
    summary: PoolSummary
    agents: Mapping[NodeId, frozenset[Running]]
    unprepared: Sequence[str] = ()


async def look(client: AsyncClient, fleets: Mapping[Path, Sequence[NodeId]]) -> Picture:
    """Asks the allocator, and each agent through its fleet's control directory."""
    agents: dict[NodeId, frozenset[Running]] = {}
    unprepared: list[str] = []
    for control, node_ids in fleets.items():
        for node_id, rows in (await asyncio.to_thread(_ask_agents, control, node_ids)).items():
            agents[node_id] = frozenset(_running(row) for row in rows)
            unprepared += [
                f"node {node_id}: {row['lease_id']} is {row['state']}"
                for row in rows
                if row["state"] != AssignmentState.PREPARED
            ]
    return Picture(
        leases=[lease async for lease in client.list_leases()],
        devices=[device async for device in client.devices()],
        nodes=[node async for node in client.nodes()],
        summary=await client.pool(),
        agents=agents,
        unprepared=unprepared,
    )


def _ask_agents(control: Path, node_ids: Sequence[NodeId]) -> dict[NodeId, list[dict[str, Any]]]:
    return {node_id: inject(control, node_id, "assignments") for node_id in node_ids}


def _running(row: dict[str, Any]) -> Running:
    place = row["place"]
    devices = tuple(DeviceShare(**share) for share in place["devices"])
    return Running(
        lease_id=LeaseId(row["lease_id"]),
        rank=row["rank"],
        token=row["token"],
        uid=row["uid"],
        place=Place(**place | {"devices": devices}),
    )


def on_node(lease: Lease) -> dict[NodeId, set[Running]]:
    """What a lease should run, by node, as the allocator has it."""
    wanted: dict[NodeId, set[Running]] = {}
    for member in lease.members:
        running = Running(
            lease_id=lease.lease_id,
            rank=member.rank,
            token=member.token,
            uid=lease.spec.uid,
            place=member.place,
        )
        wanted.setdefault(member.place.node_id, set()).add(running)
    return wanted
