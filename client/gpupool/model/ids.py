"""Identifiers. All are compared whole; none is ever matched by prefix."""

from typing import NewType

NodeId = NewType("NodeId", str)
"""A host's name in the pool, for ever."""

DeviceUuid = NewType("DeviceUuid", str)
"""Identity of a GPU ("GPU-...") or MIG instance ("MIG-...")."""

LeaseId = NewType("LeaseId", str)
"""Made by the allocator's engine, never by the core."""

HoldId = NewType("HoldId", str)
"""Made by the allocator's engine, or "queue:<lease id>" for the head's places."""

RequestId = NewType("RequestId", str)
"""Made by a client; a retry carries the same one."""

CommandId = NewType("CommandId", int)
"""One call in flight inside the allocator; an answer names it."""

ConnectionId = NewType("ConnectionId", int)
"""One stream of one agent; a late message of an older stream is recognised by it."""
