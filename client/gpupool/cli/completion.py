"""gpupool completion: what a shell needs to complete our commands."""

import click
from click.shell_completion import get_completion_class

VARIABLE = "_GPUPOOL_COMPLETE"
"""Set by the shell's function when it asks us for completions."""


@click.command(
    epilog="""\b
Examples:
  eval "$(gpupool completion bash)"
  gpupool completion fish > ~/.config/fish/completions/gpupool.fish""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Prints the completion script of a shell."""
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click has all three
    click.echo(kind(context.find_root().command, {}, "gpupool", VARIABLE).source())
