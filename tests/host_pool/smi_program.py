"""Stands for ``nvidia-smi -q -x`` over a simulated node: the same elements, asked of NVML.

It asks the library on its own, not through the agent's code that is held against it.
"""

import sys
import xml.etree.ElementTree as ET
from typing import Any

import pynvml

nvml: Any = pynvml
MIB = 2**20
MODES = {0: "Default", 2: "Prohibited", 3: "Exclusive_Process"}


def main(arguments: list[str]) -> int:
    if arguments != ["-q", "-x"]:
        print(f"not played: nvidia-smi {' '.join(arguments)}", file=sys.stderr)
        return 2
    nvml.nvmlInit()
    root = ET.Element("nvidia_smi_log")
    _add(root, "driver_version", nvml.nvmlSystemGetDriverVersion())
    count = nvml.nvmlDeviceGetCount()
    _add(root, "attached_gpus", count)
    for index in range(count):
        _gpu(root, nvml.nvmlDeviceGetHandleByIndex(index))
    print(ET.tostring(root, encoding="unicode"))
    nvml.nvmlShutdown()
    return 0


def _gpu(root: ET.Element, handle: Any) -> None:
    gpu = ET.SubElement(root, "gpu", id=nvml.nvmlDeviceGetPciInfo(handle).busId)
    _add(gpu, "product_name", nvml.nvmlDeviceGetName(handle))
    _add(gpu, "uuid", nvml.nvmlDeviceGetUUID(handle))
    _add(gpu, "serial", nvml.nvmlDeviceGetSerial(handle))
    _add(ET.SubElement(gpu, "mig_mode"), "current_mig", "N/A")
    _add(gpu, "compute_mode", MODES[nvml.nvmlDeviceGetComputeMode(handle)])
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
    usage = ET.SubElement(gpu, "fb_memory_usage")
    for name in ("total", "reserved", "used", "free"):
        _add(usage, name, f"{getattr(memory, name) // MIB} MiB")
    processes = ET.SubElement(gpu, "processes")
    for listed in (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3,
    ):
        for each in listed(handle):
            process = ET.SubElement(processes, "process_info")
            _add(process, "pid", each.pid)
            _add(process, "used_memory", f"{each.usedGpuMemory // MIB} MiB")


def _add(parent: ET.Element, name: str, value: object) -> None:
    text = value.decode() if isinstance(value, bytes) else str(value)
    ET.SubElement(parent, name).text = text
