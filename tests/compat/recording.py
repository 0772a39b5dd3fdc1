"""One scripted day of a pool, as a release leaves it to the next: its store and its streams.

The pool is the core in ``tests.core_world``; what goes over a wire is translated by
``gpupool.wire`` and written as protobuf JSON, one message a line; what is stored goes
through the release's own records into its own SQLite file.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from tests.core_world import World, part, whole

from gpupool.model.assignment import Report
from gpupool.model.caller import ProcessRef
from gpupool.model.ids import DeviceUuid, NodeId
from gpupool.model.inventory import Hca, HcaPort, StrayProcess
from gpupool.model.lease import Lease
from gpupool.model.request import LabelSelector, Level, OnFailure, TopologyConstraint
from gpupool.v1 import lease_pb2, node_pb2
from gpupool.wire.node import desired_state_to_proto, hello_to_proto, report_to_proto
from gpupool.wire.resources import lease_spec_to_proto, lease_to_proto
from gpupool_allocator.storage import records
from gpupool_allocator.storage.sqlite import SqliteStore
from gpupool_allocator.storage.store import OPERATIONS_MAX, Operation

STORE = "store.sqlite"
STREAMS = "streams.jsonl"
LEASES = "leases.json"
STORE_BYTES_MAX = 64 * 1024 * 1024


def record(folder: Path) -> None:
    """Writes the store, the streams and what the store must give back."""
    world, lines = scripted_day()
    _write_store(folder / STORE, world)
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
    (folder / STREAMS).write_text(text)
    leases = {lease.lease_id: summary_of(lease) for lease in everything(world)}
    (folder / LEASES).write_text(json.dumps(leases, indent=1, sort_keys=True) + "\n")


def everything(world: World) -> list[Lease]:
    """Every lease in the world's store."""
    return [record for record in world.store.values() if isinstance(record, Lease)]


def summary_of(lease: Lease) -> dict[str, Any]:
    """What a later release must still know of a lease."""
    return {
        "state": str(lease.state),
        "tenant": lease.spec.tenant,
        "request_id": lease.request_id,
        "places": [
            [member.place.node_id, member.token, [d.device_uuid for d in member.place.devices]]
            for member in lease.members
        ],
    }


def scripted_day() -> tuple[World, list[dict[str, Any]]]:
    """A pool with a lease in every state that is stored, holds, a stray and a lost node."""
    world, lines = World(), list[dict[str, Any]]()
    for name in ("host-1", "host-2", "host-10"):
        node = world.add_node(name, labels={"zone": "a"})
        adapter = Hca(
            name="mlx5_0",
            node_guid="0c42a103005ee0d4",
            ports=(HcaPort(number=1, port_guid="0c42a103005ee0d5", lid=7, sm_lid=1),),
        )
        node.inventory = replace(node.inventory, hcas=(adapter,))
        lines.append(_line("node up", node_pb2.ConnectRequest(hello=hello_to_proto(node.hello()))))
        world.disconnect(node)
        world.connect(node)
    asked = [
        whole(2, tenant="red", priority=3, cpu_milli=8000, host_memory_mib=64_000),
        whole(8, replicas=2, topology=TopologyConstraint(spread=Level.NODE)),
        part(30, tenant="blue", uid=1001, on_failure=OnFailure.WAIT, max_duration_s=3600.0),
        part(0, 2000, uid=1001, display_name="notebook", labels={"team": "x"}),
        whole(1, models=("h100",), node_selectors=(LabelSelector(key="zone", values=("a", "b")),)),
        whole(8, replicas=3),
    ]
    leases: list[Lease] = []
    for wanted in asked:
        lines.append(_acquire_line(wanted, len(leases)))
        leases.append(world.lease_of(world.acquire(wanted, wait_s=None)))
        lines += _told(world)
        world.settle()
    holder = ProcessRef(node_id=NodeId("host-2"), pid=4711, start_ticks=99)
    world.acquire(part(10, uid=1001), process=holder, wait_s=None)
    world.settle()
    world.release(leases[0])
    world.settle()
    world.release(leases[2])
    world.add_hold("host-10", allowed_tenants=("red",))
    stray = StrayProcess(pid=99, uid=5, user="somebody", command="python", memory_mib=10)
    node = world.nodes[NodeId("host-1")]
    reports = tuple(
        replace(report, clean=False, strays=(stray,))
        for report in node.device_reports()
        if report.uuid == DeviceUuid("GPU-host-1-7")
    )
    report = Report(devices=reports, alive_holders=(leases[1].lease_id,))
    lines.append(_line("node up", node_pb2.ConnectRequest(report=report_to_proto(report))))
    world.report(node, report)
    for answer in everything(world):
        shown = world.now_lease(answer)
        lines.append(_line("client down", lease_pb2.AcquireResponse(lease=lease_to_proto(shown))))
    return world, lines


def _told(world: World) -> list[dict[str, Any]]:
    return [
        _line(
            "node down",
            node_pb2.ConnectResponse(desired_state=desired_state_to_proto(node.desired)),
        )
        for node in world.nodes.values()
        if node.desired is not None
    ]


def _acquire_line(wanted: Any, number: int) -> dict[str, Any]:
    request = lease_pb2.AcquireRequest(
        request_id=f"request-{number}", spec=lease_spec_to_proto(wanted), follow=True
    )
    request.ttl.FromSeconds(60)
    return _line("client up", request)


def _line(direction: str, message: Message) -> dict[str, Any]:
    return {
        "direction": direction,
        "type": message.DESCRIPTOR.full_name,
        "message": MessageToDict(message, preserving_proto_field_name=True),
    }


def _write_store(path: Path, world: World) -> None:
    path.unlink(missing_ok=True)
    store = SqliteStore(path, max_bytes=STORE_BYTES_MAX, reserve_bytes=0)
    try:
        epoch = store.begin_term()
        operations: list[Operation] = [records.encode(each) for each in world.store.values()]
        for start in range(0, len(operations), OPERATIONS_MAX):
            events = world.history if start == 0 else ()
            store.commit(epoch, operations[start : start + OPERATIONS_MAX], events)
    finally:
        store.close()
    for beside in (".lock", ".reserve", "-wal", "-shm"):
        path.with_name(path.name + beside).unlink(missing_ok=True)
