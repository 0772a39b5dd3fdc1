"""What the pool keeps, as records: a kind, a key, and compact JSON with a version.

A record is an object with "v", the version of its kind's shape. The rules that keep
old and new programs on one store:

* a field that a reader does not know is ignored (a newer program wrote it);
* a field may be added with a usual value that is taken where it is missing;
* anything else is a new version, and a reader refuses one that it does not know.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never
from urllib.parse import quote

from gpupool.model.hold import Hold
from gpupool.model.inventory import NodeRecord
from gpupool.model.lease import Lease
from gpupool_allocator.core.effects import Stored, UnclaimedRecord
from gpupool_allocator.storage.record_hold import (
    hold_from_json,
    hold_to_json,
    unclaimed_from_json,
    unclaimed_to_json,
)
from gpupool_allocator.storage.record_lease import lease_from_json, lease_to_json
from gpupool_allocator.storage.record_node import node_from_json, node_to_json, parse_node
from gpupool_allocator.storage.record_request import Json
from gpupool_allocator.storage.store import COMMIT_BYTES_MAX, Operation, StoredValue

LEASE = "lease"
HOLD = "hold"
NODE = "node"
UNCLAIMED = "unclaimed"

GROWTH_BYTES = 16 * 1024
"""States, reasons and times that come into a lease's record after its grant."""

# Made once: it costs more than the encoding of a small record. NaN is no JSON and
# is refused; text outside ASCII is escaped, so that any string can be stored.
_write = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


@dataclass(frozen=True, slots=True)
class _Kind:
    version: int
    read: Callable[[str, Json], Stored]
    parse: Callable[[bytes], Any] = json.loads


_KINDS = {
    LEASE: _Kind(1, lease_from_json),
    HOLD: _Kind(1, hold_from_json),
    NODE: _Kind(1, node_from_json, parse_node),
    UNCLAIMED: _Kind(1, unclaimed_from_json),
}


class RecordError(Exception):
    """A stored record cannot be read; the message names its kind and key."""


class RecordVersionError(RecordError):
    """A record has a version that this program does not know."""

    def __init__(self, kind: str, key: str, version: object, known: int) -> None:
        """Keeps what the message says."""
        super().__init__(
            f"{kind} record {key!r} has version {version!r}, this program knows {known}: "
            "run the program that wrote the store, or a newer one"
        )
        self.kind = kind
        self.key = key
        self.version = version


def fits_one_commit(lease: Lease) -> bool:
    """A lease's record leaves room in a commit for what it may still grow by."""
    return len(encode(lease).value or b"") <= COMMIT_BYTES_MAX - GROWTH_BYTES


def encode(record: Stored) -> Operation:
    """The operation that stores ``record``. ValueError for one that has no shape (NaN)."""
    kind, key = _identity(record)
    shape: dict[str, Any] = {"v": _KINDS[kind].version}
    match record:
        case Lease():
            shape |= lease_to_json(record)
        case NodeRecord():
            shape |= node_to_json(record)
        case Hold():
            shape |= hold_to_json(record)
        case UnclaimedRecord():
            shape |= unclaimed_to_json(record)
        case _:
            assert_never(record)
    return Operation(kind=kind, key=key, value=_write(shape).encode("ascii"))


def deletion(record: Stored) -> Operation:
    """The operation that forgets ``record``; only its identity counts."""
    kind, key = _identity(record)
    return Operation(kind=kind, key=key, value=None)


def decode(stored: StoredValue) -> Stored:
    """The record as it was encoded, without environments.

    Raises RecordVersionError for an unknown version, RecordError for an unknown
    kind, a deletion, or a value that is not a record of its kind.
    """
    kind, key = stored.kind, stored.key
    form = _KINDS.get(kind)
    if form is None:
        raise RecordError(f"record {key!r} is of unknown kind {kind!r}, known: {', '.join(_KINDS)}")
    if stored.value is None:
        raise RecordError(f"{kind} record {key!r} was deleted: it has no value")
    try:
        shape = form.parse(stored.value)
        version = shape.get("v")
    except (ValueError, AttributeError) as error:
        raise RecordError(f"{kind} record {key!r} is no JSON object: {error}") from error
    if version != form.version:
        raise RecordVersionError(kind, key, version, form.version)
    try:
        return form.read(key, shape)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise RecordError(f"{kind} record {key!r} is malformed: {error!r}") from error


def _identity(record: Stored) -> tuple[str, str]:
    match record:
        case Lease():
            return LEASE, record.lease_id
        case NodeRecord():
            return NODE, record.node_id
        case Hold():
            return HOLD, record.hold_id
        case UnclaimedRecord():
            # Quoted: a slash inside a name must not make two keys alike.
            assignment = record.report.key
            node, lease = (
                quote(name, safe="", errors="surrogatepass")
                for name in (record.node_id, assignment.lease_id)
            )
            return UNCLAIMED, f"{node}/{lease}/{assignment.rank}"
        case _:
            assert_never(record)
