"""Real pynvml over the simulated library."""

import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pynvml
import pytest

from gpupool_agent.simulated.gpu_processes import GpuProcess, start_ticks_of
from gpupool_agent.simulated.machine import load_machine, machine_names
from gpupool_agent.simulated.node import CURRENT_NODE, SimulatedNode, UnknownGpuError
from gpupool_agent.simulated.nvml_library import LibraryLoadedError, NvmlLibrary, install

MIB = 1024 * 1024
Result = TypeVar("Result")


@pytest.fixture(autouse=True)
def _library() -> None:
    install()


def make_node(tmp_path: Path, machine: str = "dgx-h100", node_id: str = "n1") -> SimulatedNode:
    directory = tmp_path / node_id
    directory.mkdir(parents=True)
    return SimulatedNode(node_id=node_id, machine=load_machine(machine), directory=directory)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimulatedNode]:
    made = make_node(tmp_path)
    token = CURRENT_NODE.set(made)
    yield made
    made.answering.set()
    CURRENT_NODE.reset(token)


def on(node: SimulatedNode, call: Callable[[], Result]) -> Result:
    """Run a call on the node, as an agent of it would."""
    context = contextvars.copy_context()
    context.run(CURRENT_NODE.set, node)
    return context.run(call)


def handles() -> list[Any]:
    return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]


def uuids() -> list[str]:
    pynvml.nvmlInit()
    try:
        return [pynvml.nvmlDeviceGetUUID(handle) for handle in handles()]
    finally:
        pynvml.nvmlShutdown()


def add_process(node: SimulatedNode, index: int, memory_mib: int, pipe: str = "") -> None:
    node.processes.add(
        GpuProcess(
            pid=os.getpid(),
            start_ticks=start_ticks_of(os.getpid()) or 0,
            uid=os.getuid(),
            uuids=(node.gpus[index].uuid,),
            memory_mib=memory_mib,
            pipe=pipe,
        )
    )


@pytest.mark.parametrize("name", machine_names())
def test_pynvml_reads_every_machine_as_it_is_described(tmp_path: Path, name: str) -> None:
    node = make_node(tmp_path, name)
    model = node.machine.gpu

    def read() -> None:
        pynvml.nvmlInit()
        assert pynvml.nvmlSystemGetDriverVersion() == node.machine.driver_version
        assert pynvml.nvmlDeviceGetCount() == len(node.machine.slots)
        for index, (handle, slot) in enumerate(zip(handles(), node.machine.slots, strict=True)):
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            assert uuid == node.gpus[index].uuid
            assert pynvml.nvmlDeviceGetName(handle) == model.name
            bus_id = pynvml.nvmlDeviceGetPciInfo(handle).busId
            assert bus_id == f"0000{slot.pci_address.upper()}"
            assert pynvml.nvmlDeviceGetMinorNumber(handle) == index
            assert pynvml.nvmlDeviceGetIndex(handle) == index
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            assert f"{major}.{minor}" == model.compute_capability
            assert pynvml.nvmlDeviceGetNumGpuCores(handle) == model.sm_count * model.cores_per_sm
            for other in (
                pynvml.nvmlDeviceGetHandleByUUID(uuid),
                pynvml.nvmlDeviceGetHandleByPciBusId(bus_id),
                pynvml.nvmlDeviceGetHandleByPciBusId(slot.pci_address),
            ):
                assert pynvml.nvmlDeviceGetUUID(other) == uuid
            assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle) == []
            assert pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle) == []
            assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 0
            assert pynvml.nvmlDeviceGetPowerUsage(handle) == model.power_idle_mw
            assert (
                pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
                == model.temperature_idle_c
            )
        pynvml.nvmlShutdown()

    on(node, read)


