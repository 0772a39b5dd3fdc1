"""gpupool events: every change of the pool, with its cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpupool.cli.output import Column, Listing, takes_output
from gpupool.cli.session import Session, takes_address
from gpupool.cli.words import utc
from gpupool.model.event import Event

if TYPE_CHECKING:
    from google.protobuf.message import Message


def _to_proto(event: Event) -> Message:
    from gpupool.wire.pool import event_to_proto

    return event_to_proto(event)


EVENTS: Listing[Event] = Listing(
    columns=(
        Column("SEQUENCE", lambda event: event.sequence, right=True),
        Column("TIME", lambda event: utc(event.unix_s)),
        Column("KIND", lambda event: event.kind),
        Column("SUBJECT", lambda event: event.subject),
        Column("CAUSE", lambda event: event.cause),
    ),
    to_proto=_to_proto,
)


@click.command(
    epilog="""\b
Examples:
  gpupool events
  gpupool events --follow
  gpupool events --after 1200 --subject h100-01 -o json""",
)
@click.option(
    "--after",
    type=click.IntRange(min=-1),
    default=0,
    help="Only after this sequence number; -1 with --follow: only new ones.",
)
@click.option("--subject", default="", help="Only about this lease, node, device or hold.")
@click.option(
    "-f", "--follow", is_flag=True, help="Go on with each new one; JSON is one line each."
)
@takes_output
@takes_address
@click.pass_obj
def events(session: Session, after: int, subject: str, follow: bool, output: str) -> None:
    """Shows what changed in the pool and why, oldest first.

    Following goes on over restarts of the pool and resumes where it was.
    """
    if after < 0 and not follow:
        raise click.UsageError("--after -1 means only new ones: it needs --follow")
    with session.client() as client:
        found = client.events(after=after, subject=subject, follow=follow)
        if not follow:
            EVENTS.show(found, output)
            return
        for event in found:
            EVENTS.show_next(event, output)
