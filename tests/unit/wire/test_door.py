"""Bad input is refused with the field and the accepted range."""

from collections.abc import Callable
from functools import partial

import pytest
from google.protobuf.duration_pb2 import Duration

from gpupool.model.inventory import StrayProcess
from gpupool.model.request import GpuSlice, LeaseSpec, WholeGpus
from gpupool.v1 import lease_pb2, node_pb2, pool_pb2
from gpupool.v1 import resources_pb2 as pb
from gpupool.wire.errors import BadField
from gpupool.wire.lease import acquire_ask_from_proto, acquire_asks_from_proto
from gpupool.wire.node import hello_from_proto, stray_process_to_proto
from gpupool.wire.pool import hold_ask_from_proto
from gpupool.wire.resources import lease_spec_from_proto


def spec(**changes: object) -> pb.LeaseSpec:
    group = pb.Group(replicas=1, whole=pb.WholeGpus(count=1))
    return pb.LeaseSpec(**{"groups": [group], **changes})  # type: ignore[arg-type] # on purpose: fields by name


def group(**changes: object) -> pb.LeaseSpec:
    return spec(groups=[pb.Group(**{"replicas": 1, **changes})])  # type: ignore[arg-type] # on purpose: fields by name


def part(**changes: int) -> pb.LeaseSpec:
    return group(slice=pb.GpuSlice(**changes))


BAD_SPECS: dict[str, tuple[pb.LeaseSpec, str]] = {
    "no groups": (pb.LeaseSpec(), "spec.groups: 0 entries is not in 1..64 entries"),
    "too many groups": (
        spec(groups=[pb.Group(name=f"g{i}", replicas=1) for i in range(65)]),
        "spec.groups: 65 entries is not in 1..64 entries",
    ),
    "same name twice": (
        spec(groups=[pb.Group(replicas=1), pb.Group(name="main", replicas=1)]),
        "spec.groups: 'main' is not in entries that are named once",
    ),
    "members beyond the sum": (
        spec(groups=[pb.Group(name=f"g{i}", replicas=4096) for i in range(5)]),
        "spec.groups (members in all): 20480 is not in 1..16384",
    ),
    "GPUs beyond the sum": (
        spec(
            groups=[
                pb.Group(name=f"g{i}", replicas=4096, whole=pb.WholeGpus(count=64))
                for i in range(4)
            ]
        ),
        "spec.groups (GPUs in all): 1048576 is not in 0..65536",
    ),
    "no replicas": (group(replicas=0), "spec.groups[0].replicas: 0 is not in 1..4096"),
    "negative replicas": (group(replicas=-1), "spec.groups[0].replicas: -1 is not in 1..4096"),
    "share over 100": (
        part(share_pct=250),
        "spec.groups[0].slice.share_pct: 250 is not in 0..100",
    ),
    "slice of nothing": (
        part(),
        "spec.groups[0].slice.share_pct: 0 is not in 1..100 where memory_mib is 0",
    ),
    "slice of two GPUs": (
        part(share_pct=10, count=2),
        "spec.groups[0].slice.count: 2 is not in 0..1: a process can speak to one MPS daemon",
    ),
    "elastic, wrong order": (
        part(share_pct=50, min_share_pct=60, max_share_pct=40),
        "spec.groups[0].slice.min_share_pct: 60 is not in 1..40",
    ),
    "elastic, no greatest": (
        part(share_pct=50, min_share_pct=40),
        "spec.groups[0].slice.max_share_pct: 0 is not in 1..100",
    ),
    "65 GPUs": (
        group(whole=pb.WholeGpus(count=65)),
        "spec.groups[0].whole.count: 65 is not in 1..64",
    ),
    "negative memory": (
        group(whole=pb.WholeGpus(count=1, min_memory_mib=-1)),
        "spec.groups[0].whole.min_memory_mib: -1 is not in 0..16777216",
    ),
    "group name": (
        group(name="Main!"),
        "spec.groups[0].name: 'Main!' is not in 1..63 characters of a-z, 0-9 and '-'",
    ),
    "unknown level": (
        spec(topology=pb.TopologyConstraint(required=99)),  # type: ignore[arg-type] # on purpose: fields by name
        "spec.topology.required: 99 is not in LEVEL_GPU",
    ),
    "control characters": (
        spec(tenant="a\x1b[31m"),
        r"spec.tenant: 'a\x1b[31m' is not in 0..253 printable characters",
    ),
    "uid -1": (spec(uid=2**32 - 1), "spec.uid: 4294967295 is not in 0..4294967294"),
    "priority": (spec(priority=1001), "spec.priority: 1001 is not in -1000..1000"),
    "zero duration": (
        spec(max_duration=Duration()),
        "spec.max_duration: 0.0 s is not in 1..315360000 s",
    ),
    "duration of two minds": (
        spec(max_duration=Duration(seconds=5, nanos=-1)),
        "spec.max_duration: (5, -1) (s, ns) is not in 1..315360000 s, well-formed",
    ),
    "duration beyond the wire": (
        spec(disconnect_timeout=Duration(seconds=2**40)),
        "spec.disconnect_timeout: (1099511627776, 0) (s, ns) is not in 1..2592000 s, well-formed",
    ),
    "same model twice": (
        group(models=["H100", "h100"]),
        "spec.groups[0].models: 'h100' is not in entries that are named once",
    ),
}


