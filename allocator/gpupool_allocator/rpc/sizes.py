"""Refuses at the door what would not fit into one stored record.

A lease and a node are one record each, and a record must fit into one commit. The
first look costs next to nothing; only what is unusually big is measured.
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
"""A message of this size gives a record of less than an eighth of what fits: the
record's field names and escapes make it at most twelve times as long."""

MEMBER_BYTES = 240
"""Stored member without its devices, with a node name of 64 characters."""

DEVICE_BYTES = 64
"""Stored device of a member."""


def check_lease_size(spec: LeaseSpec, message_bytes: int, at: str = "spec") -> None:
    """BadField for a request that is too big to be kept with all its members."""
    members = sum(_members_bytes(group) for group in spec.groups)
    if message_bytes <= PLAIN_MESSAGE_BYTES and members <= COMMIT_BYTES_MAX // 2:
        return
    lease = Lease(
        lease_id=LeaseId(""),
        request_id=RequestId(""),
        caller=Caller(),
        spec=spec,
        state=LeaseState.PENDING,
    )
    _check(at, len(records.encode(lease).value or b"") + members)


def check_inventory_size(inventory: NodeInventory, message_bytes: int, at: str) -> None:
    """BadField for a node that is too big to be kept."""
    if message_bytes <= PLAIN_MESSAGE_BYTES:
        return
    node = NodeRecord(node_id=NodeId(""), boot_id="", agent_version="", inventory=inventory)
    _check(at, len(records.encode(node).value or b""))


def _members_bytes(group: Group) -> int:
    match group.accelerator:
        case WholeGpus(count=count):
            devices = count
        case GpuSlice():
            devices = 1
        case None:
            devices = 0
    return group.replicas * (MEMBER_BYTES + devices * DEVICE_BYTES)


def _check(at: str, size: int) -> None:
    # Room for what is not measured: ids, causes, times.
    most = COMMIT_BYTES_MAX - PLAIN_MESSAGE_BYTES
    if size > most:
        raise BadField(at, f"{size} bytes as a record", f"0..{most} bytes")
