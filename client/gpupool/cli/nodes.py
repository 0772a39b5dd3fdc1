"""gpupool nodes: the hosts of the pool."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from gpupool.cli.output import Column, Listing, takes_output
from gpupool.cli.session import Session, takes_address
from gpupool.cli.words import ago
from gpupool.model.views import NodeView

if TYPE_CHECKING:
    from google.protobuf.message import Message


def _to_proto(node: NodeView) -> Message:
    from gpupool.wire.views import node_view_to_proto

    return node_view_to_proto(node)


def _gpus(node: NodeView) -> str:
    models = Counter(device.model for device in node.inventory.devices)
    return ", ".join(f"{count} x {model}" for model, count in models.items())


NODES: Listing[NodeView] = Listing(
    columns=(
        Column("NODE", lambda node: node.node_id),
        Column("STATE", lambda node: node.state),
        Column("SEEN", lambda node: ago(node.last_seen_unix_s), right=True),
        Column("GPUS", _gpus),
        Column("FREE CPU", lambda node: f"{node.free_cpu_milli / 1000:g}", right=True),
        Column("FREE GIB", lambda node: node.free_host_memory_mib // 1024, right=True),
        Column("AGENT", lambda node: node.agent_version),
        Column("DRIVER", lambda node: node.inventory.driver_version),
        Column("HOLDS", lambda node: len(node.hold_ids) or "", right=True),
        Column("SIMULATED", lambda node: node.inventory.simulated),
    ),
    to_proto=_to_proto,
)


@click.command(epilog="\b\nExamples:\n  gpupool nodes\n  gpupool nodes -o json")
@takes_output
@takes_address
@click.pass_obj
def nodes(session: Session, output: str) -> None:
    """Lists the hosts of the pool."""
    with session.client() as client:
        NODES.show(client.nodes(), output)
