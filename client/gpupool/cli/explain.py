"""gpupool explain: would this be granted now, and if not, why not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpupool.cli.lease import MEMBERS
from gpupool.cli.output import Column, Listing, table, takes_output
from gpupool.cli.session import Session, takes_address
from gpupool.cli.shape import shape_of, takes_shape
from gpupool.cli.words import cause_line
from gpupool.model.views import DryRunResult, NodeVerdict

if TYPE_CHECKING:
    from google.protobuf.message import Message


def _to_proto(result: DryRunResult) -> Message:
    from gpupool.wire.views import dry_run_result_to_proto

    return dry_run_result_to_proto(result)


ANSWER: Listing[DryRunResult] = Listing(columns=(), to_proto=_to_proto)

VERDICTS: tuple[Column[NodeVerdict], ...] = (
    Column("NODE", lambda verdict: verdict.node_id),
    Column("WHY NOT", lambda verdict: "; ".join(map(cause_line, verdict.causes)) or "it fits"),
)


@click.command(
    short_help="Says whether a request would be granted now, and why not.",
    epilog="""\b
Examples:
  gpupool explain --gpus 9
  gpupool explain --gpus 8 --replicas 16 --nodes""",
)
@takes_shape
@click.option("--nodes", is_flag=True, help="Also say for each node why not; slower.")
@takes_output
@takes_address
@click.pass_obj
def explain(session: Session, /, nodes: bool, output: str, **options: Any) -> None:
    """Says whether a request would be granted now, where, or why not.

    The answer is the one that the request itself would get; nothing is changed. The
    exit code is 0 for either answer.
    """
    shape = shape_of(options)
    with session.client() as client:
        result = client.dry_run(explain=nodes, **shape)
    if output != "table":
        ANSWER.show_one(result, output)
        return
    if result.granted:
        click.echo("yes, it would be granted now:\n" + table(MEMBERS, result.members))
    else:
        click.echo(f"no: {result.explanation.summary or 'no reason given'}")
        for cause in result.explanation.causes:
            click.echo(f"  {cause_line(cause)}")
        if result.explanation.nearest_change:
            click.echo(f"would help: {result.explanation.nearest_change}")
    if result.verdicts:
        click.echo("\n" + table(VERDICTS, result.verdicts))
