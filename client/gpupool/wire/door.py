"""Checks of single values. Each takes the path of the message and the field's name.

The path is joined to the name only when a check fails, so that a good message
costs no string building.
"""

import re
from collections.abc import Collection, Hashable, Iterable, Mapping

from gpupool.model.limits import NAME_CHARS_MAX, REQUEST_ID_CHARS_MAX
from gpupool.wire.errors import BadField

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1
LONG_TEXT_CHARS_MAX = 65_536
"""Longest text made by a program of the pool: evidence, explanations, variables."""

ENVIRONMENT_MAX = 256

_ID = re.compile(r"[!-~]+").fullmatch
_REQUEST_ID = re.compile(r"[ -~]+").fullmatch
_NODE_ID = re.compile(r"[A-Za-z0-9._-]+").fullmatch
_DEVICE_UUID = re.compile(r"(?:GPU|MIG)-[A-Za-z0-9._/-]+").fullmatch
_GROUP_NAME = re.compile(r"[a-z0-9-]+").fullmatch
_WORD = re.compile(r"[A-Za-z0-9._-]+").fullmatch
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*").fullmatch
_GUID = re.compile(r"[0-9a-fA-F]{16}").fullmatch

_GROUP_NAME_CHARS_MAX = 63


def path(at: str, name: str) -> str:
    """Path of a field inside the message at ``at``; empty ``at``: the outermost one."""
    return f"{at}.{name}" if at else name


def integer(at: str, name: str, value: int, least: int, greatest: int) -> int:
    """A whole number in least..greatest."""
    if not least <= value <= greatest:
        raise BadField(path(at, name), value, f"{least}..{greatest}")
    return value


def text(at: str, name: str, value: str, *, least: int = 0, most: int = NAME_CHARS_MAX) -> str:
    """Printable text of least..most characters."""
    if not least <= len(value) <= most or not value.isprintable():
        raise BadField(path(at, name), value, f"{least}..{most} printable characters")
    return value


def long_text(at: str, name: str, value: str, *, most: int = LONG_TEXT_CHARS_MAX) -> str:
    """Text seen by a program, of any characters but NUL.

    Not held to printable ones: a process with an odd name must not be able to
    take its node's reports out of the pool.
    """
    if len(value) > most or "\0" in value:
        raise BadField(path(at, name), value, f"0..{most} characters without NUL")
    return value


def identifier(at: str, name: str, value: str) -> str:
    """Id of a lease or hold."""
    if len(value) > NAME_CHARS_MAX or not _ID(value):
        raise BadField(path(at, name), value, f"1..{NAME_CHARS_MAX} printable ASCII characters")
    return value


def request_id(at: str, name: str, value: str) -> str:
    """Id that a client chose for its request."""
    if len(value) > REQUEST_ID_CHARS_MAX or not _REQUEST_ID(value):
        accepted = f"1..{REQUEST_ID_CHARS_MAX} printable ASCII characters"
        raise BadField(path(at, name), value, accepted)
    return value


def node_id(at: str, name: str, value: str) -> str:
    """Name of a node."""
    if len(value) > NAME_CHARS_MAX or not _NODE_ID(value):
        accepted = f"1..{NAME_CHARS_MAX} characters of a-z, A-Z, 0-9, '-', '_' and '.'"
        raise BadField(path(at, name), value, accepted)
    return value


def device_uuid(at: str, name: str, value: str) -> str:
    """UUID of a GPU or MIG instance."""
    if len(value) > NAME_CHARS_MAX or not _DEVICE_UUID(value):
        raise BadField(path(at, name), value, '"GPU-..." or "MIG-..." device UUIDs')
    return value


def group_name(at: str, name: str, value: str) -> str:
    """Name of a group."""
    if len(value) > _GROUP_NAME_CHARS_MAX or not _GROUP_NAME(value):
        accepted = f"1..{_GROUP_NAME_CHARS_MAX} characters of a-z, 0-9 and '-'"
        raise BadField(path(at, name), value, accepted)
    return value


def word(at: str, name: str, value: str) -> str:
    """A stable word for programs, as "gpu_lost" or "lease.granted"."""
    if len(value) > NAME_CHARS_MAX or not _WORD(value):
        raise BadField(path(at, name), value, f"words of 1..{NAME_CHARS_MAX} characters")
    return value


def guid(at: str, name: str, value: str) -> str:
    """GUID of an adapter or port."""
    if not _GUID(value):
        raise BadField(path(at, name), value, "GUIDs of 16 hex digits")
    return value


def count(at: str, name: str, values: Collection[object], least: int, most: int) -> int:
    """Number of entries of a list or map, least..most."""
    found = len(values)
    if not least <= found <= most:
        raise BadField(path(at, name), found, f"{least}..{most} entries", unit="entries")
    return found


def unique(at: str, name: str, values: Iterable[Hashable]) -> None:
    """No entry appears twice."""
    seen: set[Hashable] = set()
    for value in values:
        if value in seen:
            raise BadField(path(at, name), value, "entries that are named once")
        seen.add(value)


def labels(at: str, name: str, values: Mapping[str, str], most: int) -> dict[str, str]:
    """Label names and values."""
    count(at, name, values, 0, most)
    for key, value in values.items():
        text(at, f"{name} key", key, least=1)
        text(at, f"{name}[{key!r}]", value)
    return dict(values)


def environment(at: str, name: str, values: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a holder."""
    count(at, name, values, 0, ENVIRONMENT_MAX)
    for key, value in values.items():
        if len(key) > NAME_CHARS_MAX or not _VARIABLE(key):
            raise BadField(path(at, f"{name} key"), key, "names of environment variables")
        long_text(at, f"{name}[{key}]", value)
    return dict(values)


def page_size(value: int, *, default: int, most: int) -> int:
    """Entries in a page; 0 means ``default``."""
    return integer("", "page_size", value, 0, most) or default
