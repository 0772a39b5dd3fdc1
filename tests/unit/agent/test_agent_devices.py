"""The adapters: NVML over the simulated driver, sysfs, /proc, MPS, blocking calls."""

import asyncio
import contextvars
import functools
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.agent_bench import key

from gpupool.model.ids import DeviceUuid
from gpupool_agent.devices.blocking import BlockingCalls, CallHangsError, CallThreads
from gpupool_agent.devices.hca import SysfsHcaReader
from gpupool_agent.devices.host import ProcHostReader
from gpupool_agent.devices.interfaces import DriverUnavailableError, MpsError, SliceLimits
from gpupool_agent.devices.mps import InProcessMps
from gpupool_agent.devices.nvml import NvmlDriver, pci_address
from gpupool_agent.devices.processes import ProcProcessTable
from gpupool_agent.simulated.gpu_processes import GpuProcess
from gpupool_agent.simulated.node import CURRENT_NODE, TRUTH, FalseReadings, SimulatedNode
from gpupool_agent.simulated.nvml_library import install
from gpupool_agent.simulated.specs import parse_node
from gpupool_agent.simulated.sysfs import set_port, sysfs_root, write_sysfs

MACHINES = ("dgx-a100", "dgx-h100", "hgx-b200", "gb200-tray", "pcie-l40s", "gb10")


@pytest.fixture
def simulate(tmp_path: Path) -> Iterator[Callable[..., SimulatedNode]]:
    """Make a described machine the one that this test's driver calls reach."""
    install()
    tokens: list[contextvars.Token[SimulatedNode | None]] = []

    def make(text: str) -> SimulatedNode:
        spec = parse_node(text)
        directory = tmp_path / spec.node_id
        directory.mkdir()
        node = SimulatedNode(
            node_id=spec.node_id,
            machine=spec.machine,
            directory=directory,
            domain=spec.domain,
            clique=spec.clique,
        )
        write_sysfs(node, tmp_path / "pci")
        tokens.append(CURRENT_NODE.set(node))
        return node

    yield make
    for token in reversed(tokens):
        CURRENT_NODE.reset(token)


@pytest.mark.parametrize("kind", MACHINES)
def test_every_machine_is_read_through_nvml(
    kind: str, simulate: Callable[..., SimulatedNode]
) -> None:
    node = simulate(f"{kind}:n")
    driver = NvmlDriver(sysfs_root(node))
    found = driver.inventory()
    assert [each.uuid for each in found.devices] == [gpu.uuid for gpu in node.gpus]
    assert found.failed == ()
    assert found.unreadable == ()
    assert found.driver_version
    for each in found.devices:
        assert each.model
        assert len(each.pci_address) == len("0000:1b:00.0")
        assert (each.memory_mib is None) == (kind == "gb10")
        assert each.sm_count > 0
        assert each.compute_capability.count(".") == 1
        assert bool(each.nvlink_domain) == (kind == "gb200-tray")
    for usage in driver.usage():
        assert usage.processes == ()
        assert (usage.memory_used_mib is None) == (kind == "gb10")
    assert len(driver.telemetry()) == len(node.gpus)
    driver.close()


def test_trays_of_one_domain_share_it_and_others_do_not(
    simulate: Callable[..., SimulatedNode],
) -> None:
    domains: list[str] = []
    for text in ("gb200-tray:a,domain=x", "gb200-tray:b,domain=x", "gb200-tray:c,domain=y"):
        driver = NvmlDriver(sysfs_root(simulate(text)))
        domains.append(driver.inventory().devices[0].nvlink_domain)
        driver.close()
    assert domains[0] == domains[1] != domains[2]
    cluster, clique = domains[0].rsplit(".", 1)
    assert len(cluster) == 36
    assert clique.isdigit()


def test_a_lost_gpu_is_named_and_hides_no_other(simulate: Callable[..., SimulatedNode]) -> None:
    node = simulate("dgx-h100:n")
    driver = NvmlDriver(sysfs_root(node))
    driver.inventory()
    node.gpus[3].lost = True
    usage = driver.usage()
    assert [each.uuid for each in usage if each.failed] == [node.gpus[3].uuid]
    assert all(each.processes == () for each in usage if not each.failed)
    assert len(driver.telemetry()) == 7
    again = driver.inventory()
    assert [(each.uuid, each.code) for each in again.failed] == [(node.gpus[3].uuid, "gpu_lost")]
    assert len(again.devices) == 8
    node.gpus[3].lost = False
    assert driver.inventory().failed == ()
    driver.close()


