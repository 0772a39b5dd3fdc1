"""A whole pool for the named cases: real allocator, real agents on simulated hosts.

Everything runs in processes of its own and is spoken to over gRPC. What a case leaves
behind is checked from the outside, by reading what any client may read and what the
agents say they run: ``Pool.check``, and ``Pool.drain`` at the end of every case.
"""

import json
import queue
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
from tests.integration.allocator_daemon import Daemon

from gpupool import Client
from gpupool.model.request import GpuSlice, Group, LeaseSpec, WholeGpus
from gpupool.v1 import lease_pb2, lease_pb2_grpc, pool_pb2, pool_pb2_grpc, resources_pb2
from gpupool.wire.request import lease_spec_to_proto
from gpupool_agent.simulated.control import inject

PATIENCE_S = 60.0
"""Longest wait for anything, on a machine with much else to do."""

PAGE = 1000
ENDED = frozenset(
    {
        resources_pb2.LEASE_STATE_RELEASED,
        resources_pb2.LEASE_STATE_EXPIRED,
        resources_pb2.LEASE_STATE_PREEMPTED,
        resources_pb2.LEASE_STATE_FAILED,
        resources_pb2.LEASE_STATE_CANCELLED,
    }
)
PENDING = resources_pb2.LEASE_STATE_PENDING
ACTIVE = resources_pb2.LEASE_STATE_ACTIVE

POLLS_PER_S = 100
"""Readings of simulated GPUs in a second: more would only keep a small machine busy."""

Found = TypeVar("Found")


def eventually(what: str, look: Callable[[], Found], within_s: float = PATIENCE_S) -> Found:
    """The first answer that is true; fails when its time is over."""
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited {within_s:g} s in vain for: {what}"
        time.sleep(0.05)
    return found


def custom(
    name: str,
    *,
    gpus: int = 1,
    model: str = "L40S",
    memory_mib: int = 46_068,
    cpu_milli: int = 64_000,
    host_memory_mib: int = 256_000,
    **labels: str,
) -> str:
    """A host of one's own, in the words of the fleet's command line."""
    told = "".join(f",label.{key}={value}" for key, value in labels.items())
    return (
        f"custom:{name},model={model},gpus={gpus},memory_mib={memory_mib}"
        f",cpu_milli={cpu_milli},host_memory_mib={host_memory_mib}{told}"
    )


def whole(count: int = 1, *, replicas: int = 1, **group: Any) -> LeaseSpec:
    """A request for whole GPUs."""
    accelerator = WholeGpus(count=count)
    return LeaseSpec(groups=(Group(replicas=replicas, accelerator=accelerator, **group),))


def part(share_pct: int = 0, *, memory_mib: int = 0, **group: Any) -> LeaseSpec:
    """A request for a slice."""
    accelerator = GpuSlice(share_pct=share_pct, memory_mib=memory_mib)
    return LeaseSpec(groups=(Group(accelerator=accelerator, **group),))


def request(
    request_id: str, spec: LeaseSpec, *, wait_s: int | None = None
) -> lease_pb2.AcquireRequest:
    """A complete Acquire; without ``wait_s`` it waits in the queue."""
    made = lease_pb2.AcquireRequest(request_id=request_id, spec=lease_spec_to_proto(spec))
    made.ttl.seconds = 3600
    if wait_s is not None:
        made.wait.seconds = wait_s
    return made


def lease_devices(lease: resources_pb2.Lease) -> list[str]:
    """UUIDs that a lease holds, by rank."""
    return [share.device_uuid for member in lease.members for share in member.place.devices]


def details_of(error: grpc.RpcError) -> str:
    """What a refused call was told."""
    details = error.details()
    assert details is not None
    return details


