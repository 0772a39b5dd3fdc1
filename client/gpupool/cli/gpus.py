"""gpupool gpus: every device and what is granted on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpupool.cli.matrix import LEGEND, matrix_data, matrix_table
from gpupool.cli.named import check_node
from gpupool.cli.output import Column, Listing, encoded, takes_output
from gpupool.cli.session import Session, takes_address
from gpupool.cli.words import ago, few
from gpupool.model.views import DeviceState, DeviceView

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpupool.client import Client


def _to_proto(device: DeviceView) -> Message:
    from gpupool.wire.views import device_view_to_proto

    return device_view_to_proto(device)


def _used(view: DeviceView) -> str:
    pct = view.telemetry.utilization_pct if view.telemetry is not None else None
    return "" if pct is None else f"{pct}%"


def _is_offered(view: DeviceView) -> bool:
    """Whether anything of it can be granted: what is gone or held back is not free."""
    return view.state is not DeviceState.UNAVAILABLE and not view.last_seen_unix_s


def _free_share(view: DeviceView) -> str:
    return f"{view.free_share_pct}%" if _is_offered(view) else ""


def _free_memory(view: DeviceView) -> int | None:
    return view.free_memory_mib if _is_offered(view) else None


def _why(view: DeviceView) -> str:
    reasons = list(view.reasons)
    if view.last_seen_unix_s:
        reasons.append(f"last seen {ago(view.last_seen_unix_s)} ago")
    return "; ".join(reasons)


DEVICES: Listing[DeviceView] = Listing(
    columns=(
        Column("NODE", lambda view: view.node_id),
        Column("GPU", lambda view: view.device.index, right=True),
        Column("UUID", lambda view: view.device.uuid),
        Column("MODEL", lambda view: view.device.model),
        Column("STATE", lambda view: view.state),
        Column("FREE", _free_share, right=True),
        Column("FREE MIB", _free_memory, right=True),
        Column("BUSY", _used, right=True),
        Column("LEASES", lambda view: few(list(view.lease_ids), 2)),
        Column("WHY NOT OFFERED", _why),
    ),
    to_proto=_to_proto,
)


@click.command(
    epilog="\b\nExamples:\n  gpupool gpus\n  gpupool gpus --node h100-01 -o json\n"
    "  gpupool gpus --matrix --node h100-01"
)
@click.option("--node", "node_id", default="", help="Only of this node.")
@click.option(
    "--matrix",
    is_flag=True,
    help="How the GPUs and network adapters of each node are joined, as nvidia-smi topo -m.",
)
@takes_output
@takes_address
@click.pass_obj
def gpus(session: Session, node_id: str, output: str, *, matrix: bool) -> None:
    """Lists GPUs (and MIG instances) and what is granted on them."""
    with session.client() as client:
        if matrix:
            _show_matrices(client, node_id, output)
            return
        found = sorted(
            client.devices(node_id=node_id), key=lambda view: (view.node_id, view.device.index)
        )
        if node_id and not found:
            check_node(client, node_id)
        DEVICES.show(found, output)


def _show_matrices(client: Client, node_id: str, output: str) -> None:
    nodes = [node for node in client.nodes() if node_id in ("", node.node_id)]
    if node_id and not nodes:
        check_node(client, node_id)
    if output != "table":
        click.echo(encoded(matrix_data(nodes), output))
        return
    for node in nodes:
        click.echo(f"{matrix_table(node)}\n")
    click.echo(LEGEND)