@pytest.mark.parametrize("name", BAD_SPECS)
def test_a_bad_request_is_refused_with_field_value_and_range(name: str) -> None:
    message, refusal = BAD_SPECS[name]
    with pytest.raises(BadField) as refused:
        lease_spec_from_proto(message)
    assert str(refused.value).startswith(refusal)


def test_ten_mebibytes_of_name_are_refused_in_a_short_line() -> None:
    with pytest.raises(BadField) as refused:
        lease_spec_from_proto(spec(display_name="x" * 10 * 1024 * 1024))
    assert len(str(refused.value)) < 200


def test_defaults_are_filled_in() -> None:
    read = lease_spec_from_proto(group(models=["NVIDIA H100"], slice=pb.GpuSlice(share_pct=10)))
    assert read.groups[0].name == "main"
    assert read.groups[0].models == ("nvidia h100",)
    assert read.groups[0].accelerator == GpuSlice(share_pct=10)
    assert read.tenant == "default"
    assert read.disconnect_s == 86400.0
    assert isinstance(read, LeaseSpec)


def test_a_whole_slice_stays_a_slice() -> None:
    assert lease_spec_from_proto(part(share_pct=100)).groups[0].accelerator == GpuSlice(
        share_pct=100
    )
    assert lease_spec_from_proto(spec()).groups[0].accelerator == WholeGpus(count=1)


def test_an_acquire_without_a_holder_lives_sixty_seconds() -> None:
    ask = acquire_ask_from_proto(lease_pb2.AcquireRequest(request_id="r", spec=spec()))
    assert (ask.ttl_s, ask.caller_process, ask.wait_s) == (60.0, False, None)


BAD_ACQUIRES: dict[str, tuple[lease_pb2.AcquireRequest, str]] = {
    "no request id": (lease_pb2.AcquireRequest(spec=spec()), "request_id: ''"),
    "long request id": (
        lease_pb2.AcquireRequest(request_id="r" * 129, spec=spec()),
        "request_id: 'rrr",
    ),
    "short ttl": (
        lease_pb2.AcquireRequest(request_id="r", spec=spec(), ttl=Duration(nanos=5)),
        "ttl: 5e-09 s is not in 1..604800 s",
    ),
    "negative wait": (
        lease_pb2.AcquireRequest(request_id="r", spec=spec(), wait=Duration(seconds=-1)),
        "wait: -1.0 s is not in 0..2592000 s",
    ),
    "process that is none": (
        lease_pb2.AcquireRequest(request_id="r", spec=spec(), caller_process=False),
        "caller_process: False is not in true",
    ),
}


@pytest.mark.parametrize("name", BAD_ACQUIRES)
def test_a_bad_acquire_names_its_field(name: str) -> None:
    message, refusal = BAD_ACQUIRES[name]
    with pytest.raises(BadField) as refused:
        acquire_ask_from_proto(message)
    assert str(refused.value).startswith(refusal)