def test_a_gpu_that_was_never_readable_is_told_as_such(
    simulate: Callable[..., SimulatedNode],
) -> None:
    node = simulate("pcie-l40s:n")
    node.gpus[0].lost = True
    driver = NvmlDriver(sysfs_root(node))
    found = driver.inventory()
    assert len(found.devices) == len(node.gpus) - 1
    assert found.unreadable == ("GPU 0: the driver has lost it",)
    driver.close()


@pytest.mark.parametrize(
    "told",
    [
        FalseReadings(used_bytes=17 * 10**12),
        FalseReadings(used_bytes=2**64 - 1),
        FalseReadings(used_bytes=2**63),
        FalseReadings(total_bytes=2**64 - 1),
        FalseReadings(total_bytes=0),
        FalseReadings(total_bytes=1, used_bytes=0),
    ],
)
def test_impossible_memory_is_dropped_and_flagged(
    told: FalseReadings, simulate: Callable[..., SimulatedNode]
) -> None:
    node = simulate("dgx-h100:n")
    driver = NvmlDriver(sysfs_root(node))
    before = driver.inventory().devices
    node.set_false(node.gpus[0], told)
    usage, other = driver.usage()[:2]
    assert (usage.memory_used_mib, other.doubt) == (None, "")
    assert "MiB" in usage.doubt
    assert driver.telemetry()[0].memory_used_mib is None
    # What is known of the device stays known.
    assert driver.inventory().devices == before
    node.set_false(node.gpus[0], TRUTH)
    assert driver.usage()[0].doubt == ""
    assert driver.usage()[0].memory_used_mib == node.used_mib(node.gpus[0])


def test_a_process_that_holds_more_than_there_is_is_listed_without_its_memory(
    simulate: Callable[..., SimulatedNode],
) -> None:
    node = simulate("dgx-h100:n")
    driver = NvmlDriver(sysfs_root(node))
    driver.inventory()
    ticks = ProcProcessTable().start_ticks(os.getpid())
    assert ticks is not None
    node.processes.add(
        GpuProcess(
            pid=os.getpid(),
            start_ticks=ticks,
            uid=0,
            uuids=(node.gpus[0].uuid,),
            memory_mib=500,
        )
    )
    node.set_false(node.gpus[0], FalseReadings(process_bytes=17 * 10**12))
    usage = driver.usage()[0]
    assert usage.processes is not None
    assert [(each.pid, each.memory_mib) for each in usage.processes] == [(os.getpid(), 0)]
    assert f"process {os.getpid()}" in usage.doubt
    assert usage.memory_used_mib == node.used_mib(node.gpus[0])


def test_measurements_out_of_range_are_dropped_and_flagged(
    simulate: Callable[..., SimulatedNode],
) -> None:
    node = simulate("dgx-h100:n")
    driver = NvmlDriver(sysfs_root(node))
    driver.inventory()
    node.set_false(node.gpus[0], FalseReadings(utilization=4_000_000))
    measured = driver.telemetry()[0]
    assert measured.utilization_pct is None
    assert measured.power_mw
    assert "utilization_pct 4000000" in driver.usage()[0].doubt
    node.set_false(node.gpus[0], TRUTH)
    assert driver.telemetry()[0].utilization_pct == 0
    assert driver.usage()[0].doubt == ""


def test_a_driver_that_is_not_loaded_is_unavailable_and_comes_back(
    simulate: Callable[..., SimulatedNode],
) -> None:
    node = simulate("dgx-h100:n")
    driver = NvmlDriver(sysfs_root(node))
    node.driver_loaded = False
    with pytest.raises(DriverUnavailableError):
        driver.inventory()
    with pytest.raises(DriverUnavailableError):
        driver.usage()
    node.driver_loaded = True
    assert len(driver.inventory().devices) == 8
    driver.close()


@pytest.mark.parametrize(
    ("bus_id", "address"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("00010000:01:00.0", "0000:01:00.0"),
        ("0000000A:01:00.0", "000a:01:00.0"),
        ("", ""),
    ],
)
def test_a_pci_address_has_a_domain_of_four_digits(bus_id: str, address: str) -> None:
    assert pci_address(bus_id) == address


