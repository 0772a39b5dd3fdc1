"""Which member of a lease runs here, and what it needs to."""

import socket

from gpupool.errors import WrongStateError
from gpupool.model.lease import Lease, Member


def member_here(lease: Lease) -> Member | None:
    """The member that this process stands for: the first on this host, else rank 0.

    The host is the one that the pool saw the caller on, or by its name.
    """
    here = lease.process.node_id if lease.process is not None else socket.gethostname()
    on_host = (member for member in lease.members if member.place.node_id == here)
    return next(on_host, lease.members[0] if lease.members else None)


def environment_of(lease: Lease, member: Member | None) -> dict[str, str]:
    """The variables that a member's process needs.

    Raises WrongStateError where there is none yet: the lease is not active, or its
    node has not reported since the allocator's start.
    """
    if member is None:
        raise WrongStateError(f"lease {lease.lease_id} is {lease.state} and has no members")
    if member.environment is None:
        raise WrongStateError(
            f"lease {lease.lease_id} is {lease.state}: node {member.place.node_id} "
            f"has not reported the environment of rank {member.rank}"
        )
    return dict(member.environment)
