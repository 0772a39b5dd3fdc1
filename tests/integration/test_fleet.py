"""A fleet of simulated hosts: real agents, each with a connection of its own."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from gpupool.v1 import node_pb2, node_pb2_grpc
from gpupool_agent.simulated.control import InjectionError, inject
from gpupool_agent.simulated.gpu_processes import start_ticks_of
from gpupool_agent.simulated.inject import main as inject_command

DEADLINE_S = 60.0


class Node:
    """What the listening end knows of one node."""

    def __init__(self) -> None:
        self.hellos: list[node_pb2.Hello] = []
        self.peers: set[str] = set()
        self.devices: dict[str, node_pb2.DeviceReport] = {}
        self.faults: dict[tuple[str, str], bool] = {}
        self.reports = 0
        self.streams = 0

    @property
    def hello(self) -> node_pb2.Hello:
        return self.hellos[-1]

    def take(self, report: node_pb2.Report) -> None:
        self.reports += 1
        self.devices |= {device.uuid: device for device in report.devices}
        for fault in report.faults:
            self.faults[fault.code, fault.device_uuid] = fault.open


class ListeningAllocator(node_pb2_grpc.NodeServiceServicer):
    """Welcomes every agent and takes down what it says."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.address = ""
        self._server = grpc.aio.server()

    async def start(self) -> None:
        node_pb2_grpc.add_NodeServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        first = await anext(request_iterator)
        node = self.nodes.setdefault(first.hello.node_id, Node())
        node.hellos.append(first.hello)
        node.devices |= {device.uuid: device for device in first.hello.devices}
        node.peers.add(context.peer())
        node.streams += 1
        try:
            yield node_pb2.ConnectResponse(
                welcome=node_pb2.Welcome(
                    epoch=1,
                    protocol_revision=1,
                    allocator_version="0.1.0",
                    heartbeat_timeout=Duration(seconds=10),
                    report_interval=Duration(seconds=2),
                    forward_key="key",
                )
            )
            async for message in request_iterator:
                if message.HasField("report"):
                    node.take(message.report)
        finally:
            node.streams -= 1


class FleetProcess:
    """One ``python -m gpupool_agent.simulated``."""

    def __init__(self, directory: Path, allocator: str) -> None:
        self.directory = directory
        self.control = directory / "control"
        self.ready_file = directory / "ready.json"
        self.allocator = allocator
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, *flags: str) -> dict[str, Any]:
        """Start it and wait until every node is connected; gives its ready file."""
        self.ready_file.unlink(missing_ok=True)
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gpupool_agent.simulated",
            *("--allocator", self.allocator),
            *("--control", str(self.control)),
            *("--ready-file", str(self.ready_file)),
            *("--usage-period-s", "0.2", "--inventory-period-s", "0.5"),
            *flags,
        )
        await until(lambda: self.ready_file.exists() or self.ended)
        assert not self.ended, "the fleet ended before it was ready"
        ready: dict[str, Any] = json.loads(self.ready_file.read_text())
        return ready

    @property
    def ended(self) -> bool:
        return self.process is not None and self.process.returncode is not None

    async def inject(self, node: str, action: str, *arguments: str) -> Any:
        return await asyncio.to_thread(inject, self.control, node, action, *arguments)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        if not self.ended:
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)


@pytest.fixture
async def allocator() -> AsyncIterator[ListeningAllocator]:
    made = ListeningAllocator()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def fleet(tmp_path: Path, allocator: ListeningAllocator) -> AsyncIterator[FleetProcess]:
    made = FleetProcess(tmp_path, allocator.address)
    yield made
    if made.process is not None:
        await made.end(signal.SIGKILL)


