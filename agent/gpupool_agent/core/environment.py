"""The lease environment: what a member's processes need to find their devices."""

from collections.abc import Sequence

from gpupool.model.assignment import Assignment
from gpupool.model.inventory import Device, Hca


def lease_environment(
    assignment: Assignment,
    *,
    devices: Sequence[Device],
    hcas: Sequence[Hca],
    mps: dict[str, str],
) -> dict[str, str]:
    """Environment of one member.

    ``devices`` are all of the node, ``mps`` is what the slice's MPS needs. A member
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
        **mps,
    }
    mine = {share.device_uuid for share in shares}
    own = [device for device in devices if device.uuid in mine]
    names = _active_ports(_nearest(hcas, own, whole_host=len(own) == len(devices)))
    if own and names:
        # "=" asks NCCL for exactly these names: without it mlx5_1 also means mlx5_10.
        environment["NCCL_IB_HCA"] = "=" + ",".join(names)
    return environment


def _nearest(hcas: Sequence[Hca], own: Sequence[Device], *, whole_host: bool) -> list[Hca]:
    """Adapters on the NUMA nodes of the devices, for a part of a host; else all."""
    numa_nodes = {device.numa_node for device in own}
    if whole_host or -1 in numa_nodes:
        return list(hcas)
    near = [hca for hca in hcas if hca.numa_node in numa_nodes and _names(hca)]
    return near or list(hcas)


def _active_ports(hcas: Sequence[Hca]) -> list[str]:
    """Names of the active ports; Ethernet ones only where there is no InfiniBand.

    A host with InfiniBand has Ethernet adapters for its storage and management.
    """
    fabric = [name for hca in hcas for name, layer in _names(hca) if layer == "InfiniBand"]
    return fabric or [name for hca in hcas for name, _ in _names(hca)]


def _names(hca: Hca) -> list[tuple[str, str]]:
    """NCCL's name and link layer of each active port: the port only where it matters."""
    active = [port for port in hca.ports if port.state == "ACTIVE"]
    several = len(hca.ports) > 1
    return [
        (f"{hca.name}:{port.number}" if several else hca.name, port.link_layer) for port in active
    ]