def test_memory_is_told_in_both_versions_and_adds_up(node: SimulatedNode) -> None:
    pynvml.nvmlInit()
    add_process(node, 0, 1000)
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    new = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    assert new.total == 81559 * MIB
    assert new.reserved == 551 * MIB
    assert new.used == 1001 * MIB
    assert new.free == new.total - new.reserved - new.used
    old = pynvml.nvmlDeviceGetMemoryInfo(handle)
    assert (old.total, old.free) == (new.total, new.free)
    assert old.used == new.used + new.reserved


def test_a_gpu_with_unified_memory_gives_no_size(tmp_path: Path) -> None:
    def read() -> None:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetName(handle) == "NVIDIA GB10"
        for version in (None, pynvml.nvmlMemory_v2):
            with pytest.raises(pynvml.NVMLError_NotSupported):
                pynvml.nvmlDeviceGetMemoryInfo(handle, version=version)
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetEccMode(handle)

    on(make_node(tmp_path, "gb10"), read)


def test_processes_are_listed_apart_with_and_without_mps(node: SimulatedNode) -> None:
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(3)
    add_process(node, 3, 500)
    [process] = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    assert (process.pid, process.usedGpuMemory) == (os.getpid(), 500 * MIB)
    assert pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle) == []
    assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu > 0
    add_process(node, 3, 500, pipe="/somewhere")
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle) == []
    [process] = pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
    assert process.pid == os.getpid()
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(handles()[2]) == []


def test_trays_of_one_domain_share_a_cluster_and_others_do_not(tmp_path: Path) -> None:
    def fabric() -> tuple[bytes, int, int]:
        pynvml.nvmlInit()
        info = pynvml.c_nvmlGpuFabricInfo_v2_t()
        pynvml.nvmlDeviceGetGpuFabricInfoV(pynvml.nvmlDeviceGetHandleByIndex(0), pynvml.byref(info))
        return bytes(info.clusterUuid), info.cliqueId, info.state

    def tray(node_id: str, domain: str) -> SimulatedNode:
        node = make_node(tmp_path, "gb200-tray", node_id)
        node.domain = domain
        return node

    first, second = on(tray("t1", "nvl-a"), fabric), on(tray("t2", "nvl-a"), fabric)
    assert first == second
    assert first[2] == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
    assert on(tray("t3", "nvl-b"), fabric)[0] != first[0]
    alone = on(make_node(tmp_path, "dgx-h100", "h1"), fabric)
    assert alone == (bytes(16), 0, pynvml.NVML_GPU_FABRIC_STATE_COMPLETED)


def test_a_symbol_that_the_driver_lacks_is_function_not_found(tmp_path: Path) -> None:
    def read() -> None:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):
            pynvml.nvmlDeviceGetGpuFabricInfoV(
                handle, pynvml.byref(pynvml.c_nvmlGpuFabricInfo_v2_t())
            )
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):
            pynvml.nvmlDeviceGetPlatformInfo(handle, pynvml.byref(pynvml.c_uint()))

    on(make_node(tmp_path, "dgx-a100"), read)


def test_nvlinks_beyond_those_there_are_not_supported(node: SimulatedNode) -> None:
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert [pynvml.nvmlDeviceGetNvLinkState(handle, link) for link in range(18)] == [1] * 18
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceGetNvLinkState(handle, 18)
    node.gpus[0].active_links = 17
    assert pynvml.nvmlDeviceGetNvLinkState(handle, 17) == 0