class Calls:
    """What a client can call, over a connection of its own."""

    def __init__(self, address: str) -> None:
        self._open: list[Any] = []
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(address, options=options)
        self.leases: Any = lease_pb2_grpc.LeaseServiceStub(self.channel)
        self.pool: Any = pool_pb2_grpc.PoolServiceStub(self.channel)

    def acquire(
        self, request_id: str, spec: LeaseSpec, *, wait_s: int | None = None
    ) -> resources_pb2.Lease:
        """The lease once it is active. RpcError."""
        *_, last = self.ask(request_id, spec, wait_s=wait_s)
        lease: resources_pb2.Lease = last.lease
        return lease

    def ask(self, request_id: str, spec: LeaseSpec, *, wait_s: int | None = None) -> Any:
        """The call itself; its answers can be read one by one."""
        return self.leases.Acquire(request(request_id, spec, wait_s=wait_s), timeout=PATIENCE_S)

    def waits(self, request_id: str, spec: LeaseSpec) -> resources_pb2.Lease:
        """The first answer to a request that must wait; its call is left open."""
        call = self.ask(request_id, spec)
        # A call ends with its last reference.
        self._open.append(call)
        lease: resources_pb2.Lease = next(call).lease
        assert lease.state == PENDING, lease
        return lease

    def get(self, lease_id: str) -> resources_pb2.Lease:
        """A lease as it is now. RpcError."""
        answer = self.leases.GetLease(lease_pb2.GetLeaseRequest(lease_id=lease_id))
        lease: resources_pb2.Lease = answer.lease
        return lease

    def release(self, lease_id: str) -> None:
        """Ends a lease. RpcError."""
        self.leases.Release(lease_pb2.ReleaseRequest(lease_id=lease_id))

    def close(self) -> None:
        """Ends every call."""
        self.channel.close()


class Session:
    """A batching stream: what was sent, and each answer by its sequence."""

    def __init__(self, calls: Calls) -> None:
        self._up: queue.SimpleQueue[lease_pb2.SessionRequest | None] = queue.SimpleQueue()
        self._call = calls.leases.Session(iter(self._up.get, None))
        self.answers: defaultdict[int, list[lease_pb2.SessionEvent]] = defaultdict(list)

    def send(self, commands: Sequence[lease_pb2.SessionCommand]) -> None:
        """Sends one batch, at most 256."""
        self._up.put(lease_pb2.SessionRequest(commands=commands))

    def read_until(self, met: Callable[[], bool]) -> None:
        """Reads answers until the condition holds; pytest's own limit ends a wait in vain."""
        while not met():
            for event in next(self._call).events:
                self.answers[event.sequence].append(event)

    def close(self) -> None:
        """Ends the stream."""
        self._up.put(None)
        self._call.cancel()


class Fleet:
    """One process of simulated hosts, each with a real agent.

    ``program`` is what ``python`` runs.
    """

    python: str = sys.executable
    program: tuple[str, ...] = ("-m", "gpupool_agent.simulated")

    def __init__(self, folder: Path, address: str, nodes: Sequence[str], *flags: str) -> None:
        self.folder = folder
        self.address = address
        self.nodes = list(nodes)
        self.flags = flags
        self.ready: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def node_ids(self) -> list[str]:
        """Names of its hosts."""
        return list(self.ready["nodes"])

    def launch(self) -> subprocess.Popen[bytes]:
        """Starts the process without waiting for its hosts to be connected."""
        self.folder.mkdir(exist_ok=True)
        self._ready_file.unlink(missing_ok=True)
        with (self.folder / "fleet.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(self.python, *self.program, "--allocator", self.address),
                    *("--control", self._control, "--ready-file", self._ready_file),
                    *[word for node in self.nodes for word in ("--node", node)],
                    *self._periods(),
                    *self.flags,
                ],
                stdout=log,
                stderr=log,
            )
        return self._process

    def start(self) -> "Fleet":
        """Starts the hosts and waits until each has been welcomed."""
        process = self.launch()
        eventually("the fleet", lambda: self._ready_file.exists() or process.poll() is not None)
        assert process.poll() is None, self.log()
        self.ready = json.loads(self._ready_file.read_text())
        return self

    def inject(self, node: str, action: str, *arguments: str) -> Any:
        """Lets something happen to a host."""
        return inject(self._control, node, action, *arguments)

    def running(self) -> dict[str, list[dict[str, Any]]]:
        """What every agent runs, by its own books."""
        return {node: self.inject(node, "assignments") for node in self.node_ids}

    def kill(self) -> None:
        """SIGKILL: every agent of it is gone at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def end(self) -> None:
        """SIGTERM, in order."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            assert self._process.wait(PATIENCE_S) == 0, self.log()

    def log(self) -> str:
        """All that it has said."""
        return (self.folder / "fleet.log").read_text()

    def _periods(self) -> list[str]:
        """How often its agents look: as fast as a test likes it, slower where they are many."""
        usage_s = max(0.2, len(self.nodes) / POLLS_PER_S)
        periods_s = {"usage": usage_s, "inventory": 3 * usage_s, "telemetry": 5.0}
        return [word for name, s in periods_s.items() for word in (f"--{name}-period-s", f"{s:g}")]

    @property
    def _control(self) -> Path:
        return self.folder / "control"

    @property
    def _ready_file(self) -> Path:
        return self.folder / "ready.json"


