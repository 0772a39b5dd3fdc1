"""gpupool hold: reasons not to use something."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from gpupool.cli.output import Column, Listing, takes_output
from gpupool.cli.session import Session, takes_address
from gpupool.cli.words import ago, utc
from gpupool.model.hold import Hold, HoldScope

if TYPE_CHECKING:
    from google.protobuf.message import Message


def _to_proto(found: Hold) -> Message:
    from gpupool.wire.pool import hold_to_proto

    return hold_to_proto(found)


HOLDS: Listing[Hold] = Listing(
    columns=(
        Column("HOLD", lambda found: found.hold_id),
        Column("KIND", lambda found: found.kind),
        Column("SCOPE", lambda found: found.scope),
        Column("TARGET", lambda found: found.target),
        Column("OWNER", lambda found: found.owner.user or found.owner.tenant),
        Column("AGE", lambda found: ago(found.create_unix_s), right=True),
        Column("ENDS", lambda found: utc(found.expire_unix_s) if found.expire_unix_s else ""),
        Column("LETS THROUGH", lambda found: ",".join(found.allowed_tenants)),
        Column("REASON", lambda found: found.reason),
    ),
    to_proto=_to_proto,
)


@click.group()
def hold() -> None:
    """Holds: reasons not to use a node or GPU."""


@hold.command(
    epilog="""\b
Examples:
  gpupool hold add h100-01 --reason "fan 3 is loud"
  gpupool hold add GPU-5a3c... --reason "test" --for 2h --allow lab""",
)
@click.argument("target")
@click.option("--reason", required=True, help="For people, 1..253 characters.")
@click.option("--for", "lasting", metavar="TIME", help='It ends by itself then, as "2h".')
@click.option(
    "--allow", "allowed", multiple=True, metavar="TENANT", help="Let through; repeatable."
)
@takes_output
@takes_address
@click.pass_obj
def add(
    session: Session,
    target: str,
    reason: str,
    lasting: str | None,
    allowed: tuple[str, ...],
    output: str,
) -> None:
    """Takes TARGET, a node's id or a GPU's whole UUID, out of use.

    What runs there goes on; nothing new is placed there.
    """
    from gpupool.sdk.quantities import duration_s

    is_device = target.startswith(("GPU-", "MIG-"))
    expire = time.time() + duration_s(lasting, "for") if lasting else None
    with session.client() as client:
        made = client.add_hold(
            HoldScope.DEVICE if is_device else HoldScope.NODE,
            target,
            reason,
            allowed_tenants=allowed,
            expire_unix_s=expire,
        )
    if output == "table":
        HOLDS.show([made], output)
    else:
        HOLDS.show_one(made, output)


@hold.command(name="list", epilog="\b\nExample:\n  gpupool hold list -o json")
@takes_output
@takes_address
@click.pass_obj
def list_holds(session: Session, output: str) -> None:
    """Lists holds, the queue's own ones too."""
    with session.client() as client:
        HOLDS.show(client.holds(), output)


@hold.command(epilog="\b\nExample:\n  gpupool hold remove HOLD")
@click.argument("hold_ids", metavar="HOLD...", nargs=-1, required=True)
@takes_address
@click.pass_obj
def remove(session: Session, hold_ids: tuple[str, ...]) -> None:
    """Removes operators' holds."""
    with session.client() as client:
        for hold_id in hold_ids:
            client.remove_hold(hold_id)
            click.echo(f"{hold_id} removed")