async def test_every_kind_of_host_says_what_it_has(
    fleet: FleetProcess, allocator: ListeningAllocator
) -> None:
    kinds = {
        "dgx-a100": (8, 81920 - 664, 8),
        "dgx-h100": (8, 81559 - 551, 8),
        "hgx-b200": (8, 183359 - 738, 8),
        "gb200-tray": (4, 189471 - 631, 4),
        "pcie-l40s": (4, 46068 - 609, 0),
        "gb10": (1, 0, 0),
    }
    nodes = [flag for kind in kinds for flag in ("--node", f"{kind}:{kind}-01,label.row=r1")]
    ready = await fleet.start(*nodes)
    assert sorted(ready["nodes"]) == sorted(f"{kind}-01" for kind in kinds)
    for kind, (gpus, memory_mib, rails) in kinds.items():
        inventory = allocator.nodes[f"{kind}-01"].hello.inventory
        assert inventory.simulated == kind
        assert inventory.labels == {"row": "r1"}
        assert len(inventory.devices) == gpus
        assert {device.memory_mib for device in inventory.devices} == {memory_mib}
        assert all(device.sm_count > 0 for device in inventory.devices)
        assert all(device.numa_node >= 0 for device in inventory.devices)
        active = [
            port
            for hca in inventory.hcas
            for port in hca.ports
            if port.state == "ACTIVE" and port.link_layer == "InfiniBand" and port.lid
        ]
        assert len(active) == rails
    assert await fleet.end() == 0


async def test_trays_of_a_domain_are_one_and_each_node_has_a_connection_of_its_own(
    fleet: FleetProcess, allocator: ListeningAllocator
) -> None:
    await fleet.start("--count", "gb200-tray=20", "--node", "dgx-h100:h")
    domains = {
        node_id: {device.nvlink_domain for device in node.hello.inventory.devices}
        for node_id, node in allocator.nodes.items()
    }
    assert domains.pop("h") == {""}
    assert all(len(domain) == 1 for domain in domains.values())
    counts = [domain.pop() for domain in domains.values()]
    assert sorted(counts.count(each) for each in set(counts)) == [2, 18]
    peers = [node.peers for node in allocator.nodes.values()]
    assert len(set().union(*peers)) == 21
    assert await fleet.end(signal.SIGINT) == 0


async def test_a_lost_gpu_is_reported_and_comes_back(
    fleet: FleetProcess, allocator: ListeningAllocator
) -> None:
    await fleet.start("--node", "dgx-h100:h1", "--node", "dgx-h100:h2")
    node = allocator.nodes["h1"]
    await until(lambda: len(node.devices) == 8 and all(d.clean for d in node.devices.values()))
    uuid = await fleet.inject("h1", "gpu-lost", "3")
    await until(lambda: node.devices[uuid].failed)
    assert sum(device.failed for device in node.devices.values()) == 1
    assert not any(device.failed for device in allocator.nodes["h2"].devices.values())
    await fleet.inject("h1", "gpu-back", uuid)
    await until(lambda: node.devices[uuid].clean and not node.devices[uuid].failed)


async def test_a_stray_process_is_named_with_its_memory_until_it_is_gone(
    fleet: FleetProcess, allocator: ListeningAllocator
) -> None:
    ready = await fleet.start("--node", "dgx-h100:h1")
    gpu = ready["nodes"]["h1"]["gpus"][2]
    node = allocator.nodes["h1"]
    pid = await fleet.inject("h1", "stray", gpu["pci_address"], "700")
    await until(lambda: bool(node.devices[gpu["uuid"]].strays))
    [stray] = node.devices[gpu["uuid"]].strays
    assert (stray.pid, stray.memory_mib, stray.uid) == (pid, 700, os.getuid())
    assert "cuda_client" in stray.command
    assert await fleet.inject("h1", "clear-stray") == 1
    await until(lambda: node.devices[gpu["uuid"]].clean)


async def test_strays_end_with_the_fleet_even_when_it_is_killed(fleet: FleetProcess) -> None:
    await fleet.start("--node", "dgx-h100:h1")
    pid = await fleet.inject("h1", "stray", "0", "100")
    assert start_ticks_of(pid) is not None
    await fleet.end(signal.SIGKILL)
    await until(lambda: start_ticks_of(pid) is None)


