"""gpupool gpus: every device and what is granted on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpupool.cli.output import Column, Listing, takes_output
from gpupool.cli.session import Session, takes_address
from gpupool.cli.words import few
from gpupool.model.views import DeviceView

if TYPE_CHECKING:
    from google.protobuf.message import Message


def _to_proto(device: DeviceView) -> Message:
    from gpupool.wire.views import device_view_to_proto

    return device_view_to_proto(device)


def _used(view: DeviceView) -> str:
    pct = view.telemetry.utilization_pct if view.telemetry is not None else None
    return "" if pct is None else f"{pct}%"


DEVICES: Listing[DeviceView] = Listing(
    columns=(
        Column("NODE", lambda view: view.node_id),
        Column("GPU", lambda view: view.device.index, right=True),
        Column("UUID", lambda view: view.device.uuid),
        Column("MODEL", lambda view: view.device.model),
        Column("STATE", lambda view: view.state),
        Column("FREE", lambda view: f"{view.free_share_pct}%", right=True),
        Column("FREE MIB", lambda view: view.free_memory_mib, right=True),
        Column("BUSY", _used, right=True),
        Column("LEASES", lambda view: few(list(view.lease_ids), 2)),
        Column("WHY NOT OFFERED", lambda view: "; ".join(view.reasons)),
    ),
    to_proto=_to_proto,
)


@click.command(epilog="\b\nExamples:\n  gpupool gpus\n  gpupool gpus --node h100-01 -o json")
@click.option("--node", "node_id", default="", help="Only of this node.")
@takes_output
@takes_address
@click.pass_obj
def gpus(session: Session, node_id: str, output: str) -> None:
    """Lists GPUs (and MIG instances) and what is granted on them."""
    with session.client() as client:
        found = sorted(
            client.devices(node_id=node_id), key=lambda view: (view.node_id, view.device.index)
        )
        DEVICES.show(found, output)
