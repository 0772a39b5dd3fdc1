"""A tiny allocator for tests of agents: a real gRPC server, told what to say.

And a machine in memory for the agent to run on, for what the simulated one does not
need: exact control of one driver call.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from gpupool.model.assignment import (
    Assignment,
    AssignmentReport,
    DesiredState,
    DeviceReport,
    DeviceTelemetry,
    Hello,
    Report,
    Welcome,
)
from gpupool.model.ids import DeviceUuid
from gpupool.model.inventory import Device, Hca
from gpupool.v1 import lease_pb2, lease_pb2_grpc, node_pb2, node_pb2_grpc
from gpupool.wire.assignment import desired_state_to_proto
from gpupool.wire.node import hello_from_proto, report_from_proto, welcome_to_proto
from gpupool_agent.agent import Agent
from gpupool_agent.core.readings import DeviceUsage, DriverInventory, GpuProcess, PortCounters
from gpupool_agent.devices.interfaces import Adapters, HostFacts
from gpupool_agent.devices.mps import InProcessMps
from gpupool_agent.devices.privileged import Privileged
from gpupool_agent.devices.processes import ProcProcessTable
from gpupool_agent.link import dial
from gpupool_agent.settings import AgentSettings

DEADLINE_S = 20.0
FORWARD_KEY = "the-forward-key"


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for a condition, and say what was waited for when it never comes."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE_S} s for: {what}"
        await asyncio.sleep(0.01)


class TinyAllocator(node_pb2_grpc.NodeServiceServicer):
    """Welcomes every agent, keeps what it hears, says what it is told to say."""

    def __init__(self, *, epoch: int = 1, report_interval_s: float = 0.1) -> None:
        self.epoch = epoch
        self.report_interval_s = report_interval_s
        self.hellos: list[Hello] = []
        self.reports: list[tuple[float, Report]] = []
        self.telemetry = 0
        self.streams = 0
        self.assignments: dict[str, AssignmentReport] = {}
        self.devices: dict[DeviceUuid, DeviceReport] = {}
        self.port = 0
        self.hang_up = False
        self.forwarded: list[tuple[str, dict[str, str]]] = []
        self._revision = 0
        self._desired = DesiredState(revision=0, epoch=epoch)
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> str:
        self._server = grpc.aio.server(
            options=(("grpc.so_reuseport", 0), ("grpc.http2.bdp_probe", 0))
        )
        node_pb2_grpc.add_NodeServiceServicer_to_server(self, self._server)
        lease_pb2_grpc.add_LeaseServiceServicer_to_server(TinyLeases(self), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            # Gone while its loop still runs, which its destructor wants.
            self._server = None

    async def want(self, *assignments: Assignment, **more: Any) -> None:
        self._revision += 1
        await self.send(
            DesiredState(revision=self._revision, epoch=self.epoch, assignments=assignments, **more)
        )

    async def send(self, desired: DesiredState) -> None:
        async with self._changed:
            self._desired = desired
            self._changed.notify_all()

    def state(self, lease: str) -> str:
        report = self.assignments.get(lease)
        return report.state.value if report else "unknown"

    async def Connect(  # noqa: N802 - the name is gRPC's
        self, request_iterator: AsyncIterator[node_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[node_pb2.ConnectResponse]:
        del context
        first = await anext(request_iterator)
        self.hellos.append(hello_from_proto(first.hello))
        self.streams += 1
        listening = asyncio.create_task(self._listen(request_iterator))
        try:
            yield node_pb2.ConnectResponse(
                welcome=welcome_to_proto(
                    Welcome(
                        epoch=self.epoch,
                        protocol_revision=1,
                        allocator_version="0.1.0",
                        heartbeat_timeout_s=10.0,
                        report_interval_s=self.report_interval_s,
                        forward_key=FORWARD_KEY,
                    )
                )
            )
            if self.hang_up:
                return
            told: DesiredState | None = None
            while True:
                async with self._changed:
                    while self._desired is told:
                        await self._changed.wait()
                    told = self._desired
                yield node_pb2.ConnectResponse(desired_state=desired_state_to_proto(told))
        finally:
            self.streams -= 1
            listening.cancel()

    async def _listen(self, requests: AsyncIterator[node_pb2.ConnectRequest]) -> None:
        async for message in requests:
            if message.HasField("telemetry"):
                self.telemetry += 1
                continue
            report = report_from_proto(message.report)
            self.reports.append((time.monotonic(), report))
            for each in report.assignments:
                self.assignments[each.key.lease_id] = each
            for device in report.devices:
                self.devices[device.uuid] = device


class TinyLeases(lease_pb2_grpc.LeaseServiceServicer):
    """Notes the metadata of what is forwarded to it."""

    def __init__(self, allocator: TinyAllocator) -> None:
        self._allocator = allocator

    def _note(self, method: str, context: Any) -> None:
        metadata = {str(key): str(value) for key, value in context.invocation_metadata()}
        self._allocator.forwarded.append((method, metadata))

    async def GetLease(self, request: Any, context: Any) -> lease_pb2.GetLeaseResponse:  # noqa: N802
        self._note("GetLease", context)
        if request.lease_id == "none":
            context.set_trailing_metadata((("gpupool-refusal-bin", b"why"),))
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such lease")
        return lease_pb2.GetLeaseResponse(lease={"lease_id": request.lease_id})

    async def Acquire(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[lease_pb2.AcquireResponse]:
        self._note("Acquire", context)
        for generation in (1, 2, 3):
            yield lease_pb2.AcquireResponse(
                lease={"lease_id": request.request_id, "generation": generation}
            )

    async def Session(  # noqa: N802
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[lease_pb2.SessionResponse]:
        self._note("Session", context)
        async for request in request_iterator:
            yield lease_pb2.SessionResponse(
                events=[{"sequence": each.sequence} for each in request.commands]
            )


class MemoryDriver:
    """GPUs in memory. ``gate`` cleared: calls block, as a hung driver does."""

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.processes: dict[str, tuple[GpuProcess, ...]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.calls = 0

    def inventory(self) -> DriverInventory:
        self._enter()
        return DriverInventory(
            devices=tuple(
                Device(uuid=DeviceUuid(f"GPU-{number}"), model="H100", memory_mib=80000)
                for number in range(self.count)
            ),
            driver_version="550.1",
        )

    def usage(self) -> tuple[DeviceUsage, ...]:
        self._enter()
        return tuple(
            DeviceUsage(
                uuid=DeviceUuid(f"GPU-{number}"),
                processes=self.processes.get(f"GPU-{number}", ()),
                memory_used_mib=4
                + sum(each.memory_mib for each in self.processes.get(f"GPU-{number}", ())),
            )
            for number in range(self.count)
        )

    def telemetry(self) -> tuple[DeviceTelemetry, ...]:
        self._enter()
        return tuple(
            DeviceTelemetry(uuid=DeviceUuid(f"GPU-{number}"), utilization_pct=7)
            for number in range(self.count)
        )

    def close(self) -> None:
        self._enter()

    def _enter(self) -> None:
        self.calls += 1
        self.gate.wait()


class NoHcas:
    def read(self) -> tuple[Hca, ...]:
        return ()

    def counters(self) -> tuple[PortCounters, ...]:
        return ()


class MemoryHost:
    def __init__(self, boot_id: str = "boot-1") -> None:
        self.boot_id = boot_id

    def read(self) -> HostFacts:
        return HostFacts(
            hostname="host", boot_id=self.boot_id, cpu_milli=64000, host_memory_mib=1024
        )


class RunningAgent:
    """An agent in this process over a machine in memory."""

    def __init__(
        self,
        folder: Path,
        *addresses: str,
        driver: MemoryDriver | None = None,
        boot_id: str = "boot-1",
        socket: Path | None = None,
        node_id: str = "n1",
        processes: ProcProcessTable | None = None,
        privileged: Privileged | None = None,
        **settings: Any,
    ) -> None:
        self.driver = driver or MemoryDriver()
        self.mps = InProcessMps(folder / "mps")
        periods: dict[str, Any] = {
            "usage_period_s": 0.1,
            "inventory_period_s": 0.5,
            "telemetry_period_s": 0.2,
            "driver_deadline_s": 0.3,
        }
        self.agent = Agent(
            AgentSettings(
                node_id=node_id,
                allocators=addresses or ("127.0.0.1:9",),
                state_dir=folder / "state",
                run_dir=folder,
                socket=socket,
                **{**periods, **settings},
            ),
            Adapters(
                driver=self.driver,
                mps=self.mps,
                hcas=NoHcas(),
                host=MemoryHost(boot_id),
                processes=processes or ProcProcessTable(),
                dial=dial,
                privileged=privileged,
            ),
        )
        self._task = asyncio.create_task(self.agent.run())

    async def stop(self) -> None:
        """End it, as SIGTERM does; raises what made it end before, if anything did."""
        self.driver.gate.set()
        self._task.cancel()
        try:
            await self._task
        except asyncio.CancelledError:
            return


def this_process_start_ticks() -> int:
    ticks = ProcProcessTable().start_ticks(os.getpid())
    assert ticks is not None
    return ticks
