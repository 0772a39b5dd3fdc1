"""A real allocator in its own process, and agents that are played over real gRPC."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpc import aio

from gpupool.model.assignment import (
    Assignment,
    AssignmentKey,
    AssignmentReport,
    AssignmentState,
    DesiredState,
    DeviceReport,
    Hello,
    Report,
    Welcome,
)
from gpupool.model.ids import DeviceUuid
from gpupool.model.inventory import Device, NodeInventory
from gpupool.model.request import GpuSlice, Group, LeaseSpec, WholeGpus
from gpupool.v1 import (
    lease_pb2,
    lease_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    pool_pb2_grpc,
    resources_pb2,
)
from gpupool.wire.assignment import desired_state_from_proto
from gpupool.wire.node import hello_to_proto, report_to_proto, welcome_from_proto
from gpupool.wire.request import lease_spec_to_proto

START_S = 60.0
"""Longest start on a machine with much else to do."""


class DidNotStartError(Exception):
    """The daemon ended instead of serving."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(f"exit code {code}\n{log}")
        self.code = code
        self.log = log


class Daemon:
    """``gpupool-allocator`` on ports that the system chose."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.state_dir = folder / "state"
        self.ready = folder / "ready.json"
        self._log = folder / "allocator.log"
        self._settings = {
            "grpc_address": "127.0.0.1:0",
            "http_address": "127.0.0.1:0",
            "state_dir": self.state_dir,
            "check_invariants": "true",
            "shutdown_grace_s": 1,
            # The process that is started is the one that serves, and dies.
            "keeper": "false",
            **settings,
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        """Of the process that serves: with a keeper, not the one that was started."""
        self.grpc = 0
        self.http = 0

    def launch(self, *more: str) -> subprocess.Popen[bytes]:
        """Starts the process without waiting for it; ``more`` flags for this start alone."""
        self.ready.unlink(missing_ok=True)
        flags = [
            part
            for key, value in self._settings.items()
            for part in ("--" + key.replace("_", "-"), str(value))
        ]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "gpupool_allocator",
                    *flags,
                    *more,
                    "--ready-file",
                    self.ready,
                ],
                stderr=log,
            )
        return self.process

    def start(self, *more: str) -> "Daemon":
        """Starts and waits until it serves. DidNotStartError."""
        process = self.launch(*more)
        deadline = time.monotonic() + START_S
        while not self.ready.exists():
            if process.poll() is not None:
                raise DidNotStartError(process.returncode, self.log())
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.01)
        ports = json.loads(self.ready.read_text())
        # The same ports after a restart, as an operator would have.
        self.pid, self.grpc, self.http = ports["pid"], ports["grpc"], ports["http"]
        self._settings["grpc_address"] = f"127.0.0.1:{self.grpc}"
        self._settings["http_address"] = f"127.0.0.1:{self.http}"
        return self

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def crash(self) -> None:
        """SIGKILL of the process that serves, where a keeper replaces it."""
        self.ready.unlink()
        os.kill(self.pid, signal.SIGKILL)

    def replaced(self) -> bool:
        """Whether the keeper's next process serves; then ``pid`` is its."""
        if self.ready.exists():
            self.pid = json.loads(self.ready.read_text())["pid"]
            return True
        return False

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def end(self) -> None:
        """Whatever its state, it is gone afterwards."""
        if self.process is not None and self.process.poll() is None:
            self.kill()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def log(self) -> str:
        """All that it has logged."""
        return self._log.read_text()

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of an HTTP GET; status 0 when nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}") as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except (urllib.error.URLError, ConnectionError):
            return 0, ""

    @contextlib.asynccontextmanager
    async def connected(self) -> "AsyncIterator[Calls]":
        """Stubs over one channel."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        async with aio.insecure_channel(f"127.0.0.1:{self.grpc}", options=options) as channel:
            yield Calls(channel)


class Calls:
    """What a client can call."""

    def __init__(self, channel: aio.Channel) -> None:
        self.channel = channel
        self.leases: Any = lease_pb2_grpc.LeaseServiceStub(channel)
        self.pool: Any = pool_pb2_grpc.PoolServiceStub(channel)
        self.nodes: Any = node_pb2_grpc.NodeServiceStub(channel)

    async def acquire(
        self, request_id: str, spec: LeaseSpec, *, wait_s: int | None = None
    ) -> resources_pb2.Lease:
        """The lease once it is active. AioRpcError."""
        request = lease_pb2.AcquireRequest(request_id=request_id, spec=lease_spec_to_proto(spec))
        request.ttl.seconds = 600
        if wait_s is not None:
            request.wait.seconds = wait_s
        last = resources_pb2.Lease()
        async for answer in self.leases.Acquire(request):
            last = answer.lease
        return last


def whole(count: int = 1, *, replicas: int = 1) -> LeaseSpec:
    """A request for whole GPUs."""
    return LeaseSpec(groups=(Group(replicas=replicas, accelerator=WholeGpus(count=count)),))


def part(share_pct: int) -> LeaseSpec:
    """A request for a slice."""
    return LeaseSpec(groups=(Group(accelerator=GpuSlice(share_pct=share_pct)),))


def inventory(node_id: str, gpus: int) -> NodeInventory:
    """A host with some GPUs."""
    return NodeInventory(
        devices=tuple(
            Device(
                uuid=DeviceUuid(f"GPU-{node_id}-{index}"),
                model="NVIDIA H100 80GB HBM3",
                memory_mib=80_000,
                index=index,
            )
            for index in range(gpus)
        ),
        cpu_milli=96_000,
        host_memory_mib=500_000,
    )


@dataclass
class PlayedAgent:
    """An agent that carries out at once what it is told, and reports it."""

    node_id: str
    gpus: int = 8
    instance: str = "instance-1"
    boot_id: str = "boot-1"
    highest_epoch: int = 0
    welcome: Welcome | None = None
    desired: DesiredState | None = None
    running: dict[AssignmentKey, Assignment] = field(default_factory=dict)

    def hello(self) -> node_pb2.Hello:
        """What it says first."""
        devices = inventory(self.node_id, self.gpus)
        return hello_to_proto(
            Hello(
                node_id=self.node_id,
                boot_id=self.boot_id,
                agent_version="0.1.0",
                agent_instance_id=self.instance,
                protocol_revisions=(1,),
                inventory=devices,
                assignments=tuple(
                    replace(self._prepared(each), place=each.place)
                    for each in self.running.values()
                ),
                devices=self._device_reports(),
                highest_epoch=self.highest_epoch,
            )
        )

    def _device_reports(self) -> tuple[DeviceReport, ...]:
        devices = inventory(self.node_id, self.gpus).devices
        return tuple(DeviceReport(uuid=device.uuid, clean=True) for device in devices)

    def _prepared(self, assignment: Assignment) -> AssignmentReport:
        return AssignmentReport(
            key=assignment.key,
            token=assignment.token,
            state=AssignmentState.PREPARED,
            environment={"GPUPOOL_LEASE_ID": assignment.key.lease_id},
            uid=assignment.uid,
        )

    def _placed(self, assignment: Assignment) -> AssignmentReport:
        return replace(self._prepared(assignment), place=assignment.place)

    def carry_out(self, desired: DesiredState) -> Report:
        """Prepares and ends as told; what it reports then."""
        self.desired = desired
        wanted = {assignment.key: assignment for assignment in desired.assignments}
        kept = {key: self.running[key] for key in desired.unclaimed if key in self.running}
        ended = [each for key, each in self.running.items() if key not in wanted | kept]
        begun = [each for key, each in wanted.items() if each != self.running.get(key)]
        self.running = kept | wanted
        return Report(
            assignments=(
                *(self._prepared(each) for each in begun),
                *(
                    AssignmentReport(key=each.key, token=each.token, state=AssignmentState.ENDED)
                    for each in ended
                ),
            ),
            devices=self._device_reports(),
            accepted_revision=desired.revision,
        )

    async def run(self, calls: Calls) -> None:
        """Plays until the stream ends. AioRpcError."""
        stream = calls.nodes.Connect()
        # A stream takes one write at a time.
        turn = asyncio.Lock()
        await stream.write(node_pb2.ConnectRequest(hello=self.hello()))
        answer = await stream.read()
        self.welcome = welcome_from_proto(answer.welcome)
        full = Report(
            full=True,
            devices=self._device_reports(),
            inventory=inventory(self.node_id, self.gpus),
            assignments=tuple(self._prepared(each) for each in self.running.values()),
        )
        await _report(stream, turn, full)
        beats = asyncio.create_task(self._beat(stream, turn))
        try:
            while (answer := await stream.read()) is not aio.EOF:
                report = self.carry_out(desired_state_from_proto(answer.desired_state))
                await _report(stream, turn, report)
        finally:
            beats.cancel()
            stream.cancel()

    async def _beat(self, stream: Any, turn: asyncio.Lock) -> None:
        while True:
            await asyncio.sleep(0.5)
            await _report(stream, turn, Report())


async def _report(stream: Any, turn: asyncio.Lock, report: Report) -> None:
    async with turn:
        await stream.write(node_pb2.ConnectRequest(report=report_to_proto(report)))


@contextlib.asynccontextmanager
async def playing(calls: Calls, *agents: PlayedAgent) -> AsyncIterator[None]:
    """Agents that are welcome inside the block."""
    tasks = [asyncio.create_task(agent.run(calls)) for agent in agents]
    try:
        await until(lambda: all(a.welcome and a.desired is not None for a in agents), tasks)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(
    met: Callable[[], bool], tasks: "list[asyncio.Task[None]] | None" = None, within_s: float = 30
) -> None:
    """Waits for a condition; fails when its time is over or a task has ended."""
    deadline = time.monotonic() + within_s
    while not met():
        for task in tasks or ():
            if task.done():
                task.result()
        assert time.monotonic() < deadline, "the condition was not met in time"
        await asyncio.sleep(0.01)
