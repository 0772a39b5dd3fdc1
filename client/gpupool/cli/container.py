"""The command line of a container engine that runs something under a lease."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpupool.errors import NotFoundError, WrongStateError

ENGINES = ("podman", "docker")
CDI_DEVICE = "GPUPOOL_CDI_DEVICE"
"""In a lease's environment where its node has written a CDI spec for it."""

GPU_KIND = "nvidia.com/gpu"
MPS = "CUDA_MPS_PIPE_DIRECTORY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What to run in a container. ``arguments`` are the engine's own, as they are."""

    engine: str
    image: str
    arguments: tuple[str, ...] = ()


def find_engine(name: str) -> str:
    """The engine by this name, or the first there is. Raises NotFoundError."""
    for engine in (name,) if name else ENGINES:
        if shutil.which(engine):
            return engine
    wanted = name or " or ".join(ENGINES)
    raise NotFoundError(f"engine: no {wanted} on this host", field="engine")


def container_command(
    container: Container, command: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """The engine's command for a member with this environment.

    Raises WrongStateError where its node has written no CDI spec.
    """
    device = environment.get(CDI_DEVICE)
    if not device:
        raise WrongStateError(
            "the lease's node has written no CDI spec for it: its agent needs the root "
            "helper, or a directory in its setting cdi_dir"
        )
    gpus = [uuid for uuid in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid]
    words = [container.engine, "run", "--rm", "--interactive"]
    if sys.stdin.isatty() and sys.stdout.isatty():
        words.append("--tty")
    words += ["--device", device]
    for uuid in gpus:
        words += ["--device", f"{GPU_KIND}={uuid}"]
    # The spec brings them too; an image of its own variables must not win over them.
    for name, value in sorted(environment.items()):
        words += ["--env", f"{name}={value}"]
    if MPS in environment:
        words += _as_ourselves(container.engine)
    return [*words, *container.arguments, container.image, *command]


def _as_ourselves(engine: str) -> list[str]:
    """An MPS server takes clients of its own user only."""
    if os.path.basename(engine) == "podman" and os.getuid() != 0:  # noqa: PTH119 - a word
        return ["--userns", "keep-id"]
    return ["--user", f"{os.getuid()}:{os.getgid()}"]
