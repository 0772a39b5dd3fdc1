"""Texts in arguments: what is no UTF-8 is refused by its option, not by what comes to use it.

Python has the bytes of an argument that are no UTF-8 as lone surrogates, which no message
can carry. Paths, and what "gpupool run" passes to its command or engine, may be any bytes.
"""

from __future__ import annotations

from typing import Any

import click
from click.types import StringParamType


class Unicode(StringParamType):
    """Text of Unicode; shown in help as any other text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text; fails where a part of it is no UTF-8."""
        text = str(super().convert(value, param, ctx))
        if not is_unicode(text):
            self.fail(f"{text!a} is not in text of UTF-8", param, ctx)
        return text


def is_unicode(text: str) -> bool:
    """Whether the text has no surrogates: only then a message can carry it."""
    return text.isascii() or not any("\ud800" <= each <= "\udfff" for each in text)


def hold_to_unicode(command: click.Command) -> None:
    """Holds every text among the parameters of a command, and of those below it, to Unicode."""
    for parameter in command.params:
        if type(parameter.type) is StringParamType:
            parameter.type = Unicode()
    if isinstance(command, click.Group):
        for each in command.commands.values():
            hold_to_unicode(each)
