"""What every backend checks before it writes or reads: the store contract's limits."""

import math
from collections.abc import Sequence

from gpupool.model.event import Event
from gpupool_allocator.storage.store import (
    COMMIT_BYTES_MAX,
    EPOCH_MAX,
    HISTORY_READ_MAX,
    OPERATIONS_MAX,
    Operation,
)


def check_operations(operations: Sequence[Operation]) -> list[Operation]:
    """The operations to perform, one a record: the last. ValueError beyond the limits."""
    if len(operations) > OPERATIONS_MAX:
        raise ValueError(f"operations: {len(operations)}, at most {OPERATIONS_MAX} in one commit")
    size = sum(len(each.value) for each in operations if each.value is not None)
    if size > COMMIT_BYTES_MAX:
        raise ValueError(f"operations: {size} bytes, at most {COMMIT_BYTES_MAX} in one commit")
    return list({(each.kind, each.key): each for each in operations}.values())


def check_events(events: Sequence[Event], newest: int) -> None:
    """ValueError unless ``events`` continue a history that ends with ``newest``."""
    for expected, event in enumerate(events, start=newest + 1):
        if event.sequence != expected:
            raise ValueError(f"event sequence: {event.sequence}, must be {expected}")
        if not math.isfinite(event.unix_s):
            raise ValueError(f"unix_s of event {event.sequence}: {event.unix_s}, must be finite")


def check_above(above: int) -> None:
    """ValueError for an epoch that no allocator can have given."""
    if not 0 <= above <= EPOCH_MAX:
        raise ValueError(f"above: {above}, must be 0 to {EPOCH_MAX}")


def check_read(after_sequence: int, limit: int) -> None:
    """ValueError for a read of the history out of its ranges."""
    if not 0 <= after_sequence < 2**63:
        raise ValueError(f"after_sequence: {after_sequence}, must be 0 to {2**63 - 1}")
    if not 1 <= limit <= HISTORY_READ_MAX:
        raise ValueError(f"limit: {limit}, must be 1 to {HISTORY_READ_MAX}")
