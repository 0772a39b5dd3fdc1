"""NVML calls that say what is there: sessions, devices and what does not change."""

import ctypes
from collections.abc import Callable
from typing import Any

from gpupool_agent.simulated.machine import FABRIC_STATES
from gpupool_agent.simulated.node import SimulatedGpu, SimulatedNode
from gpupool_agent.simulated.nvml_calls import (
    HANDLE_INDEX_BITS,
    Calls,
    ReturnCode,
    fill_number,
    fill_text,
    number,
    target,
)

_MIG_DEVICES_MAX = 7
_REMOTE_SWITCH = 2

CALLS = Calls()


# --- library and system ---


@CALLS.function("nvmlInitWithFlags", "nvmlInit_v2")
def _init(node: SimulatedNode, *_flags: Any) -> int:
    node.open_session()
    return ReturnCode.SUCCESS


@CALLS.function("nvmlShutdown")
def _shutdown(node: SimulatedNode) -> int:
    return ReturnCode.SUCCESS if node.close_session() else ReturnCode.UNINITIALIZED


@CALLS.function("nvmlSystemGetDriverVersion")
def _driver_version(node: SimulatedNode, buffer: Any, size: Any) -> int:
    return fill_text(buffer, size, node.machine.driver_version)


@CALLS.function("nvmlSystemGetNVMLVersion")
def _nvml_version(node: SimulatedNode, buffer: Any, size: Any) -> int:
    cuda_major = node.machine.cuda_driver_version // 1000
    return fill_text(buffer, size, f"{cuda_major}.{node.machine.driver_version}")


@CALLS.function("nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2")
def _cuda_driver_version(node: SimulatedNode, version: Any) -> int:
    return fill_number(version, node.machine.cuda_driver_version)


# --- enumeration ---


@CALLS.function("nvmlDeviceGetCount_v2")
def _count(node: SimulatedNode, count: Any) -> int:
    if node.session is None:
        return ReturnCode.UNINITIALIZED
    return fill_number(count, len(node.session.gpus))


def _give_handle(
    node: SimulatedNode, device: Any, matches: Callable[[int, SimulatedGpu], bool]
) -> int:
    session = node.session
    if session is None:
        return ReturnCode.UNINITIALIZED
    for index, gpu in enumerate(session.gpus):
        if matches(index, gpu):
            if gpu.lost:
                return ReturnCode.GPU_IS_LOST
            value = session.serial << HANDLE_INDEX_BITS | index + 1
            ctypes.c_void_p.from_buffer(target(device)).value = value
            return ReturnCode.SUCCESS
    return ReturnCode.NOT_FOUND


@CALLS.function("nvmlDeviceGetHandleByIndex_v2")
def _handle_by_index(node: SimulatedNode, index: Any, device: Any) -> int:
    code = _give_handle(node, device, lambda at, _gpu: at == number(index))
    return ReturnCode.INVALID_ARGUMENT if code == ReturnCode.NOT_FOUND else code


@CALLS.function("nvmlDeviceGetHandleByUUID")
def _handle_by_uuid(node: SimulatedNode, uuid: Any, device: Any) -> int:
    wanted = uuid.value.decode()
    return _give_handle(node, device, lambda _at, gpu: gpu.uuid == wanted)


@CALLS.function("nvmlDeviceGetHandleByPciBusId_v2")
def _handle_by_pci(node: SimulatedNode, bus_id: Any, device: Any) -> int:
    wanted = _pci_numbers(bus_id.value.decode())
    return _give_handle(node, device, lambda _at, gpu: _pci_numbers(gpu.slot.pci_address) == wanted)


def _pci_numbers(address: str) -> tuple[int, int, int, int]:
    domain, bus, rest = address.split(":")
    device, function = rest.split(".")
    return int(domain, 16), int(bus, 16), int(device, 16), int(function, 16)


# --- what a GPU is ---


@CALLS.device_function("nvmlDeviceGetUUID")
def _uuid(_node: SimulatedNode, gpu: SimulatedGpu, buffer: Any, size: Any) -> int:
    return fill_text(buffer, size, gpu.uuid)


@CALLS.device_function("nvmlDeviceGetSerial")
def _serial(_node: SimulatedNode, gpu: SimulatedGpu, buffer: Any, size: Any) -> int:
    # Made from what is the GPU's own, in the form of NVIDIA's.
    return fill_text(buffer, size, f"{int(gpu.uuid[-12:], 16) % 10**13:013d}")


@CALLS.device_function("nvmlDeviceGetName")
def _name(node: SimulatedNode, _gpu: SimulatedGpu, buffer: Any, size: Any) -> int:
    return fill_text(buffer, size, node.machine.gpu.name)


