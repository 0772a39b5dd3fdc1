"""Refuses at the door what no stored record could hold.

A lease and a node are one record each, and a record must fit into one commit. A request
is stored before it has its members, so it is measured here; with its members it is
measured when they have their places (granting). What is refused here for its members
alone is larger than a record wherever they are: it would wait for nothing.
"""

from gpupool.model.caller import Caller
from gpupool.model.ids import LeaseId, NodeId, RequestId
from gpupool.model.inventory import NodeInventory, NodeRecord
from gpupool.model.lease import Lease, LeaseState
from gpupool.model.request import GpuSlice, Group, LeaseSpec, WholeGpus
from gpupool.wire.errors import BadField
from gpupool_allocator.storage import records
from gpupool_allocator.storage.store import COMMIT_BYTES_MAX

PLAIN_MESSAGE_BYTES = 16 * 1024
"""A message of this size gives a record of less than a quarter of what fits: the
record's field names and escapes make it at most twelve times as long."""

SPEC_BYTES_MAX = 384 * 1024
"""Record of a request without members: what is left holds so many of them that more are
measured at the grant."""

INVENTORY_BYTES_MAX = COMMIT_BYTES_MAX - PLAIN_MESSAGE_BYTES
"""Record of a node's inventory: what is left holds what else is known of it."""

MEMBER_BYTES_MIN = 60
"""Least that a stored member takes, without its devices."""

DEVICE_BYTES_MIN = 12
"""Least that a stored device of a member takes."""


def check_lease_size(spec: LeaseSpec, message_bytes: int, at: str = "spec") -> None:
    """BadField for a request that could never be kept."""
    if message_bytes > PLAIN_MESSAGE_BYTES:
        lease = Lease(
            lease_id=LeaseId(""),
            request_id=RequestId(""),
            caller=Caller(),
            spec=spec,
            state=LeaseState.PENDING,
        )
        _check(at, len(records.encode(lease).value or b""), SPEC_BYTES_MAX)
    _check(at, sum(_members_bytes_min(group) for group in spec.groups), COMMIT_BYTES_MAX)


def check_inventory_size(inventory: NodeInventory, message_bytes: int, at: str) -> None:
    """BadField for a node that is too big to be kept."""
    if message_bytes <= PLAIN_MESSAGE_BYTES:
        return
    node = NodeRecord(node_id=NodeId(""), boot_id="", agent_version="", inventory=inventory)
    _check(at, len(records.encode(node).value or b""), INVENTORY_BYTES_MAX)


def _members_bytes_min(group: Group) -> int:
    match group.accelerator:
        case WholeGpus(count=count):
            devices = count
        case GpuSlice():
            devices = 1
        case None:
            devices = 0
    return group.replicas * (MEMBER_BYTES_MIN + devices * DEVICE_BYTES_MIN)


def _check(at: str, size: int, most: int) -> None:
    if size > most:
        raise BadField(at, f"{size} bytes as a record", f"0..{most} bytes")
