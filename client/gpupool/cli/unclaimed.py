"""gpupool unclaimed: what nodes run and the pool's store does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpupool.cli.output import Column, Listing, takes_output
from gpupool.cli.session import Session, takes_address
from gpupool.cli.words import devices_of
from gpupool.model.views import UnclaimedAssignment

if TYPE_CHECKING:
    from google.protobuf.message import Message


def _to_proto(found: UnclaimedAssignment) -> Message:
    from gpupool.wire.views import unclaimed_to_proto

    return unclaimed_to_proto(found)


UNCLAIMED: Listing[UnclaimedAssignment] = Listing(
    columns=(
        Column("NODE", lambda found: found.node_id),
        Column("LEASE", lambda found: found.lease_id),
        Column("RANK", lambda found: found.rank, right=True),
        Column("UID", lambda found: found.uid, right=True),
        Column("STATE", lambda found: "ending" if found.ending else "kept"),
        Column("DEVICES", devices_of),
    ),
    to_proto=_to_proto,
)


@click.group()
def unclaimed() -> None:
    """Unclaimed work: nodes run it, and the restored store does not know it."""


@unclaimed.command(name="list", epilog="\b\nExample:\n  gpupool unclaimed list -o json")
@takes_output
@takes_address
@click.pass_obj
def list_unclaimed(session: Session, output: str) -> None:
    """Lists what nodes run of leases that the store does not know.

    It is kept, and its GPUs are granted to nobody else, until an operator ends it.
    """
    with session.client() as client:
        UNCLAIMED.show(client.unclaimed(), output)


@unclaimed.command(epilog="\b\nExample:\n  gpupool unclaimed end h100-01 LEASE")
@click.argument("node_id", metavar="NODE")
@click.argument("lease_id", metavar="LEASE")
@takes_address
@click.pass_obj
def end(session: Session, node_id: str, lease_id: str) -> None:
    """Ends all that NODE runs of LEASE, its processes too.

    It is listed until NODE, once connected, has nothing of it left.
    """
    with session.client() as client:
        client.end_unclaimed(node_id, lease_id)
        click.echo(f"{lease_id} on {node_id} is ending")