def test_one_bad_request_of_many_is_named_by_its_index() -> None:
    good = lease_pb2.AcquireRequest(request_id="a", spec=spec())
    bad = lease_pb2.AcquireRequest(request_id="b", spec=part(share_pct=-1))
    with pytest.raises(BadField) as refused:
        acquire_asks_from_proto(lease_pb2.AcquireManyRequest(requests=[good, bad]))
    assert refused.value.field == "requests[1].spec.groups[0].slice.share_pct"


def hello(change: Callable[[node_pb2.Hello], None]) -> node_pb2.Hello:
    message = node_pb2.Hello(
        node_id="n1",
        boot_id="b",
        agent_version="0.1.0",
        agent_instance_id="i",
        protocol_revisions=[1],
    )
    change(message)
    return message


def two_of_one_device(message: node_pb2.Hello) -> None:
    for _ in range(2):
        message.inventory.devices.add(uuid="GPU-1", model="H100")


def _with_device(field: str, value: object, message: node_pb2.Hello) -> None:
    message.inventory.devices.add(uuid="GPU-1", model="H100", **{field: value})  # type: ignore[arg-type]


def _with_port(field: str, value: object, message: node_pb2.Hello) -> None:
    hca = message.inventory.hcas.add(name="m", node_guid="0" * 16)
    hca.ports.add(number=1, port_guid="0" * 16, **{field: value})  # type: ignore[arg-type]


BAD_HELLOS: dict[str, tuple[Callable[[node_pb2.Hello], None], str]] = {
    "node id": (lambda m: setattr(m, "node_id", "a b"), "hello.node_id"),
    "no revisions": (lambda m: m.ClearField("protocol_revisions"), "hello.protocol_revisions"),
    "negative epoch": (lambda m: setattr(m, "highest_epoch", -1), "hello.highest_epoch"),
    "device twice": (two_of_one_device, "hello.inventory.devices"),
    "device uuid": (
        lambda m: m.inventory.devices.add(uuid="0", model="H100") and None,
        "hello.inventory.devices[0].uuid",
    ),
    **{
        name: (partial(_with_device, field, value), f"hello.inventory.devices[0].{path}")
        for name, field, value, path in (
            ("links", "nvlinks_active", 65, "nvlinks_active"),
            ("negative links", "nvlinks_expected", -1, "nvlinks_expected"),
            ("fabric status", "fabric_status", 1000, "fabric_status"),
            ("bridges", "pci_path", "x" * 1025, "pci_path"),
            ("serial", "serial", "x" * 254, "serial"),
            ("no links at a peer", "nvlink_peers", {"nvswitch": 0}, "nvlink_peers['nvswitch']"),
        )
    },
    **{
        name: (partial(_with_port, field, value), f"hello.inventory.hcas[0].ports[0].{field}")
        for name, field, value in (
            ("width", "width", 13),
            ("rail", "rail", 256),
            ("expected rate", "expected_rate_mbps", -1),
        )
    },
    "image guid": (
        lambda m: (
            m.inventory.hcas.add(name="m", node_guid="0" * 16, numa_node=-1, system_image_guid="7")
            and None
        ),
        "hello.inventory.hcas[0].system_image_guid",
    ),
}


@pytest.mark.parametrize("name", BAD_HELLOS)
def test_a_bad_hello_names_its_field(name: str) -> None:
    change, field = BAD_HELLOS[name]
    with pytest.raises(BadField) as refused:
        hello_from_proto(hello(change))
    assert refused.value.field == field


def test_a_command_line_that_is_no_text_does_not_silence_its_node() -> None:
    sent = stray_process_to_proto(StrayProcess(pid=1, command="bad\udcff" + "x" * 300))
    assert sent.command.startswith("bad?xxx")
    assert len(sent.command) == 253


def test_a_hold_on_a_device_needs_its_whole_uuid() -> None:
    request = pool_pb2.CreateHoldRequest(
        request_id="r",
        hold=pool_pb2.Hold(scope=pool_pb2.HOLD_SCOPE_DEVICE, target="0", reason="fan"),
    )
    with pytest.raises(BadField, match=r"hold.target: '0' is not in"):
        hold_ask_from_proto(request)
