"""The YAML of a request's file, read so that no text in it ends in a traceback.

PyYAML's constructors trust a scalar to be what its tag or shape says. One that is not, as
``2026-99-99`` or ``!!int "abc"``, becomes a value of no type, and the field that it stands in
says what is accepted there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import yaml

from gpupool.wire.errors import BadField

DEPTH_MAX = 32
"""Mappings and lists inside one another; a request has not half of it."""

_TAG = "tag:yaml.org,2002:"
_INTEGER_MIN, _INTEGER_MAX = -(2**63), 2**64 - 1
"""Beyond them no field takes a whole number, and Python may refuse to print it."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A scalar that is not what its tag or shape says."""

    text: str

    def __str__(self) -> str:
        return ascii(self.text)


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise BadField("spec", self.depth, f"1..{DEPTH_MAX} levels", unit="levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _or_unreadable(
    construct: Callable[[yaml.SafeLoader, Any], Any],
) -> Callable[[_Loader, Any], Any]:
    def constructed(loader: _Loader, node: Any) -> Any:
        text = str(loader.construct_scalar(node))
        try:
            value = construct(loader, node)
        except (ValueError, LookupError, ArithmeticError, AttributeError):
            return Unreadable(text)
        big = isinstance(value, int) and not _INTEGER_MIN <= value <= _INTEGER_MAX
        return Unreadable(text) if big else value

    return constructed


for _name, _construct in (
    ("bool", yaml.SafeLoader.construct_yaml_bool),
    ("int", yaml.SafeLoader.construct_yaml_int),
    ("float", yaml.SafeLoader.construct_yaml_float),
    ("timestamp", yaml.SafeLoader.construct_yaml_timestamp),
):
    _Loader.add_constructor(_TAG + _name, _or_unreadable(_construct))


def read_yaml(file: IO[Any]) -> object:
    """What a file of YAML, or JSON, holds. Raises yaml.YAMLError, UnicodeDecodeError, BadField."""
    loader = _Loader(file)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
