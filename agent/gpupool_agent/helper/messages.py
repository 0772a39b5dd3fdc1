"""What goes over the helper's socket: one JSON object a message, at most so long.

The socket keeps messages apart (SOCK_SEQPACKET), so a bad one spoils no other. A request
is {"id": 1, "action": "set_compute_mode", "gpu": ..., "mode": ...}; its answer has the
same id and one of "done" (what the action gives), "refused" (not permitted, with the
reason) and "failed" (tried in vain, with the reason).
"""

import json
from typing import Any, cast

MESSAGE_BYTES_MAX = 160 * 1024
"""Room for the longest CDI spec with every second character escaped."""

ID_MAX = 2**53


class BadMessageError(ValueError):
    """Not a message; the text says why."""


def decode(data: bytes) -> dict[str, Any]:
    """The object of a message; BadMessageError."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise BadMessageError(f"a message has at most {MESSAGE_BYTES_MAX} bytes")
    try:
        found = json.loads(
            data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant
        )
    except RecursionError as error:
        raise BadMessageError("it is nested too deeply") from error
    except ValueError as error:
        raise BadMessageError(f"it is not JSON as agreed: {error}"[:200]) from error
    if not isinstance(found, dict):
        raise BadMessageError("it is not a JSON object")
    return cast("dict[str, Any]", found)


def encode(message: dict[str, Any]) -> bytes:
    """The bytes of a message; BadMessageError where it is too long."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MESSAGE_BYTES_MAX:
        raise BadMessageError(f"a message has at most {MESSAGE_BYTES_MAX} bytes")
    return data


def message_id(message: dict[str, Any]) -> int:
    """The id that an answer repeats; 0 where there is none that could be."""
    found = message.get("id")
    good = isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= ID_MAX
    return cast("int", found) if good else 0


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two readers of a key that stands twice may see different values."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands in it twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
