"""Names that people give on the command line: a wrong one is an error, not an empty listing."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import chain, islice
from typing import TYPE_CHECKING

from gpupool.errors import NotFoundError

if TYPE_CHECKING:
    from gpupool.client import Client

_NEAR_MAX = 3
_NAMES_MAX = 20_000
"""Names that a wrong one is held against."""


def check_node(client: Client, node_id: str) -> None:
    """NotFoundError where the pool has no such node, with those that are named alike."""
    names: list[str] = [node.node_id for node in client.nodes()]
    if node_id not in names:
        raise _unknown("node", node_id, names)


def check_subject(client: Client, subject: str) -> None:
    """NotFoundError where nothing in the pool is named so and no event is about it."""
    if next(iter(client.events(subject=subject)), None) is not None:
        return
    names: list[str] = []
    for name in islice(_names(client), _NAMES_MAX):
        if name == subject:
            return
        names.append(name)
    raise _unknown("subject", subject, names)


def _names(client: Client) -> Iterable[str]:
    return chain(
        ("pool",),
        (node.node_id for node in client.nodes()),
        (lease.lease_id for lease in client.list_leases()),
        (hold.hold_id for hold in client.holds()),
        (view.device.uuid for view in client.devices()),
    )


def _unknown(field: str, value: str, names: list[str]) -> NotFoundError:
    near = get_close_matches(value, names, n=_NEAR_MAX)
    hint = f"; near it: {', '.join(near)}" if near else ""
    return NotFoundError(f"{field}: {value!r} is not known to the pool{hint}", field=field)
