"""NVML calls that say what a GPU does now: memory, processes, measurements, events."""

import ctypes
import time
from collections.abc import Sequence
from typing import Any

from gpupool_agent.simulated.node import SimulatedGpu, SimulatedNode
from gpupool_agent.simulated.nvml_calls import (
    Calls,
    ReturnCode,
    fill_number,
    number,
    target,
)

_MIB = 1024 * 1024
_NO_INSTANCE = 0xFFFFFFFF
_SUPPORTED_EVENTS = 0x8  # Xid

CALLS = Calls()


# --- what it does now ---


@CALLS.device_function("nvmlDeviceGetMemoryInfo")
def _memory(node: SimulatedNode, gpu: SimulatedGpu, memory: Any) -> int:
    return _fill_memory(node, gpu, memory, separate_reserve=False)


@CALLS.device_function("nvmlDeviceGetMemoryInfo_v2")
def _memory_v2(node: SimulatedNode, gpu: SimulatedGpu, memory: Any) -> int:
    return _fill_memory(node, gpu, memory, separate_reserve=True)


def _fill_memory(
    node: SimulatedNode, gpu: SimulatedGpu, memory: Any, *, separate_reserve: bool
) -> int:
    model = node.machine.gpu
    if model.memory_total_mib is None:
        return ReturnCode.NOT_SUPPORTED
    record = target(memory)
    used_mib = node.used_mib(gpu)
    record.total = model.memory_total_mib * _MIB
    record.free = max(0, model.memory_total_mib - model.memory_reserved_mib - used_mib) * _MIB
    if separate_reserve:
        record.reserved = model.memory_reserved_mib * _MIB
        record.used = used_mib * _MIB
    else:
        record.used = (used_mib + model.memory_reserved_mib) * _MIB
    record.used = record.used if gpu.false.used_bytes is None else gpu.false.used_bytes
    record.total = record.total if gpu.false.total_bytes is None else gpu.false.total_bytes
    return ReturnCode.SUCCESS


@CALLS.device_function("nvmlDeviceGetComputeRunningProcesses_v3")
def _compute_processes(node: SimulatedNode, gpu: SimulatedGpu, count: Any, array: Any) -> int:
    return _fill_processes(node, gpu, count, array, mps=False)


@CALLS.device_function("nvmlDeviceGetMPSComputeRunningProcesses_v3")
def _mps_processes(node: SimulatedNode, gpu: SimulatedGpu, count: Any, array: Any) -> int:
    return _fill_processes(node, gpu, count, array, mps=True)


@CALLS.device_function("nvmlDeviceGetGraphicsRunningProcesses_v3")
def _graphics_processes(_node: SimulatedNode, _gpu: SimulatedGpu, count: Any, _array: Any) -> int:
    return fill_number(count, 0)


def _fill_processes(
    node: SimulatedNode, gpu: SimulatedGpu, count: Any, array: Sequence[Any] | None, *, mps: bool
) -> int:
    processes = [each for each in node.processes_on(gpu) if bool(each.pipe) == mps]
    room = number(target(count)) if array is not None else 0
    fill_number(count, len(processes))
    if len(processes) > room:
        return ReturnCode.INSUFFICIENT_SIZE
    for process, row in zip(processes, () if array is None else array, strict=False):
        row.pid = process.pid
        told_bytes = gpu.false.process_bytes
        row.usedGpuMemory = process.memory_mib * _MIB if told_bytes is None else told_bytes
        row.gpuInstanceId = _NO_INSTANCE
        row.computeInstanceId = _NO_INSTANCE
    return ReturnCode.SUCCESS


@CALLS.device_function("nvmlDeviceGetUtilizationRates")
def _utilization(node: SimulatedNode, gpu: SimulatedGpu, rates: Any) -> int:
    record = target(rates)
    record.gpu, record.memory = (90, 40) if node.processes_on(gpu) else (0, 0)
    record.gpu = record.gpu if gpu.false.utilization is None else gpu.false.utilization
    return ReturnCode.SUCCESS


@CALLS.device_function("nvmlDeviceGetTemperature")
def _temperature(node: SimulatedNode, gpu: SimulatedGpu, _sensor: Any, temperature: Any) -> int:
    return fill_number(temperature, _temperature_c(node, gpu))