async def test_a_node_that_is_cut_off_is_back_only_when_it_is_reconnected(
    fleet: FleetProcess, allocator: ListeningAllocator
) -> None:
    await fleet.start("--node", "dgx-h100:h1", "--node", "dgx-h100:h2")
    first, other = allocator.nodes["h1"], allocator.nodes["h2"]
    await fleet.inject("h1", "cut-off")
    await until(lambda: first.streams == 0)
    reports = other.reports
    await until(lambda: other.reports > reports)
    assert len(first.hellos) == 1
    assert (await fleet.inject("h1", "show"))["connected"] is False
    await fleet.inject("h1", "reconnect")
    await until(lambda: first.streams == 1)
    assert first.hellos[0].agent_instance_id == first.hellos[1].agent_instance_id
    assert len(other.hellos) == 1


async def test_a_hung_driver_delays_no_report(
    fleet: FleetProcess, allocator: ListeningAllocator
) -> None:
    await fleet.start("--node", "dgx-h100:h1")
    node = allocator.nodes["h1"]
    await fleet.inject("h1", "nvml-hang")
    await until(lambda: any(code == "nvml_hang" and up for (code, _), up in node.faults.items()))
    reports = node.reports
    await until(lambda: node.reports >= reports + 3)
    await fleet.inject("h1", "nvml-resume")
    await until(lambda: not any(node.faults.values()))
    assert await fleet.end() == 0


async def test_a_fleet_with_a_hung_driver_still_stops(fleet: FleetProcess) -> None:
    await fleet.start("--node", "dgx-h100:h1")
    await fleet.inject("h1", "nvml-hang")
    assert await fleet.end() == 0


async def test_a_gpu_is_pulled_and_a_new_one_is_seen_without_a_restart(
    fleet: FleetProcess, allocator: ListeningAllocator
) -> None:
    ready = await fleet.start("--node", "pcie-l40s:l1")
    node = allocator.nodes["l1"]
    old = ready["nodes"]["l1"]["gpus"][1]
    await fleet.inject("l1", "gpu-pull", old["uuid"])
    new_uuid = await fleet.inject("l1", "gpu-add", old["pci_address"])
    assert new_uuid != old["uuid"]
    await until(lambda: new_uuid in node.devices and node.devices[new_uuid].clean)


async def test_a_driver_that_is_gone_for_a_while_comes_back(
    fleet: FleetProcess, allocator: ListeningAllocator
) -> None:
    await fleet.start("--node", "gb10:g1")
    node = allocator.nodes["g1"]
    await fleet.inject("g1", "driver-unload")
    await until(lambda: any(node.faults.values()))
    await fleet.inject("g1", "driver-load")
    await until(lambda: not any(node.faults.values()))
    await until(lambda: all(device.clean for device in node.devices.values()))


async def test_an_agent_restarts_on_the_same_boot_and_a_reboot_is_a_new_one(
    fleet: FleetProcess, allocator: ListeningAllocator, tmp_path: Path
) -> None:
    await fleet.start("--node", "gb10:g1", "--state-dir", str(tmp_path / "state"))
    node = allocator.nodes["g1"]
    await fleet.inject("g1", "restart-agent")
    await until(lambda: len(node.hellos) == 2 and node.streams == 1)
    boot_id = await fleet.inject("g1", "reboot")
    await until(lambda: len(node.hellos) == 3 and node.streams == 1)
    boots = [hello.boot_id for hello in node.hellos]
    assert boots[0] == boots[1] != boots[2] == boot_id
    assert len({hello.agent_instance_id for hello in node.hellos}) == 3


async def test_a_killed_fleet_is_the_same_hardware_and_boot_when_it_starts_again(
    fleet: FleetProcess, allocator: ListeningAllocator, tmp_path: Path
) -> None:
    flags = ("--node", "dgx-h100:h1", "--state-dir", str(tmp_path / "state"))
    await fleet.start(*flags)
    await fleet.end(signal.SIGKILL)
    await fleet.start(*flags)
    first, second = allocator.nodes["h1"].hellos
    assert first.boot_id == second.boot_id
    assert first.inventory == second.inventory
    assert first.agent_instance_id != second.agent_instance_id


