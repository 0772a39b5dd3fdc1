"""Saying no: to what may not be asked for, and for what was tried in vain."""

from typing import Any, NoReturn, TypeGuard


class RefusedError(Exception):
    """It is not permitted; nothing was done."""


class FailedError(Exception):
    """It was tried, and did not work."""


def refuse(field: str, value: object, accepted: str) -> NoReturn:
    """Refuse a value of a field."""
    raise RefusedError(f"{field}: {shown(value)} is not accepted, it must be {accepted}")


def shown(value: object) -> str:
    """A value for people: bounded, and in one line."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether JSON's value is a list."""
    return isinstance(value, list)


def is_table(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether JSON's value is an object: its keys are texts always."""
    return isinstance(value, dict)
