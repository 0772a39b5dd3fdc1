"""gpupool help: help of a command, and topics that belong to no single one."""

import click

from gpupool.cli.child import NOT_EXECUTABLE, NOT_FOUND
from gpupool.cli.spec_file import EXAMPLE
from gpupool.model.errors import ErrorKind

INTERRUPTED = 130

SPEC_FILE = """\
A file for --spec (of run, lease create and explain) holds one request, a LeaseSpec, in YAML
or JSON, complete: no other option says more of it. Its fields are those of LeaseSpec in
protos/gpupool/v1/resources.proto, which gives their ranges, as "gpupool lease show LEASE -o yaml"
shows them under "spec". Times are as in options: 30s, 2h. What is not accepted is told by
its path, its value and what is accepted there. An example:"""


def exit_codes() -> list[tuple[int, str]]:
    """Every exit code with its meaning, in order."""
    kinds: dict[int, list[str]] = {}
    for kind in ErrorKind:
        kinds.setdefault(kind.value.exit_code, []).append(kind.value.grpc)
    codes = {code: ", ".join(names) for code, names in kinds.items()}
    codes[0] = "done"
    codes[ErrorKind.INVALID.value.exit_code] += "; a bad option or argument"
    codes[INTERRUPTED] += "; Ctrl-C"
    codes[NOT_EXECUTABLE] = "gpupool run: the command cannot be executed"
    codes[NOT_FOUND] = "gpupool run: there is no such command"
    codes[1] = "the reader of our output has gone"
    return sorted(codes.items())


@click.command(
    name="help",
    epilog="\b\nExamples:\n  gpupool help lease create\n  gpupool help exit-codes\n"
    "  gpupool help spec-file",
)
@click.argument("words", metavar="[COMMAND... | exit-codes | spec-file]", nargs=-1)
@click.pass_context
def help_command(context: click.Context, words: tuple[str, ...]) -> None:
    """Shows the help of a command, what exit codes mean, or a spec file."""
    if words == ("exit-codes",):
        click.echo("gpupool run gives back its command's exit code, 128+n for signal n.")
        click.echo("Codes of our own; 75 says that trying again later may help:\n")
        for code, meaning in exit_codes():
            click.echo(f"{code:>5}  {meaning}")
        return
    if words == ("spec-file",):
        click.echo(f"{SPEC_FILE}\n")
        click.echo(EXAMPLE, nl=False)
        return
    found = context.find_root()
    for word in words:
        group = found.command
        command = group.get_command(found, word) if isinstance(group, click.Group) else None
        if command is None:
            raise click.UsageError(f"no such command: {' '.join(words)}")
        found = click.Context(command, info_name=word, parent=found)
    click.echo(found.get_help())
