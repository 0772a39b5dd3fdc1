"""The lease environment: what a member's processes need to find their devices."""

from collections.abc import Sequence

from gpupool.model.assignment import Assignment
from gpupool.model.inventory import Device, Hca
from gpupool_agent.core.rails import nearest, usable

IMEX_CHANNEL = "GPUPOOL_IMEX_CHANNEL"
"""In a lease's environment: the device node through which its hosts share GPU memory."""

IMEX_CHANNELS = "/dev/nvidia-caps-imex-channels"


def imex_environment(
    assignment: Assignment, *, devices: Sequence[Device], channels: Sequence[int]
) -> dict[str, str]:
    """The IMEX channel of a member with whole GPUs of an NVLink domain that spans hosts.

    ``channels`` are the numbers that the node has. All members of a lease must have the
    same one on all of their hosts, so it is the lowest, which sites make everywhere.
    """
    domains = {device.uuid: device.nvlink_domain for device in devices}
    joined = any(
        share.whole and domains.get(share.device_uuid) for share in assignment.place.devices
    )
    return {IMEX_CHANNEL: f"{IMEX_CHANNELS}/channel{min(channels)}"} if joined and channels else {}


def lease_environment(
    assignment: Assignment,
    *,
    devices: Sequence[Device],
    hcas: Sequence[Hca],
    added: dict[str, str],
) -> dict[str, str]:
    """Environment of one member.

    ``devices`` are all of the node, ``hcas`` have their rails (see ``rails``), ``added``
    is what preparing found out, as what the slice's MPS needs. A member
    without GPUs gets an empty CUDA_VISIBLE_DEVICES, so that it sees none.
    """
    shares = assignment.place.devices
    environment = {
        "CUDA_VISIBLE_DEVICES": ",".join(share.device_uuid for share in shares),
        "GPUPOOL_GROUP": assignment.group,
        "GPUPOOL_LEASE_ID": assignment.key.lease_id,
        "GPUPOOL_NODE_ID": assignment.place.node_id,
        "GPUPOOL_RANK": str(assignment.key.rank),
        "GPUPOOL_TOKEN": str(assignment.token),
        "GPUPOOL_WORLD_SIZE": str(assignment.world_size),
        **added,
    }
    mine = {share.device_uuid for share in shares}
    own = [device for device in devices if device.uuid in mine]
    names = _adapters(hcas, own, whole_host=len(own) == len(devices))
    if own and names:
        # "=" asks NCCL for exactly these names: without it mlx5_1 also means mlx5_10.
        environment["NCCL_IB_HCA"] = "=" + ",".join(names)
    return environment


def _adapters(hcas: Sequence[Hca], own: Sequence[Device], *, whole_host: bool) -> list[str]:
    """Healthy compute ports as NCCL names them, in the order of their rails.

    All of them for a whole host; for a part of one those that are nearest to each of
    its devices, so that neighbours do not share a port that one of them does not need.
    """
    healthy = [hca for hca in hcas if _rails(hca)]
    if not whole_host:
        near = {hca.name for device in own for hca in nearest(healthy, device)}
        healthy = [hca for hca in healthy if hca.name in near]
    return [name for _, name in sorted(rail for hca in healthy for rail in _rails(hca))]


def _rails(hca: Hca) -> list[tuple[int, str]]:
    """Rail and NCCL's name of each usable port: the name with the port where needed."""
    several = len(hca.ports) > 1
    return [
        (port.rail, f"{hca.name}:{port.number}" if several else hca.name)
        for port in hca.ports
        if port.rail is not None and usable(port)
    ]
