"""Ids that must be unique or unpredictable; the core gets them passed in."""

import base64
import itertools
import secrets

from gpupool.model.ids import CommandId, ConnectionId, HoldId, LeaseId

ID_BYTES = 10
"""80 random bits: two equal ids among a million are a matter of 1 in 10^12."""


def _random_word() -> str:
    return base64.b32encode(secrets.token_bytes(ID_BYTES)).decode("ascii").lower()


def new_lease_id() -> LeaseId:
    """A lease id, as "l-" and 16 characters of a-z and 2-7."""
    return LeaseId(f"l-{_random_word()}")


def new_hold_id() -> HoldId:
    """A hold id, as "h-" and 16 characters of a-z and 2-7."""
    return HoldId(f"h-{_random_word()}")


def new_forward_key() -> str:
    """A secret with which an agent proves the calls that it forwards."""
    return secrets.token_hex(16)


class Counters:
    """Numbers calls and connections from 1; they never outlive the process."""

    def __init__(self) -> None:
        self._commands = itertools.count(1)
        self._connections = itertools.count(1)

    def command(self) -> CommandId:
        """The next call."""
        return CommandId(next(self._commands))

    def connection(self) -> ConnectionId:
        """The next stream of an agent."""
        return ConnectionId(next(self._connections))