def test_the_compute_mode_is_kept_over_sessions(node: SimulatedNode) -> None:
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    pynvml.nvmlDeviceSetComputeMode(handle, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    modes = [pynvml.nvmlDeviceGetComputeMode(handle) for handle in handles()]
    assert modes == [0, 3, 0, 0, 0, 0, 0, 0]


def test_two_nodes_in_one_process_do_not_see_each_others_gpus(tmp_path: Path) -> None:
    nodes = [make_node(tmp_path, "dgx-h100", f"n{i}") for i in range(8)]
    seen: dict[str, list[list[str]]] = {node.node_id: [] for node in nodes}
    start = threading.Barrier(len(nodes))

    def look(node: SimulatedNode) -> None:
        start.wait(10)
        for _ in range(50):
            seen[node.node_id].append(uuids())

    threads = [
        threading.Thread(target=on, args=(node, lambda node=node: look(node))) for node in nodes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for node in nodes:
        assert seen[node.node_id] == [[gpu.uuid for gpu in node.gpus]] * 50
    assert len({gpu.uuid for node in nodes for gpu in node.gpus}) == 64


def test_outside_any_node_there_is_no_driver() -> None:
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlInit()


def test_calls_before_init_are_uninitialized(node: SimulatedNode) -> None:
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlShutdown()


def test_a_lost_gpu_fails_every_call_of_its_own_and_no_other(node: SimulatedNode) -> None:
    pynvml.nvmlInit()
    all_handles = handles()
    node.set_lost(node.gpus[2], lost=True)
    for call in (
        pynvml.nvmlDeviceGetUUID,
        pynvml.nvmlDeviceGetMemoryInfo,
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetUtilizationRates,
    ):
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            call(all_handles[2])
        call(all_handles[3])
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetHandleByIndex(2)
    assert pynvml.nvmlDeviceGetCount() == 8
    node.set_lost(node.gpus[2], lost=False)
    assert pynvml.nvmlDeviceGetUUID(all_handles[2]) == node.gpus[2].uuid


def test_a_hung_driver_blocks_only_the_calling_thread_until_it_is_released(
    node: SimulatedNode, tmp_path: Path
) -> None:
    node.answering.clear()
    done = threading.Event()

    def call() -> None:
        uuids()
        done.set()

    thread = threading.Thread(target=on, args=(node, call), daemon=True)
    thread.start()
    other = make_node(tmp_path, "gb10", "other")
    assert len(on(other, uuids)) == 1
    assert not done.is_set()
    node.answering.set()
    assert done.wait(10)
    thread.join(10)


def test_a_driver_that_is_loaded_again_shows_its_gpus_to_a_new_session(
    node: SimulatedNode,
) -> None:
    pynvml.nvmlInit()
    [first, *_] = handles()
    node.unload_driver()
    assert pynvml.nvmlDeviceGetCount() == 0
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetUUID(first)
    pynvml.nvmlShutdown()
    assert uuids() == []
    node.load_driver()
    assert uuids() == [gpu.uuid for gpu in node.gpus]


def test_a_gpu_that_is_pulled_is_missing_in_the_middle_and_a_new_one_is_new(
    node: SimulatedNode,
) -> None:
    before = uuids()
    node.remove_gpu(node.gpus[4])
    assert uuids() == before[:4] + before[5:]
    with pytest.raises(UnknownGpuError, match=r"'0000:1b:00\.0'.*accepted are 0000:9d:00\.0"):
        node.add_gpu("0000:1b:00.0")
    added = node.add_gpu("0000:9d:00.0")
    assert added.uuid not in before
    assert uuids() == [*before[:4], added.uuid, *before[5:]]


def test_handles_of_an_older_session_are_void(node: SimulatedNode) -> None:
    pynvml.nvmlInit()
    old = pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceGetUUID(old)


def test_an_event_set_waits_and_times_out(node: SimulatedNode) -> None:
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    event_set = pynvml.nvmlEventSetCreate()
    supported = pynvml.nvmlDeviceGetSupportedEventTypes(handle)
    pynvml.nvmlDeviceRegisterEvents(handle, supported, event_set)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypePState, event_set)
    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlEventSetWait(event_set, 1)
    pynvml.nvmlEventSetFree(event_set)


def test_errors_have_texts(node: SimulatedNode) -> None:
    assert pynvml.nvmlErrorString(pynvml.NVML_ERROR_GPU_IS_LOST) == "Gpu is lost"


def test_a_process_that_opened_real_hardware_cannot_simulate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", object())
    with pytest.raises(LibraryLoadedError):
        install()
    monkeypatch.undo()
    assert isinstance(pynvml.nvmlLib, NvmlLibrary)
