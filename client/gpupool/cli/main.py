"""The command ``gpupool``: its commands, and how errors and interrupts leave it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from gpupool import __version__
from gpupool.cli.completion import VARIABLE, completion
from gpupool.cli.events import events
from gpupool.cli.explain import explain
from gpupool.cli.gpus import gpus
from gpupool.cli.help import INTERRUPTED, help_command
from gpupool.cli.hold import hold
from gpupool.cli.lease import lease
from gpupool.cli.nodes import nodes
from gpupool.cli.output import printable
from gpupool.cli.run import run
from gpupool.cli.session import ADDRESS_HELP, Session
from gpupool.cli.text import hold_to_unicode
from gpupool.cli.top import pool, top
from gpupool.cli.unclaimed import unclaimed
from gpupool.cli.words import cause_line
from gpupool.errors import GpupoolError
from gpupool.model.errors import ErrorKind


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  gpupool run --gpus 0.1 -- python serve.py
  gpupool lease create --gpus 8 --level node --ttl 2h
  gpupool explain --gpus 9

Exit codes: "gpupool help exit-codes".""",
)
@click.version_option(__version__, prog_name="gpupool", message="%(prog)s %(version)s")
@click.option("--address", metavar="ADDRESS", help=ADDRESS_HELP)
@click.pass_context
def cli(context: click.Context, address: str | None) -> None:
    """The GPUs of many hosts as one pool: take whole GPUs, parts of one, or gangs."""
    context.obj = Session(address)


@click.command()
def version() -> None:
    """Prints the version of this command."""
    click.echo(f"gpupool {__version__}")


for _command in (
    run,
    lease,
    explain,
    nodes,
    gpus,
    pool,
    top,
    events,
    hold,
    unclaimed,
    completion,
    version,
    help_command,
):
    cli.add_command(_command)
hold_to_unicode(cli)


def main() -> None:
    """Entry point of the command."""
    sys.exit(run_with(sys.argv[1:]))


def run_with(arguments: Sequence[str]) -> int:
    """Runs one command; its exit code. Errors are on standard error, without traceback."""
    try:
        result = cli.main(
            list(arguments), prog_name="gpupool", complete_var=VARIABLE, standalone_mode=False
        )
    except click.UsageError as error:
        error.show()
        return ErrorKind.INVALID.value.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except GpupoolError as error:
        _show(error)
        return error.kind.value.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def _show(error: GpupoolError) -> None:
    click.echo(f"gpupool: {printable(error.message)}", err=True)
    if error.field and error.field not in error.message:
        click.echo(f"  field: {printable(error.field)}", err=True)
    if error.explanation is not None:
        for cause in error.explanation.causes:
            click.echo(f"  {printable(cause_line(cause))}", err=True)
        if error.explanation.nearest_change:
            click.echo(f"  would help: {printable(error.explanation.nearest_change)}", err=True)
    if error.retry_after_s is not None:
        click.echo(f"  try again in {error.retry_after_s:g} s", err=True)


if __name__ == "__main__":
    main()
