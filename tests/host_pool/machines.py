"""What the programs of a host run over: the real driver, or a simulated one.

Both start the same programs with the same settings; what differs is in here. A simulated
machine's hardware lies in a directory, so that agent, helper and CUDA clients, which are
processes of their own, see the same GPUs.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from gpupool_agent.simulated.machine import load_machine
from gpupool_agent.simulated.mps_control.launcher import write_launcher, write_probe
from gpupool_agent.simulated.node import SimulatedNode
from gpupool_agent.simulated.sysfs import sysfs_root, write_sysfs

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "agent": "gpupool_agent.__main__",
    "helper": "gpupool_agent.helper.__main__",
    "listing": "tests.host_pool.listing",
    "cuda_client": "tests.host_pool.cuda_client",
}
CONTROL = "nvidia-cuda-mps-control"


class Machine(Protocol):
    """A host's hardware and driver. ``agent_capabilities``: what its agent needs to be given."""

    name: str
    agent_capabilities: tuple[str, ...]

    def command(self, program: str, *arguments: str) -> list[str]:
        """The command line of one of MODULES on this machine."""
        ...

    def smi(self, *arguments: str) -> list[str]:
        """The command line of nvidia-smi."""
        ...

    def agent_settings(self) -> dict[str, object]:
        """Settings of the agent that it needs here."""
        ...

    def helper_settings(self) -> dict[str, object]:
        """Settings of the helper that it needs here."""
        ...


class RealMachine:
    """This host, with NVIDIA's driver."""

    name = "real"
    agent_capabilities = ()

    def command(self, program: str, *arguments: str) -> list[str]:
        """See ``Machine``."""
        return [sys.executable, "-m", MODULES[program], *arguments]

    def smi(self, *arguments: str) -> list[str]:
        """See ``Machine``."""
        return ["nvidia-smi", *arguments]

    def agent_settings(self) -> dict[str, object]:
        """See ``Machine``."""
        return {}

    def helper_settings(self) -> dict[str, object]:
        """See ``Machine``."""
        return {}


class SimulatedMachine:
    """A described machine, whose hardware lies in ``folder``."""

    name = "simulated"
    # Reading only: other tests on this machine have MPS daemons, as root, and an agent that
    # cannot read whose GPUs those manage must take them for managing its own.
    agent_capabilities = ("sys_ptrace", "dac_read_search")

    def __init__(self, folder: Path, kind: str = "dgx-h100") -> None:
        self._kind = kind
        self._hardware = folder / "hardware"
        self._hardware.mkdir()
        # Agent, helper and clients are different users, and all of them are the hardware.
        self._hardware.chmod(0o777)
        # Of its own name: agents of other tests look for daemons that have their GPUs.
        self._node_id = folder.name
        self.node = SimulatedNode(
            node_id=self._node_id, machine=load_machine(kind), directory=self._hardware
        )
        write_sysfs(self.node, folder / "pci")
        programs = folder / "bin"
        self._control = write_launcher(programs, node=self._hardware)
        self._probe = write_probe(programs, node=self._hardware)

    def command(self, program: str, *arguments: str) -> list[str]:
        """See ``Machine``."""
        return [*self._simulated(), program, *arguments]

    def smi(self, *arguments: str) -> list[str]:
        """See ``Machine``."""
        return [*self._simulated(), "smi", *arguments]

    def agent_settings(self) -> dict[str, object]:
        """See ``Machine``."""
        return {"sysfs_root": sysfs_root(self.node)}

    def helper_settings(self) -> dict[str, object]:
        """See ``Machine``."""
        return {"mps_control": self._control, "probe_program": self._probe}

    def _simulated(self) -> list[str]:
        module = "tests.host_pool.simulated_program"
        return [sys.executable, "-m", module, str(self._hardware), self._node_id, self._kind]


def missing_for_real() -> str:
    """What a test on the real machine lacks here; empty: nothing."""
    for library in ("libnvidia-ml.so.1", "libcuda.so.1"):
        try:
            ctypes.CDLL(library)
        except OSError:
            return f"there is no NVIDIA driver here ({library} cannot be loaded)"
    for program in ("nvidia-smi", CONTROL):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    if asked.returncode or "GPU 0" not in asked.stdout:
        return f"nvidia-smi lists no GPU: {(asked.stdout + asked.stderr).strip()[:200]}"
    return "" if os.geteuid() == 0 else "only root can start the helper"
