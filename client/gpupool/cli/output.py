"""Listings as table, JSON or YAML. JSON and YAML have the names of the protos."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

if TYPE_CHECKING:
    from google.protobuf.message import Message

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Column(Generic[_Item]):
    """One column of a table. Numbers stand to the right."""

    title: str
    cell: Callable[[_Item], object]
    right: bool = False


@dataclass(frozen=True, slots=True)
class Listing(Generic[_Item]):
    """How items of one kind are shown."""

    columns: Sequence[Column[_Item]]
    to_proto: Callable[[_Item], Message]

    def show(self, items: Iterable[_Item], output: str) -> None:
        """All items: a table with a heading, a JSON array or a YAML sequence."""
        if output == "table":
            click.echo(table(self.columns, list(items)))
        else:
            click.echo(encoded([as_data(self.to_proto(item)) for item in items], output))

    def show_one(self, item: _Item, output: str) -> None:
        """One item as a JSON object or YAML mapping."""
        click.echo(encoded(as_data(self.to_proto(item)), output))

    def show_next(self, item: _Item, output: str) -> None:
        """One item of an endless listing: a line, a JSON line or a YAML document."""
        match output:
            case "json":
                click.echo(json.dumps(as_data(self.to_proto(item))))
            case "yaml":
                click.echo("---\n" + encoded(as_data(self.to_proto(item)), output))
            case _:
                click.echo("  ".join(printable(column.cell(item)) for column in self.columns))


def takes_output(command: _Command) -> _Command:
    """Adds -o table|json|yaml as ``output``."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json", "yaml"]),
        default="table",
        show_default=True,
        help="JSON and YAML have the field names of the protos.",
    )(command)


def table(columns: Sequence[Column[_Item]], items: Sequence[_Item]) -> str:
    """Columns as wide as their content; headings even when there is nothing."""
    rows = [[printable(column.cell(item)) for column in columns] for item in items]
    rows.insert(0, [column.title for column in columns])
    widths = [max(len(row[place]) for row in rows) for place in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in rows
    )


def printable(value: object) -> str:
    """A cell's text; what would move a terminal's cursor or colour is shown as "?"."""
    text = "-" if value is None or value == "" else str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def as_data(message: Message) -> dict[str, Any]:
    """A message as JSON has it, every plain field there even when zero."""
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def encoded(data: object, output: str) -> str:
    """Plain data as JSON or YAML."""
    if output == "json":
        return json.dumps(data, indent=2)
    import yaml

    text: str = yaml.safe_dump(data, sort_keys=False)  # pyright: ignore[reportUnknownMemberType] # loose stubs
    return text.rstrip()