@CALLS.device_function("nvmlDeviceGetTemperatureV")
def _temperature_v(node: SimulatedNode, gpu: SimulatedGpu, temperature: Any) -> int:
    target(temperature).temperature = _temperature_c(node, gpu)
    return ReturnCode.SUCCESS


def _temperature_c(node: SimulatedNode, gpu: SimulatedGpu) -> int:
    return node.machine.gpu.temperature_idle_c + (25 if node.processes_on(gpu) else 0)


@CALLS.device_function("nvmlDeviceGetPowerUsage")
def _power(node: SimulatedNode, gpu: SimulatedGpu, power: Any) -> int:
    model = node.machine.gpu
    busy_mw = model.power_limit_mw * 3 // 4
    return fill_number(power, busy_mw if node.processes_on(gpu) else model.power_idle_mw)


@CALLS.device_function("nvmlDeviceGetEnforcedPowerLimit")
def _power_limit(node: SimulatedNode, _gpu: SimulatedGpu, limit: Any) -> int:
    return fill_number(limit, node.machine.gpu.power_limit_mw)


@CALLS.device_function("nvmlDeviceGetComputeMode")
def _compute_mode(_node: SimulatedNode, gpu: SimulatedGpu, mode: Any) -> int:
    return fill_number(mode, gpu.compute_mode)


@CALLS.device_function("nvmlDeviceSetComputeMode")
def _set_compute_mode(node: SimulatedNode, gpu: SimulatedGpu, mode: Any) -> int:
    node.set_compute_mode(gpu, number(mode))
    return ReturnCode.SUCCESS


@CALLS.device_function("nvmlDeviceGetEccMode")
def _ecc_mode(node: SimulatedNode, _gpu: SimulatedGpu, current: Any, pending: Any) -> int:
    if not node.machine.gpu.ecc:
        return ReturnCode.NOT_SUPPORTED
    fill_number(current, 1)
    return fill_number(pending, 1)


@CALLS.device_function("nvmlDeviceGetTotalEccErrors")
def _ecc_errors(
    node: SimulatedNode, _gpu: SimulatedGpu, _error: Any, _counter: Any, count: Any
) -> int:
    return fill_number(count, 0) if node.machine.gpu.ecc else ReturnCode.NOT_SUPPORTED


@CALLS.device_function("nvmlDeviceGetRemappedRows")
def _remapped_rows(node: SimulatedNode, _gpu: SimulatedGpu, *counts: Any) -> int:
    if not node.machine.gpu.ecc:
        return ReturnCode.NOT_SUPPORTED
    for count in counts:
        fill_number(count, 0)
    return ReturnCode.SUCCESS


# --- events: none ever comes ---


@CALLS.function("nvmlEventSetCreate")
def _event_set_create(_node: SimulatedNode, event_set: Any) -> int:
    ctypes.c_void_p.from_buffer(target(event_set)).value = 1
    return ReturnCode.SUCCESS


@CALLS.function("nvmlEventSetFree")
def _event_set_free(_node: SimulatedNode, _event_set: Any) -> int:
    return ReturnCode.SUCCESS


@CALLS.device_function("nvmlDeviceGetSupportedEventTypes")
def _supported_events(_node: SimulatedNode, _gpu: SimulatedGpu, types: Any) -> int:
    return fill_number(types, _SUPPORTED_EVENTS)


@CALLS.device_function("nvmlDeviceRegisterEvents")
def _register_events(_node: SimulatedNode, _gpu: SimulatedGpu, types: Any, _event_set: Any) -> int:
    # One unsupported bit fails the whole registration, as on a real driver.
    unsupported = number(types) & ~_SUPPORTED_EVENTS
    return ReturnCode.NOT_SUPPORTED if unsupported else ReturnCode.SUCCESS


@CALLS.function("nvmlEventSetWait_v2")
def _event_set_wait(_node: SimulatedNode, _event_set: Any, _data: Any, timeout_ms: Any) -> int:
    time.sleep(number(timeout_ms) / 1000)
    return ReturnCode.TIMEOUT
