"""Who sent a call: directly, or through a node's agent that vouches for it.

An agent knows the user and process behind its local socket from the kernel. It
forwards them as metadata, with the key that this allocator gave it in Welcome; the
key is good while that stream lives.
"""

import hmac
from dataclasses import dataclass, replace
from typing import Any

from grpc import aio

from gpupool.model import limits
from gpupool.model.caller import Caller, ProcessRef, Role
from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.ids import ConnectionId, NodeId
from gpupool.model.request import NODE_LABEL, LabelSelector, LeaseSpec
from gpupool.wire import door
from gpupool.wire.errors import BadField
from gpupool_allocator.engine import RefusedError

Context = aio.ServicerContext[Any, Any]

PREFIX = "gpupool-"
PID_MAX = 2**22
"""The kernel's own limit."""

_LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Who is behind a call; ``process`` is None for a direct call."""

    caller: Caller
    process: ProcessRef | None = None

    def caller_for(self, spec: LeaseSpec) -> Caller:
        """The caller of a request: charged to the tenant that it names."""
        if self.process is None:
            return replace(self.caller, tenant=spec.tenant, uid=spec.uid)
        return replace(self.caller, tenant=spec.tenant)

    def spec_for(self, spec: LeaseSpec) -> LeaseSpec:
        """The request with its true user and node.

        On a node only root may name another user. RefusedError where the request
        wants the caller's node and comes from none.
        """
        if self.process is None:
            if spec.on_caller_node:
                raise RefusedError(
                    Refused(
                        kind=ErrorKind.WRONG_STATE,
                        field="spec.on_caller_node",
                        message="spec.on_caller_node: the call came from no node; "
                        "go through the socket of the node's agent",
                    )
                )
            return spec
        if spec.on_caller_node:
            here = LabelSelector(key=NODE_LABEL, values=(self.process.node_id,))
            groups = tuple(
                replace(group, node_selectors=(*group.node_selectors, here))
                for group in spec.groups
            )
            spec = replace(spec, groups=groups)
        return spec if self.caller.uid == 0 else replace(spec, uid=self.caller.uid)


class ForwardKeys:
    """The keys of the agents whose streams are open, one a node."""

    def __init__(self) -> None:
        self._keys: dict[NodeId, tuple[ConnectionId, str]] = {}

    def put(self, node_id: NodeId, connection: ConnectionId, key: str) -> None:
        """The node's newest stream has been welcomed with this key."""
        self._keys[node_id] = (connection, key)

    def remove(self, node_id: NodeId, connection: ConnectionId) -> bool:
        """The stream is gone; False where a newer one has its key, which stays."""
        if self._keys.get(node_id, (None, ""))[0] != connection:
            return False
        del self._keys[node_id]
        return True

    def proves(self, node_id: NodeId, key: str) -> bool:
        """Whether the key is the one of the node's open stream."""
        known = self._keys.get(node_id)
        return known is not None and hmac.compare_digest(known[1].encode(), key.encode())

    def sender(self, context: Context) -> Sender:
        """Who sent a call. RefusedError UNAUTHENTICATED for a false agent; BadField."""
        told = {
            key: value if isinstance(value, str) else value.decode("latin-1")
            for key, value in context.invocation_metadata() or ()
            if key.startswith(PREFIX)
        }
        if "gpupool-node-id" not in told and "gpupool-forward-key" not in told:
            return _direct(context.peer())
        node_id = NodeId(told.get("gpupool-node-id", ""))
        if not self.proves(node_id, told.get("gpupool-forward-key", "")):
            raise RefusedError(
                Refused(
                    kind=ErrorKind.UNAUTHENTICATED,
                    message="gpupool-forward-key is not the one of the node's open stream",
                    field="gpupool-forward-key",
                )
            )
        return _forwarded(node_id, told)


def _direct(peer: str) -> Sender:
    local = peer.startswith(_LOOPBACK)
    return Sender(caller=Caller(role=Role.OPERATOR if local else Role.USER))


def _forwarded(node_id: NodeId, told: dict[str, str]) -> Sender:
    uid = _number(told, "gpupool-uid", limits.UID_MAX)
    return Sender(
        caller=Caller(
            user=door.text("", "gpupool-user", told.get("gpupool-user", "")),
            uid=uid,
            role=Role.OPERATOR if uid == 0 else Role.USER,
        ),
        process=ProcessRef(
            node_id=node_id,
            pid=_number(told, "gpupool-pid", PID_MAX),
            start_ticks=_number(told, "gpupool-pid-start-ticks", door.INT64_MAX),
        ),
    )


def _number(told: dict[str, str], key: str, most: int) -> int:
    text = told.get(key, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise BadField(key, text, f"0..{most}")
    return door.integer("", key, int(text), 0, most)
