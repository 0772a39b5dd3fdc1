"""The host itself, and the adapters of a real one."""

import os
import socket
from pathlib import Path

from gpupool_agent.devices.blocking import BlockingCalls, CallThreads
from gpupool_agent.devices.cdi import CdiDirectory
from gpupool_agent.devices.hca import SysfsHcaReader
from gpupool_agent.devices.helper_client import HelperClient, NoHelper
from gpupool_agent.devices.imex import imex_channels
from gpupool_agent.devices.interfaces import Adapters, HostFacts
from gpupool_agent.devices.mps_daemons.real import real_mps
from gpupool_agent.devices.nvml import NvmlDriver
from gpupool_agent.devices.processes import ProcProcessTable
from gpupool_agent.link import dial
from gpupool_agent.settings import AgentSettings

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MEMORY = Path("/proc/meminfo")


class ProcHostReader:
    """``HostReader`` over /proc."""

    def read(self) -> HostFacts:
        """Raise OSError where /proc is not there."""
        lines = MEMORY.read_text(encoding="ascii").splitlines()
        total_kib = next(line.split()[1] for line in lines if line.startswith("MemTotal:"))
        return HostFacts(
            hostname=socket.gethostname(),
            boot_id=BOOT_ID.read_text(encoding="ascii").strip(),
            cpu_milli=(os.cpu_count() or 0) * 1000,
            host_memory_mib=int(total_kib) // 1024,
        )


def real_adapters(settings: AgentSettings) -> Adapters:
    """What an agent meets on a real host."""
    threads = CallThreads()
    host = ProcHostReader()
    helper = settings.helper_socket
    privileged = HelperClient(helper) if helper else NoHelper()
    return Adapters(
        driver=NvmlDriver(settings.sysfs_root),
        mps=real_mps(settings, privileged, host.read().boot_id),
        hcas=SysfsHcaReader(settings.sysfs_root),
        host=host,
        processes=ProcProcessTable(),
        dial=dial,
        driver_calls=BlockingCalls("driver", threads),
        disk_calls=BlockingCalls("disk", threads),
        cdi=CdiDirectory(settings.cdi_dir) if settings.cdi_dir else privileged if helper else None,
        privileged=privileged,
        imex_channels=imex_channels,
    )
