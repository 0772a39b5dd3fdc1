"""gpupool pool and top: the sums of the pool, once or live."""

from __future__ import annotations

import sys
import time
from itertools import islice
from typing import TYPE_CHECKING

import click

from gpupool.cli.lease import LEASES
from gpupool.cli.output import Column, Listing, table, takes_output
from gpupool.cli.session import Session, takes_address
from gpupool.model.views import PoolSummary

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpupool.client import Client

_LEASES_SHOWN_MAX = 200


def _to_proto(summary: PoolSummary) -> Message:
    from gpupool.wire.views import pool_summary_to_proto

    return pool_summary_to_proto(summary)


POOL: Listing[PoolSummary] = Listing(
    columns=(
        Column("NODES", lambda pool: f"{pool.nodes_connected}/{pool.nodes}", right=True),
        Column("GPUS", lambda pool: pool.devices, right=True),
        Column("FREE", lambda pool: pool.devices_free, right=True),
        Column("USED", lambda pool: pool.devices_used, right=True),
        Column("NOT OFFERED", lambda pool: pool.devices_unavailable, right=True),
        Column("STRAYS", lambda pool: pool.strays, right=True),
        Column("GRANTED", lambda pool: f"{pool.granted_share_pct / 100:g} GPU", right=True),
        Column("LEASES", lambda pool: pool.leases, right=True),
        Column("WAITING", lambda pool: pool.waiting, right=True),
        Column("EPOCH", lambda pool: pool.epoch, right=True),
        Column("VERSION", lambda pool: pool.version),
        Column("CHANGES", lambda pool: pool.read_only_reason or "accepted"),
    ),
    to_proto=_to_proto,
)


@click.command(epilog="\b\nExample:\n  gpupool pool -o json")
@takes_output
@takes_address
@click.pass_obj
def pool(session: Session, output: str) -> None:
    """Shows the sums of the pool."""
    with session.client() as client:
        summary = client.pool()
    if output == "table":
        POOL.show([summary], output)
    else:
        POOL.show_one(summary, output)


@click.command(
    short_help="Shows the pool live.",
    epilog="\b\nExamples:\n  gpupool top\n  gpupool top --interval 10",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2, max=3600),
    default=2.0,
    show_default=True,
    help="Seconds between looks.",
)
@takes_address
@click.pass_obj
def top(session: Session, interval: float) -> None:
    """Shows the pool and its leases live until Ctrl-C; once where there is no terminal."""
    from gpupool.errors import UnavailableError

    with session.client() as client:
        if not sys.stdout.isatty():
            click.echo(_screen(client))
            return
        from rich.live import Live
        from rich.text import Text

        with Live(screen=True, auto_refresh=False) as live:
            while True:
                try:
                    text = _screen(client)
                except UnavailableError as error:
                    text = str(error)  # it may come back while somebody is looking
                live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)
                time.sleep(interval)


def _screen(client: Client) -> str:
    sums = table(POOL.columns, [client.pool()])
    shown = list(islice(client.list_leases(), _LEASES_SHOWN_MAX))
    return f"{sums}\n\n{table(LEASES.columns, shown)}"
