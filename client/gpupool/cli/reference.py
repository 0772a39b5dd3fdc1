"""Renders docs/cli.md from the commands: python -m gpupool.cli.reference > docs/cli.md."""

import sys
from collections.abc import Iterator

import click

from gpupool.cli.help import SPEC_FILE, exit_codes
from gpupool.cli.main import cli
from gpupool.cli.spec_file import EXAMPLE

_WIDTH = 100


def reference() -> str:
    """The page, ending in a newline."""
    lines = [
        "# The command line",
        "",
        "Made from the commands themselves by `python -m gpupool.cli.reference`; do not edit.",
        "",
        "## Exit codes",
        "",
        "`gpupool run` gives back its command's exit code, 128+n where signal n ended it.",
        "Codes of our own; 75 says that trying again later may help:",
        "",
        "| code | meaning |",
        "|---|---|",
        *(f"| {code} | {meaning} |" for code, meaning in exit_codes()),
        "",
        "## Spec files",
        "",
        SPEC_FILE,
        "",
        "```yaml",
        *EXAMPLE.splitlines(),
        "```",
    ]
    # Made by the command, so that it has the command's own settings: -h, for one.
    root = cli.make_context(
        "gpupool",
        [],
        resilient_parsing=True,
        terminal_width=_WIDTH,
        max_content_width=_WIDTH,
    )
    for context in _contexts(root):
        lines += ["", f"## {context.command_path}", "", "```text", _help(context), "```"]
    return "\n".join(lines) + "\n"


def _contexts(context: click.Context) -> Iterator[click.Context]:
    yield context
    command = context.command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None:
                yield from _contexts(
                    click.Context(
                        child,
                        info_name=name,
                        parent=context,
                        terminal_width=_WIDTH,
                        max_content_width=_WIDTH,
                    )
                )


def _help(context: click.Context) -> str:
    return "\n".join(line.rstrip() for line in context.get_help().splitlines())


if __name__ == "__main__":
    sys.stdout.write(reference())