class Pool:
    """The pool of one case."""

    def __init__(self, folder: Path, daemon: Daemon) -> None:
        self.folder = folder
        self.daemon = daemon
        self.fleets: list[Fleet] = []
        self._connections: list[Calls] = []
        self.calls = self.connect()

    @property
    def address(self) -> str:
        """Where it serves."""
        return f"127.0.0.1:{self.daemon.grpc}"

    @property
    def fleet(self) -> Fleet:
        """The only fleet."""
        (fleet,) = self.fleets
        return fleet

    def connect(self) -> Calls:
        """One more connection."""
        self._connections.append(Calls(self.address))
        return self._connections[-1]

    def client(self) -> Client:
        """The SDK; the caller closes it."""
        return Client(self.address)

    def add_fleet(self, *nodes: str, flags: Sequence[str] = ()) -> Fleet:
        """Starts hosts and waits until each GPU that they have is offered."""
        fleet = Fleet(self.folder / f"fleet-{len(self.fleets)}", self.address, nodes, *flags)
        self.fleets.append(fleet)
        fleet.start()
        self.until_offered(fleet)
        return fleet

    def until_offered(self, fleet: Fleet) -> None:
        """Waits until no GPU of the fleet is kept out."""

        def offered() -> bool:
            mine = set(fleet.node_ids)
            states = [each.state for each in self.devices() if each.node_id in mine]
            there = sum(len(node["gpus"]) for node in fleet.ready["nodes"].values())
            return len(states) == there and pool_pb2.DEVICE_STATE_UNAVAILABLE not in states

        eventually("every GPU to be offered", offered)

    def restart_allocator(self) -> None:
        """kill -9, and up again on the same ports."""
        self.daemon.kill()
        self.daemon.start()
        self.reconnect()

    def reconnect(self) -> None:
        """A new connection for ``calls``, after the daemon was started again."""
        self.calls = self.connect()

    def leases(self, *states: int, node_id: str = "") -> list[resources_pb2.Lease]:
        """Leases by id; without states those that have not ended."""
        found: list[resources_pb2.Lease] = []
        token = ""
        while True:
            ask = lease_pb2.ListLeasesRequest(page_size=PAGE, page_token=token, node_id=node_id)
            ask.states.extend(states)  # type: ignore[arg-type] # numbers of the enum
            answer = self.calls.leases.ListLeases(ask)
            found += answer.leases
            token = answer.next_page_token
            if not token:
                return found

    def devices(self) -> list[pool_pb2.DeviceStatus]:
        """Every GPU of the pool."""
        answer = self.calls.pool.ListDevices(pool_pb2.ListDevicesRequest(page_size=PAGE))
        assert not answer.next_page_token
        return list(answer.devices)

    def nodes(self) -> list[pool_pb2.Node]:
        """Every node of the pool."""
        answer = self.calls.pool.ListNodes(pool_pb2.ListNodesRequest(page_size=PAGE))
        assert not answer.next_page_token
        return list(answer.nodes)

    def summary(self) -> pool_pb2.GetPoolResponse:
        """Sums of the pool."""
        answer: pool_pb2.GetPoolResponse = self.calls.pool.GetPool(pool_pb2.GetPoolRequest())
        return answer

    def events(self, *kinds: str, subject: str = "") -> list[pool_pb2.Event]:
        """The history, or these kinds of it."""
        found: list[pool_pb2.Event] = []
        after = 0
        while True:
            ask = pool_pb2.ListEventsRequest(page_size=PAGE, after_sequence=after, subject=subject)
            events = self.calls.pool.ListEvents(ask).events
            found += events
            if len(events) < PAGE:
                return [each for each in found if not kinds or each.kind in kinds]
            after = events[-1].sequence

    def alarms(self) -> list[str]:
        """Alarms that the daemon counted, as its metrics show them."""
        text = self.daemon.get("/metrics")[1]
        return [
            line
            for line in text.splitlines()
            if line.startswith("gpupool_alarms_total") and not line.endswith(" 0.0")
        ]

    def check(self, *, alarms: int = 0) -> None:
        """Promises that anybody can check from the outside, once the pool is at rest."""
        assert self.daemon.is_alive, self.daemon.log()
        assert len(self.alarms()) == alarms, self.alarms()
        eventually("books and agents to agree", self._agrees)
        leases = self.leases()
        devices = {each.device.uuid: each for each in self.devices()}
        shares: defaultdict[str, list[resources_pb2.DeviceShare]] = defaultdict(list)
        for lease in leases:
            for member in lease.members:
                for share in member.place.devices:
                    shares[share.device_uuid].append(share)
            if lease.state == PENDING:
                assert lease.explanation.summary
                assert lease.explanation.causes
                assert not lease.members
                assert lease.position > 0
        for uuid, granted in shares.items():
            check_device(devices[uuid], granted)
        summary = self.summary()
        sums = (summary.devices_free, summary.devices_used, summary.devices_unavailable)
        assert min(sums) >= 0
        assert sum(sums) == summary.devices == len(devices)
        assert summary.devices_used == len(shares)

    def _agrees(self) -> bool:
        """Every connected agent runs exactly what the book says, under the same tokens."""
        booked = {
            (member.place.node_id, lease.lease_id, member.rank, member.token)
            for lease in self.leases()
            for member in lease.members
            if member.state == resources_pb2.MEMBER_STATE_READY
        }
        ran = {
            (node, each["lease_id"], each["rank"], each["token"])
            for fleet in self.fleets
            for node, assignments in fleet.running().items()
            for each in assignments
        }
        return booked == ran

    def drain(self) -> None:
        """Releases everything; afterwards nothing must be left anywhere."""
        for lease in self.leases(PENDING):
            self.calls.release(lease.lease_id)
        for lease in self.leases():
            self.calls.release(lease.lease_id)
        eventually("every lease to end", lambda: self.leases() == [])
        for fleet in self.fleets:
            self.until_offered(fleet)
            assert not any(fleet.running().values())
        assert all(each.free_share_pct == 100 for each in self.devices())
        assert "Traceback" not in self.daemon.log()

    def stop(self) -> None:
        """Ends every process, the last first."""
        for connection in self._connections:
            connection.close()
        for fleet in reversed(self.fleets):
            fleet.kill()
        self.daemon.end()