async def test_two_fleets_do_not_share_a_control_directory(
    fleet: FleetProcess, tmp_path: Path
) -> None:
    await fleet.start("--node", "gb10:g1")
    second = FleetProcess(tmp_path, fleet.allocator)
    with pytest.raises(AssertionError, match="ended before it was ready"):
        await second.start("--node", "gb10:g2")
    assert await second.end() == 1


async def test_a_bad_command_is_refused_and_changes_nothing(
    fleet: FleetProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    await fleet.start("--node", "gb10:g1")
    before = await fleet.inject("g1", "show")
    for node, action, arguments, message in (
        ("g2", "gpu-lost", ("0",), "'g2' is not one of"),
        ("g1", "gpu-lost", ("1",), "'1' is not on node g1; accepted are 0 to 0"),
        ("g1", "gpu-lost", (), "accepted is: gpu-lost GPU"),
        ("g1", "explode", (), "'explode' is not one of"),
        ("g1", "stray", ("0", "-1"), "MIB is '-1'"),
        ("g1", "hca-down", ("mlx5_0",), "accepted are rocep1s0f0"),
        ("g1", "nvlinks", ("0", "1"), "accepted are 0 to 0"),
    ):
        with pytest.raises(InjectionError, match=message):
            await fleet.inject(node, action, *arguments)
    assert await fleet.inject("g1", "show") == before
    command = ["--control", str(fleet.control), "g2", "nvml-hang"]
    assert await asyncio.to_thread(inject_command, command) == 1
    assert "'g2' is not one of" in capsys.readouterr().err


async def test_an_adapter_whose_cable_is_out_is_reported_down(
    fleet: FleetProcess, allocator: ListeningAllocator
) -> None:
    ready = await fleet.start("--node", "dgx-h100:h1")
    await fleet.inject("h1", "hca-down", "mlx5_3")
    port = Path(ready["nodes"]["h1"]["directory"]) / "sys/class/infiniband/mlx5_3/ports/1/state"
    assert port.read_text() == "1: DOWN\n"
    await fleet.inject("h1", "restart-agent")
    await until(lambda: len(allocator.nodes["h1"].hellos) == 2)
    states = {hca.name: hca.ports[0].state for hca in allocator.nodes["h1"].hello.inventory.hcas}
    assert states["mlx5_3"] == "DOWN"
    assert states["mlx5_4"] == "ACTIVE"


async def test_each_node_has_a_socket_for_its_own_clients(fleet: FleetProcess) -> None:
    # The path of a Unix socket is short: 107 characters.
    sockets = fleet.directory / "s"
    ready = await fleet.start(
        "--node", "gb10:g1", "--node", "gb10:g2", "--local-socket-dir", str(sockets)
    )
    assert {node["socket"] for node in ready["nodes"].values()} == {
        str(sockets / "g1.sock"),
        str(sockets / "g2.sock"),
    }
    assert sorted(path.name for path in sockets.glob("*.sock")) == ["g1.sock", "g2.sock"]


async def test_a_list_of_hosts_is_divided_among_processes(
    fleet: FleetProcess, allocator: ListeningAllocator, tmp_path: Path
) -> None:
    path = tmp_path / "nodes.csv"
    rows = "".join(f"n{i},64000,262144,2,P100\n" for i in range(5))
    path.write_text(f"sn,cpu_milli,memory_mib,gpu,model\n{rows}")
    ready = await fleet.start("--nodes-csv", str(path), "--part", "2/2")
    assert sorted(ready["nodes"]) == ["n1", "n3"]
    inventory = allocator.nodes["n1"].hello.inventory
    assert inventory.simulated == "custom"
    assert [device.model for device in inventory.devices] == ["P100", "P100"]
    assert (inventory.cpu_milli, inventory.host_memory_mib) == (64000, 262144)