@CALLS.device_function("nvmlDeviceGetPciInfo_v3")
def _pci_info(_node: SimulatedNode, gpu: SimulatedGpu, info: Any) -> int:
    domain, bus, device, function = _pci_numbers(gpu.slot.pci_address)
    record = target(info)
    record.domain, record.bus, record.device = domain, bus, device
    record.busIdLegacy = f"{domain:04X}:{bus:02X}:{device:02X}.{function:X}".encode()
    # The driver writes eight digits of domain and capitals; sysfs neither.
    record.busId = f"{domain:08X}:{bus:02X}:{device:02X}.{function:X}".encode()
    return ReturnCode.SUCCESS


@CALLS.device_function("nvmlDeviceGetMinorNumber")
def _minor(_node: SimulatedNode, gpu: SimulatedGpu, minor: Any) -> int:
    return fill_number(minor, gpu.minor)


@CALLS.device_function("nvmlDeviceGetIndex")
def _index(node: SimulatedNode, gpu: SimulatedGpu, index: Any) -> int:
    session = node.session
    if session is None:
        return ReturnCode.UNINITIALIZED
    return fill_number(index, session.gpus.index(gpu))


@CALLS.device_function("nvmlDeviceGetCudaComputeCapability")
def _compute_capability(node: SimulatedNode, _gpu: SimulatedGpu, major: Any, minor: Any) -> int:
    whole, part = node.machine.gpu.compute_capability.split(".")
    fill_number(major, int(whole))
    return fill_number(minor, int(part))


@CALLS.device_function("nvmlDeviceGetNumGpuCores")
def _cores(node: SimulatedNode, _gpu: SimulatedGpu, cores: Any) -> int:
    model = node.machine.gpu
    if model.sm_count is None:
        return ReturnCode.NOT_SUPPORTED
    return fill_number(cores, model.sm_count * model.cores_per_sm)


@CALLS.device_function("nvmlDeviceGetAttributes_v2")
def _attributes(_node: SimulatedNode, _gpu: SimulatedGpu, _attributes: Any) -> int:
    # The driver answers this for MIG instances only.
    return ReturnCode.NOT_SUPPORTED


@CALLS.device_function("nvmlDeviceGetNumaNodeId")
def _memory_numa_node(_node: SimulatedNode, gpu: SimulatedGpu, numa_node: Any) -> int:
    if gpu.slot.memory_numa_node is None:
        return ReturnCode.NOT_SUPPORTED
    return fill_number(numa_node, gpu.slot.memory_numa_node)


@CALLS.device_function("nvmlDeviceGetMigMode")
def _mig_mode(node: SimulatedNode, _gpu: SimulatedGpu, current: Any, pending: Any) -> int:
    if not node.machine.gpu.mig_capable:
        return ReturnCode.NOT_SUPPORTED
    fill_number(current, 0)
    return fill_number(pending, 0)


@CALLS.device_function("nvmlDeviceGetMaxMigDeviceCount")
def _mig_devices_max(node: SimulatedNode, _gpu: SimulatedGpu, count: Any) -> int:
    return fill_number(count, _MIG_DEVICES_MAX if node.machine.gpu.mig_capable else 0)


@CALLS.device_function("nvmlDeviceGetMigDeviceHandleByIndex")
def _mig_device(_node: SimulatedNode, _gpu: SimulatedGpu, _index: Any, _device: Any) -> int:
    return ReturnCode.NOT_FOUND


@CALLS.device_function("nvmlDeviceGetGpuFabricInfoV")
def _fabric_info(node: SimulatedNode, _gpu: SimulatedGpu, info: Any) -> int:
    record = target(info)
    state = FABRIC_STATES[node.fabric_state or node.machine.fabric.state]
    if state == FABRIC_STATES["not_supported"]:
        return ReturnCode.NOT_SUPPORTED
    record.clusterUuid[:] = list(node.cluster.bytes)
    record.cliqueId = node.clique if node.machine.fabric.multi_node else 0
    record.state = state
    record.status = node.fabric_status
    record.healthMask = 0
    return ReturnCode.SUCCESS


@CALLS.device_function("nvmlDeviceGetNvLinkState")
def _nvlink_state(node: SimulatedNode, gpu: SimulatedGpu, link: Any, active: Any) -> int:
    if number(link) >= node.machine.gpu.nvlinks:
        return ReturnCode.NOT_SUPPORTED
    return fill_number(active, int(number(link) < gpu.active_links))


@CALLS.device_function("nvmlDeviceGetNvLinkRemoteDeviceType")
def _nvlink_remote_type(node: SimulatedNode, _gpu: SimulatedGpu, link: Any, kind: Any) -> int:
    if number(link) >= node.machine.gpu.nvlinks:
        return ReturnCode.NOT_SUPPORTED
    # Every described machine with NVLinks has switches.
    return fill_number(kind, _REMOTE_SWITCH)