def check_device(device: pool_pb2.DeviceStatus, granted: list[resources_pb2.DeviceShare]) -> None:
    """No device is over its share or memory, or both whole and sliced."""
    if any(share.whole for share in granted):
        assert len(granted) == 1, f"{device.device.uuid} is whole and granted {len(granted)} times"
    pct = sum(share.share_pct for share in granted)
    assert pct <= 100
    assert device.free_share_pct == 100 - pct
    if device.device.memory_mib:
        mib = sum(share.memory_mib for share in granted)
        assert mib <= device.device.memory_mib
        assert device.free_memory_mib == device.device.memory_mib - mib


@contextmanager
def running_pool(
    folder: Path, *nodes: str, daemon: type[Daemon] = Daemon, alarms: int = 0, **settings: object
) -> Generator[Pool]:
    """A pool for the block; checked and drained at its end, and ended whatever happens.

    ``settings`` are the allocator's; ``alarms`` is how many kinds of them the case causes.
    """
    settings = {"report_interval_s": 1, **settings}
    served = daemon(folder, **settings)
    try:
        served.start()
        pool = Pool(folder, served)
        try:
            if nodes:
                pool.add_fleet(*nodes)
            yield pool
            pool.check(alarms=alarms)
            pool.drain()
        finally:
            pool.stop()
    finally:
        served.end()


def drawn(seed: int) -> random.Random:
    """Numbers that are the same in every run."""
    return random.Random(seed)