def test_network_adapters_are_read_with_their_ports(
    simulate: Callable[..., SimulatedNode],
) -> None:
    node = simulate("dgx-h100:n")
    hcas = SysfsHcaReader(sysfs_root(node)).read()
    assert len(hcas) == len(node.machine.hcas)
    first = hcas[0]
    assert len(first.node_guid) == 16
    assert len(first.pci_address) == len("0000:1b:00.0")
    (port,) = first.ports
    assert port.state == "ACTIVE"
    assert port.rate_mbps == node.machine.hcas[0].rate_gbps * 1000
    assert len(port.port_guid) == 16
    assert port.lid > 0
    assert port.sm_lid == 1
    set_port(node, first.name, up=False)
    assert SysfsHcaReader(sysfs_root(node)).read()[0].ports[0].state == "DOWN"


def test_a_host_without_adapters_and_files_that_say_nothing_are_no_error(tmp_path: Path) -> None:
    assert SysfsHcaReader(tmp_path).read() == ()
    port = tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "lid").write_text("N/A (no PMA)")
    (port / "rate").write_text("nonsense")
    (hca,) = SysfsHcaReader(tmp_path).read()
    assert hca.numa_node == -1
    assert (hca.ports[0].lid, hca.ports[0].rate_mbps) == (0, 0)


def test_the_host_is_read_from_proc() -> None:
    facts = ProcHostReader().read()
    assert len(facts.boot_id) == 36
    assert facts.cpu_milli >= 1000
    assert facts.host_memory_mib > 0
    assert facts.simulated == ""


def test_a_process_is_described_with_its_lease_and_its_ancestors() -> None:
    child = subprocess.Popen(["sleep", "60"], env={"GPUPOOL_LEASE_ID": "l-1", "PATH": "/bin"})
    try:
        deadline = time.monotonic() + 10
        facts = ProcProcessTable().describe(child.pid)
        # A process has its own environment and command once it has called exec.
        while (facts is None or facts.command != "sleep 60") and time.monotonic() < deadline:
            facts = ProcProcessTable().describe(child.pid)
        assert facts is not None
        assert facts.command == "sleep 60"
        assert facts.lease_id == "l-1"
        assert facts.uid == os.getuid()
        assert facts.ancestors[0] == os.getpid()
        assert facts.start_ticks > 0
    finally:
        child.kill()
        child.wait()
    assert ProcProcessTable().describe(child.pid) is None


def test_an_environment_that_may_not_be_read_is_unknown_not_empty(tmp_path: Path) -> None:
    directory = tmp_path / "5"
    directory.mkdir()
    (directory / "stat").write_text("5 (a) b) S 1 " + " ".join("0" * 17) + " 77 0")
    (directory / "cmdline").write_bytes(b"prog\0\x1b[0m\0")
    facts = ProcProcessTable(tmp_path).describe(5)
    assert facts is not None
    assert facts.lease_id is None
    assert facts.start_ticks == 77
    assert facts.command == "prog ?[0m"


def sleeping() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"])


async def test_the_end_of_a_watched_process_is_told_once() -> None:
    child = sleeping()
    table = ProcProcessTable()
    ended: asyncio.Queue[str] = asyncio.Queue()
    ticks = table.start_ticks(child.pid)
    assert ticks is not None
    watch = table.watch(child.pid, ticks, ended.put_nowait)
    assert watch is not None
    child.send_signal(signal.SIGKILL)
    assert await asyncio.wait_for(ended.get(), 10) == "exited"
    watch.close()
    child.wait()
    assert ended.empty()


async def test_another_process_with_the_pid_is_neither_watched_nor_signalled() -> None:
    table = ProcProcessTable()
    child = sleeping()
    try:
        ticks = table.start_ticks(child.pid)
        assert ticks is not None
        assert table.watch(child.pid, ticks - 1, lambda _: None) is None
        assert table.signal(child.pid, ticks - 1, signal.SIGKILL) == ""
        assert child.poll() is None
        assert table.signal(child.pid, ticks, signal.SIGKILL) == ""
        assert child.wait() == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()


GPU = DeviceUuid("GPU-1")


def limits(lease: str, share_pct: int, uid: int = 1000) -> SliceLimits:
    return SliceLimits(key=key(lease), token=1, uid=uid, share_pct=share_pct, memory_mib=100)


