"""The CDI spec of a lease: what a container engine puts into a container that asks for it.

A spec has one device for each member that the lease has on this node. A device brings
the member's environment, for slices the way to its MPS daemon, and for GPUs of an NVLink
domain that spans hosts the IMEX channel. The GPUs' own device
nodes and libraries come from the specs that the driver's toolkit makes: CDI has no way to
refer to them from here, so they are named in an annotation and asked for beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpupool.model.assignment import AssignmentKey
from gpupool.model.ids import LeaseId
from gpupool_agent.core.environment import IMEX_CHANNEL

KIND = "gpupool.io/lease"
GPU_KIND = "nvidia.com/gpu"
VERSION = "0.6.0"
"""The least that knows annotations of devices; engines refuse what is newer than they."""

VARIABLE = "GPUPOOL_CDI_DEVICE"
"""In a lease's environment: the name that its container asks for."""

PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - not a temporary file: MPS lives there
MOUNT_OPTIONS = ("bind", "rw", "nosuid", "nodev", "noexec")


@dataclass(frozen=True, slots=True, kw_only=True)
class CdiMember:
    """A member as its containers need it; ``gpus`` are UUIDs."""

    key: AssignmentKey
    environment: Mapping[str, str]
    gpus: tuple[str, ...]


def device_name(key: AssignmentKey) -> str:
    """Name of a member's device: the lease's id for rank 0, else with the rank."""
    return f"{key.lease_id}.{key.rank}" if key.rank else key.lease_id


def reference(key: AssignmentKey) -> str:
    """What a container asks for, as "gpupool.io/lease=l-1"."""
    return f"{KIND}={device_name(key)}"


def spec_document(lease_id: LeaseId, members: Sequence[CdiMember]) -> dict[str, Any]:
    """The lease's whole spec, as JSON has it."""
    return {
        "cdiVersion": VERSION,
        "kind": KIND,
        "annotations": {"gpupool.io/lease": lease_id},
        "devices": [_device(member) for member in sorted(members, key=lambda each: each.key)],
    }


def _device(member: CdiMember) -> dict[str, Any]:
    # Images of CUDA ask for all GPUs by this variable, which an older runtime obeys.
    environment = {**member.environment, "NVIDIA_VISIBLE_DEVICES": "void"}
    edits: dict[str, Any] = {
        "env": [f"{name}={value}" for name, value in sorted(environment.items())]
    }
    pipe_directory = member.environment.get(PIPE_DIRECTORY)
    if pipe_directory:
        edits["mounts"] = [_mount(pipe_directory), _mount(SHARED_MEMORY)]
    channel = member.environment.get(IMEX_CHANNEL)
    if channel:
        edits["deviceNodes"] = [{"path": channel}]
    references = ",".join(f"{GPU_KIND}={uuid}" for uuid in member.gpus)
    return {
        "name": device_name(member.key),
        "annotations": {"gpupool.io/devices": references},
        "containerEdits": edits,
    }


def _mount(path: str) -> dict[str, Any]:
    """The same path inside as outside: the environment names it."""
    return {"hostPath": path, "containerPath": path, "options": list(MOUNT_OPTIONS)}
