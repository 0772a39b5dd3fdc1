"""gpupool events: every change of the pool, with its cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpupool.cli.named import check_subject
from gpupool.cli.output import Column, Listing, printable, takes_output
from gpupool.cli.session import Session, takes_address
from gpupool.cli.words import utc
from gpupool.model.event import Event

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpupool.client import Client


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
        if not follow:
            found = list(client.events(after=after, subject=subject))
            if subject and not found:
                check_subject(client, subject)
            EVENTS.show(found, output)
            return
        _say_what_is_waited_for(client, after, subject)
        for event in client.events(after=after, subject=subject, follow=True):
            EVENTS.show_next(event, output)


def _say_what_is_waited_for(client: Client, after: int, subject: str) -> None:
    """What is to be followed may never come: then the wait says what it is for."""
    from gpupool.errors import NotFoundError

    newest = client.newest_event()
    if after > newest:
        click.echo(
            f"gpupool: after: the newest event is {newest}, waiting for those after {after}",
            err=True,
        )
    if subject:
        try:
            check_subject(client, subject)
        except NotFoundError as unknown:
            click.echo(f"gpupool: {printable(unknown.message)}; waiting for it", err=True)