async def test_mps_serves_one_user_a_gpu_and_at_most_its_whole(tmp_path: Path) -> None:
    mps = InProcessMps(tmp_path)
    with pytest.raises(MpsError, match="no MPS daemon"):
        await mps.set_limits(GPU, limits("a", 10))
    await mps.start(GPU, 1000)
    await mps.start(GPU, 1000)
    with pytest.raises(MpsError, match="serves uid 1000, not 1001"):
        await mps.start(GPU, 1001)
    environment = await mps.set_limits(GPU, limits("a", 70))
    assert environment == await mps.set_limits(GPU, limits("a", 70))
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "70"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "GPU-1=100M"
    with pytest.raises(MpsError, match="70 % are taken, 40 % do not fit"):
        await mps.set_limits(GPU, limits("b", 40))
    await mps.probe(GPU, limits("a", 70))
    with pytest.raises(MpsError, match="1 slices are left"):
        await mps.stop(GPU)
    assert await mps.verify(GPU) != ""
    await mps.remove_limits(GPU, key("a"), 1)
    await mps.remove_limits(GPU, key("a"), 1)
    await mps.stop(GPU)
    await mps.stop(GPU)
    assert await mps.verify(GPU) == ""
    assert (await mps.status(GPU)).uid is None
    again = InProcessMps(tmp_path)
    await again.start(GPU, 1000)
    assert await again.set_limits(GPU, limits("a", 70)) == environment


async def test_a_blocking_call_runs_in_the_context_of_its_maker_on_another_thread() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("mine")
    calls = BlockingCalls("driver")
    variable.set("changed")

    def read() -> tuple[str, bool]:
        return variable.get(), threading.current_thread() is threading.main_thread()

    assert await calls.call(read, 10) == ("mine", False)
    with pytest.raises(ZeroDivisionError):
        await calls.call(lambda: 1 // 0, 10)


async def test_a_hung_call_is_given_up_and_refuses_others_until_it_returns() -> None:
    calls = BlockingCalls("driver")
    gate = threading.Event()
    with pytest.raises(CallHangsError, match=r"the driver has not answered for 0\.05 s"):
        await calls.call(gate.wait, 0.05)
    before = time.monotonic()
    with pytest.raises(CallHangsError, match="an earlier call to the driver has not returned"):
        await calls.call(gate.wait, 30)
    assert time.monotonic() - before < 20
    gate.set()
    await calls.returned()
    assert await calls.call(lambda: 5, 10) == 5


async def test_a_call_that_fails_after_it_was_given_up_disturbs_nobody() -> None:
    calls = BlockingCalls("driver")
    gate = threading.Event()

    def late_failure() -> Any:
        gate.wait()
        raise ValueError("too late")

    with pytest.raises(CallHangsError):
        await calls.call(late_failure, 0.05)
    gate.set()
    await calls.returned()
    assert await calls.call(lambda: 1, 10) == 1


async def thread_of(calls: BlockingCalls) -> threading.Thread:
    return await calls.call(threading.current_thread, 10)


async def test_agents_of_a_process_call_one_after_the_other_on_few_threads() -> None:
    threads = CallThreads(idle_s=60)
    agents = [BlockingCalls(f"driver {number}", threads) for number in range(50)]
    # A call can come before the thread of the one before has sat down.
    assert len({await thread_of(calls) for calls in agents}) <= 5


async def test_a_call_waits_for_no_other_agents_thread() -> None:
    threads = CallThreads(idle_s=60)
    gate = threading.Event()
    hung = [BlockingCalls(f"driver {number}", threads) for number in range(20)]
    for calls in hung:
        with pytest.raises(CallHangsError):
            await calls.call(gate.wait, 0.01)
    assert await BlockingCalls("another", threads).call(lambda: 5, 10) == 5
    gate.set()
    for calls in hung:
        await calls.returned()
        assert await calls.call(lambda: 6, 10) == 6


async def test_a_thread_that_nobody_needs_ends() -> None:
    thread = await thread_of(BlockingCalls("driver", CallThreads(idle_s=0.05)))
    assert thread is not threading.main_thread()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


async def test_calls_that_come_as_threads_end_are_all_made() -> None:
    calls = BlockingCalls("driver", CallThreads(idle_s=0.0001))
    for number in range(500):
        assert await calls.call(functools.partial(int, number), 10) == number
        await asyncio.sleep(0.0001)


async def test_a_waiting_thread_keeps_nothing_of_its_last_call() -> None:
    calls = BlockingCalls("driver", CallThreads(idle_s=60))
    big = Holding()
    kept = weakref.ref(big)
    await calls.call(big.use, 10)
    del big
    for _ in range(1000):
        if kept() is None:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the call is still held")


class Holding:
    """What a call has hold of."""

    def use(self) -> None:
        """Be called."""
