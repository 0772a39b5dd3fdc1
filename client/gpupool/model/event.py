"""Events: every change of the pool's state, with its cause."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One change. ``sequence`` runs from 1 without gaps; ``kind`` is a stable word.

    ``subject`` is the lease, node, device or hold that changed. ``details`` holds
    what a replay needs to follow the state.
    """

    sequence: int
    unix_s: float
    kind: str
    subject: str
    cause: str
    details: dict[str, str] = field(default_factory=dict[str, str])
