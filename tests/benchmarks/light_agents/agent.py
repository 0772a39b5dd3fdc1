"""One peer: Hello, a full report, then what a real agent would answer at once."""

import asyncio
import contextlib
import random
from collections.abc import Iterable

from grpc import aio

from gpupool.v1 import node_pb2 as pb
from gpupool.v1 import node_pb2_grpc

GPUS = 8
HCAS = 10
RETRY_S_MIN = 0.1
RETRY_S_MAX = 2.0

OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.enable_retries", 0),
)

Stream = aio.StreamStreamCall[pb.ConnectRequest, pb.ConnectResponse]
Key = tuple[str, int]


class LightAgent:
    """Speaks for one node. ``connected_once``: an allocator has welcomed it."""

    def __init__(self, node_id: str, address: str) -> None:
        self.node_id = node_id
        self.connected_once = asyncio.Event()
        self._connected = False
        self._address = address
        self._inventory = dgx_h100(node_id)
        self._devices = [
            pb.DeviceReport(uuid=device.uuid, clean=True) for device in self._inventory.devices
        ]
        self._runs: dict[Key, pb.AssignmentReport] = {}
        self._epoch = 0
        self._spread_s = 0.0

    async def run(self) -> None:
        """Connects, and connects again, until cancelled."""
        failures = 0
        while True:
            with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
                async with aio.insecure_channel(self._address, options=OPTIONS) as channel:
                    await self._talk(node_pb2_grpc.NodeServiceStub(channel).Connect())
            if self._connected:
                self._connected = False
                failures = 0
            await asyncio.sleep(self._pause_s(failures))
            failures += 1

    def _pause_s(self, failures: int) -> float:
        # As the agent's link does.
        if failures == 0:
            return random.uniform(RETRY_S_MIN / 2, RETRY_S_MIN + self._spread_s)
        bound_s = min(max(RETRY_S_MAX, self._spread_s), RETRY_S_MIN * 2.0 ** min(failures, 16))
        return random.uniform(bound_s / 2, bound_s)

    async def _talk(self, stream: Stream) -> None:
        await stream.wait_for_connection()
        await stream.write(pb.ConnectRequest(hello=self._hello()))
        answer = await _read(stream)
        if answer is None:
            return
        welcome = answer.welcome
        self._connected = True
        self.connected_once.set()
        self._epoch = welcome.epoch
        self._spread_s = welcome.reconnect_spread.ToTimedelta().total_seconds()
        interval_s = welcome.report_interval.ToTimedelta().total_seconds()
        turn = asyncio.Lock()
        await _write(stream, turn, self._account())
        beats = asyncio.create_task(_beat(stream, turn, interval_s))
        try:
            while (answer := await _read(stream)) is not None:
                await _write(stream, turn, self._carry_out(answer.desired_state))
        finally:
            beats.cancel()

    def _hello(self) -> pb.Hello:
        return pb.Hello(
            node_id=self.node_id,
            boot_id="boot-1",
            agent_version="0.1.0",
            agent_instance_id=f"light-{self.node_id}",
            protocol_revisions=[1],
            inventory=self._inventory,
            assignments=self._runs.values(),
            devices=self._devices,
            highest_epoch=self._epoch,
        )

    def _account(self) -> pb.Report:
        return pb.Report(full=True, assignments=self._runs.values(), devices=self._devices)

    def _carry_out(self, desired: pb.DesiredState) -> pb.Report:
        wanted = {(each.lease_id, each.rank): each for each in desired.assignments}
        news: list[pb.AssignmentReport] = []
        for key, run in list(self._runs.items()):
            if key not in wanted or wanted[key].token != run.token:
                del self._runs[key]
                ended = pb.AssignmentState.ASSIGNMENT_STATE_ENDED
                news.append(pb.AssignmentReport(lease_id=key[0], rank=key[1], token=run.token))
                news[-1].state = ended
        for key, assignment in wanted.items():
            if key not in self._runs:
                self._runs[key] = _prepared(assignment)
                news.append(self._runs[key])
        # What was freed is clean again.
        return pb.Report(
            assignments=news, devices=self._devices, accepted_revision=desired.revision
        )


def _prepared(assignment: pb.Assignment) -> pb.AssignmentReport:
    uuids = ",".join(device.device_uuid for device in assignment.place.devices)
    return pb.AssignmentReport(
        lease_id=assignment.lease_id,
        rank=assignment.rank,
        token=assignment.token,
        state=pb.AssignmentState.ASSIGNMENT_STATE_PREPARED,
        environment={"CUDA_VISIBLE_DEVICES": uuids},
        place=assignment.place,
        uid=assignment.uid,
    )


async def _beat(stream: Stream, turn: asyncio.Lock, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await _write(stream, turn, pb.Report())


async def _write(stream: Stream, turn: asyncio.Lock, report: pb.Report) -> None:
    # A stream takes one write at a time.
    async with turn:
        await stream.write(pb.ConnectRequest(report=report))


async def _read(stream: Stream) -> pb.ConnectResponse | None:
    answer = await stream.read()
    return answer if isinstance(answer, pb.ConnectResponse) else None


def dgx_h100(node_id: str) -> pb.NodeInventory:
    """What an agent says of eight H100 and their adapters."""
    return pb.NodeInventory(
        devices=[_gpu(node_id, index) for index in range(GPUS)],
        hcas=[_hca(node_id, index) for index in range(HCAS)],
        cpu_milli=224_000,
        host_memory_mib=2_063_840,
        simulated="light-agent",
        driver_version="550.163.01",
        hostname=node_id,
    )


def _gpu(node_id: str, index: int) -> pb.Device:
    return pb.Device(
        uuid=f"GPU-{node_id}-{index}",
        model="NVIDIA H100 80GB HBM3",
        pci_address=f"0000:{index + 16:02x}:00.0",
        memory_mib=81_008,
        index=index,
        numa_node=index // 4,
        sm_count=132,
        sliceable=True,
        compute_capability="9.0",
    )


def _hca(node_id: str, index: int) -> pb.Hca:
    number = int.from_bytes(node_id.encode()[-6:], "big") * 16 + index
    port = pb.HcaPort(
        number=1,
        port_guid=f"{number * 2 + 1:016x}"[-16:],
        lid=index + 1,
        sm_lid=1,
        state="ACTIVE",
        rate_mbps=400_000,
        link_layer="InfiniBand",
    )
    return pb.Hca(
        name=f"mlx5_{index}",
        node_guid=f"{number * 2:016x}"[-16:],
        pci_address=f"0000:{index + 64:02x}:00.0",
        numa_node=index // 5,
        ports=[port],
    )


def names(count: int, part: int, parts: int) -> Iterable[str]:
    """Node ids of one of several processes that share ``count`` nodes."""
    return (f"light-{number:05d}" for number in range(part, count + 1, parts))
