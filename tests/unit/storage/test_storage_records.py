"""Records: what is stored comes back, also from older and newer programs."""

import dataclasses
import json
import math
import random
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupool.model.assignment import AssignmentKey, AssignmentReport, AssignmentState
from gpupool.model.caller import Caller
from gpupool.model.hold import Hold, HoldKind, HoldScope
from gpupool.model.ids import DeviceUuid, HoldId, LeaseId, NodeId, RequestId
from gpupool.model.inventory import Device, Hca, HcaPort, NodeInventory, NodeRecord
from gpupool.model.lease import DeviceShare, Lease, LeaseState, Member, MemberState, Place
from gpupool.model.request import Group, LeaseSpec, WholeGpus
from gpupool_allocator.core.effects import Stored, UnclaimedRecord
from gpupool_allocator.storage import record_node
from gpupool_allocator.storage.records import (
    RecordError,
    RecordVersionError,
    decode,
    deletion,
    encode,
)
from gpupool_allocator.storage.store import COMMIT_BYTES_MAX, Operation, StoredValue


def as_loaded(operation: Operation) -> StoredValue:
    return StoredValue(kind=operation.kind, key=operation.key, value=operation.value, revision=1)


def stored_with(operation: Operation, **fields: object) -> StoredValue:
    """The record of ``operation`` with some fields replaced, or removed where None."""
    assert operation.value is not None
    shape: dict[str, Any] = json.loads(operation.value) | fields
    shape = {name: value for name, value in shape.items() if value is not None}
    changed = dataclasses.replace(operation, value=json.dumps(shape).encode())
    return as_loaded(changed)


def storable(value: Any) -> Any:
    """``value`` with what a record may not hold replaced, all the way down."""
    if isinstance(value, float):
        return value if math.isfinite(value) else 0.25
    if isinstance(value, tuple):
        return tuple(storable(each) for each in value)
    if isinstance(value, DeviceShare) and value.whole:
        return dataclasses.replace(value, share_pct=100)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return type(value)(**{each.name: storable(getattr(value, each.name)) for each in fields})
    return value


def without_environments(record: Stored) -> Stored:
    if isinstance(record, Lease):
        members = tuple(
            dataclasses.replace(each, environment=None, given=(), degraded="")
            for each in record.members
        )
        return dataclasses.replace(record, members=members, expire_unix_s=None)
    if isinstance(record, UnclaimedRecord):
        report = dataclasses.replace(record.report, environment={}, given=(), degraded="")
        return dataclasses.replace(record, report=report)
    return record


def lease_of(members: int, devices: int, *, node_name: str = "gpu-{:05d}") -> Lease:
    rng = random.Random(1)
    return Lease(
        lease_id=LeaseId("lease-0198c0de"),
        request_id=RequestId("3f0e4f4e-2a38-4b0c-8bb0-7a86cbf6a0f0"),
        caller=Caller(tenant="research", user="alice", uid=1000),
        spec=LeaseSpec(
            groups=(Group(replicas=members, accelerator=WholeGpus(count=devices)),),
            tenant="research",
            uid=1000,
        ),
        state=LeaseState.ACTIVE,
        ttl_s=60.0,
        create_unix_s=1.79e9,
        grant_unix_s=1.79e9,
        members=tuple(
            Member(
                group="main",
                index=rank,
                rank=rank,
                state=MemberState.READY,
                token=1_000_000 + rank,
                environment={"CUDA_VISIBLE_DEVICES": "secret"},
                place=Place(
                    node_id=NodeId(node_name.format(rank)),
                    devices=tuple(
                        DeviceShare(
                            device_uuid=DeviceUuid(f"GPU-{uuid.UUID(int=rng.getrandbits(128))}"),
                            share_pct=100,
                            memory_mib=143_771,
                            whole=True,
                        )
                        for _ in range(devices)
                    ),
                    cpu_milli=96_000,
                    host_memory_mib=1_048_576,
                ),
            )
            for rank in range(members)
        ),
    )


HOLD = Hold(
    hold_id=HoldId("h1"),
    kind=HoldKind.OPERATOR,
    scope=HoldScope.NODE,
    target="gpu-00001",
    reason="fan",
    owner=Caller(),
)
NODE = NodeRecord(
    node_id=NodeId("gpu-00001"), boot_id="b", agent_version="0.1.0", inventory=NodeInventory()
)


def unclaimed(node: str, lease: str, rank: int = 0) -> UnclaimedRecord:
    key = AssignmentKey(lease_id=LeaseId(lease), rank=rank)
    report = AssignmentReport(key=key, token=1, state=AssignmentState.PREPARED)
    return UnclaimedRecord(node_id=NodeId(node), report=report)


@settings(max_examples=60)
@given(
    st.one_of(
        st.from_type(Lease),
        st.from_type(Hold),
        st.from_type(NodeRecord),
        st.from_type(UnclaimedRecord),
    ).map(storable)
)
def test_any_record_comes_back_as_it_was_without_environments(record: Stored) -> None:
    assert decode(as_loaded(encode(record))) == without_environments(record)
    assert deletion(record).key == encode(record).key
    assert deletion(record).value is None


def test_environments_are_never_written() -> None:
    value = encode(lease_of(1, 1)).value
    assert value is not None
    assert b"secret" not in value
    assert b"CUDA_VISIBLE_DEVICES" not in value


@pytest.mark.parametrize("node_name", ["gpu-{:05d}", "n" * 248 + "{:05d}"])
def test_a_lease_of_ten_thousand_gpus_fits_one_commit(node_name: str) -> None:
    lease = lease_of(1250, 8, node_name=node_name)
    operation = encode(lease)
    assert operation.value is not None
    assert len(operation.value) < COMMIT_BYTES_MAX
    assert decode(as_loaded(operation)) == without_environments(lease)


@pytest.mark.parametrize("record", [lease_of(1, 1), HOLD, NODE, unclaimed("n", "l")])
def test_an_unknown_version_is_refused_by_kind_key_and_version(record: Stored) -> None:
    operation = encode(record)
    with pytest.raises(RecordVersionError) as refusal:
        decode(stored_with(operation, v=2))
    assert (refusal.value.kind, refusal.value.key) == (operation.kind, operation.key)
    assert refusal.value.version == 2
    assert "version 2, this program knows 1" in str(refusal.value)


@pytest.mark.parametrize("record", [lease_of(1, 1), HOLD, NODE, unclaimed("n", "l")])
def test_fields_of_a_newer_writer_are_ignored(record: Stored) -> None:
    newer = stored_with(encode(record), colour="green", shape={"sides": 4})
    assert decode(newer) == without_environments(record)


def test_optional_fields_that_an_older_writer_lacks_take_their_usual_value() -> None:
    lease = lease_of(1, 1)
    older = decode(stored_with(encode(lease), grant_unix_s=None, ttl_s=None))
    expected = dataclasses.replace(lease, grant_unix_s=None, ttl_s=None)
    assert older == without_environments(expected)


def test_what_a_node_does_not_say_takes_no_room_and_comes_back_as_unknown() -> None:
    """Records of 0.1.0 have neither bridges nor links nor rails."""
    port = HcaPort(number=1, port_guid="0" * 16)
    inventory = NodeInventory(
        devices=(Device(uuid=DeviceUuid("GPU-1"), model="H100"),),
        hcas=(Hca(name="mlx5_0", node_guid="0" * 16, ports=(port,)),),
    )
    record = NodeRecord(
        node_id=NodeId("n"), boot_id="b", agent_version="0.1.0", inventory=inventory
    )
    written = json.loads(encode(record).value or b"")["inventory"]
    assert set(written["devices"][0]) == {"uuid", "model", "index"}
    assert set(written["hcas"][0]) == {"name", "guid", "ports"}
    assert set(written["hcas"][0]["ports"][0]) == {"number", "guid", "link_layer"}
    assert decode(as_loaded(encode(record))) == record


def with_hcas(count: int, **fields: Any) -> NodeRecord:
    port = HcaPort(number=1, port_guid="0" * 15 + "1")
    hcas = tuple(Hca(name=f"mlx5_{n}", node_guid="0" * 16, ports=(port,)) for n in range(count))
    return dataclasses.replace(NODE, inventory=NodeInventory(hcas=hcas, **fields))


def node_stored_as(value: bytes) -> NodeRecord:
    record = decode(StoredValue(kind="node", key=NODE.node_id, value=value, revision=1))
    assert isinstance(record, NodeRecord)
    return record


def test_a_nodes_adapters_are_read_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart reads every node; ten adapters are most of a record, and nothing waits for them."""
    asked: list[str] = []

    def counted(**fields: Any) -> Hca:
        asked.append(fields["name"])
        return Hca(**fields)

    monkeypatch.setattr(record_node, "Hca", counted)
    record = with_hcas(2, labels={"zone": "a"}, simulated="dgx")
    found = decode(as_loaded(encode(record)))
    assert isinstance(found, NodeRecord)
    assert not asked
    # Equal from both sides, as a tuple, and stored again as it was.
    assert found == record
    assert record == found
    assert record.inventory.hcas == found.inventory.hcas
    assert found.inventory != dataclasses.replace(record.inventory, hcas=())
    assert len(asked) == 2
    assert list(found.inventory.hcas) == list(record.inventory.hcas)
    assert found.inventory.hcas[1:] == record.inventory.hcas[1:]
    assert hash(found.inventory.hcas) == hash(record.inventory.hcas)
    assert repr(found) == repr(record)
    assert encode(found) == encode(record)
    assert len(asked) == 2


def test_adapters_are_found_wherever_a_record_has_them() -> None:
    """0.1.0 wrote labels behind them; a newer program may put fields there that we ignore."""
    record = with_hcas(2, labels={"zone": "a"}, simulated="dgx")
    value = encode(record).value or b""
    assert value.endswith(b"]}}")
    shape = json.loads(value)
    for name in ("labels", "simulated"):
        shape["inventory"][name] = shape["inventory"].pop(name)
    older = json.dumps(shape, separators=(",", ":")).encode()
    assert b'],"labels":' in older
    newer = value.removesuffix(b"}}") + b',"colours":["red"]}}'
    spaced = json.dumps(shape).encode()
    assert [node_stored_as(each) for each in (older, newer, spaced)] == [record] * 3


def test_text_that_looks_like_the_adapters_key_is_text() -> None:
    trap = ',"hcas":[1]}}'
    for count in (0, 1):
        record = with_hcas(count, labels={trap: trap, "hcas": "["}, hostname=trap, simulated=trap)
        assert decode(as_loaded(encode(record))) == record


@pytest.mark.parametrize("damaged", [b"7", b'{"name":1}', b"{]"])
def test_adapters_that_cannot_be_read_are_none_until_their_node_tells_them(damaged: bytes) -> None:
    """They decide nothing, and a pool that cannot start for them would help nobody."""
    value = encode(with_hcas(1)).value or b""
    start = value.index(b'"hcas":[') + len(b'"hcas":[')
    assert node_stored_as(value[:start] + damaged + b"]}}") == NODE


def test_what_a_record_leaves_out_is_what_0_1_0_meant_by_it() -> None:
    """The model may get other defaults one day, records may not."""
    port = {"number": 1, "guid": "0" * 16, "link_layer": "InfiniBand"}
    shape = {
        "devices": [{"uuid": "GPU-1", "model": "H100", "index": 3}],
        "hcas": [{"name": "mlx5_0", "guid": "0" * 16, "ports": [port]}],
    }
    inventory = json.loads(encode(NODE).value or b"")["inventory"] | shape
    found = decode(stored_with(encode(NODE), inventory=inventory))
    assert isinstance(found, NodeRecord)
    assert dataclasses.asdict(found.inventory.devices[0]) == {
        "uuid": "GPU-1",
        "model": "H100",
        "pci_address": "",
        "memory_mib": None,
        "index": 3,
        "numa_node": -1,
        "nvlink_domain": "",
        "sm_count": 0,
        "sliceable": True,
        "parent_uuid": None,
        "compute_capability": "",
        "pci_path": "",
        "cpus": "",
        "fabric_state": "",
        "fabric_status": 0,
        "cluster_uuid": "",
        "clique_id": 0,
        "nvlinks_active": 0,
        "nvlinks_expected": 0,
        "nvlink_peers": {},
    }
    usual_port = {
        "number": 1,
        "port_guid": "0" * 16,
        "lid": 0,
        "sm_lid": 0,
        "state": "",
        "rate_mbps": 0,
        "link_layer": "InfiniBand",
        "phys_state": "",
        "width": 0,
        "speed": "",
        "expected_rate_mbps": 0,
        "rail": None,
    }
    assert dataclasses.asdict(found.inventory.hcas[0]) == {
        "name": "mlx5_0",
        "node_guid": "0" * 16,
        "pci_address": "",
        "numa_node": -1,
        "ports": (usual_port,),
        "pci_path": "",
        "system_image_guid": "",
        "firmware": "",
        "hca_type": "",
        "board_id": "",
        "bonded": False,
    }


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (b"", "no JSON object"),
        (b"[1]", "no JSON object"),
        (b"\xff\xfe", "no JSON object"),
        (b"{}", "version None"),
        (b'{"v":1}', "malformed: KeyError"),
        (b'{"v":1,"request_id":"r","caller":3}', "malformed: TypeError"),
    ],
)
def test_what_is_not_a_record_is_refused_by_kind_and_key(value: bytes, complaint: str) -> None:
    damaged = StoredValue(kind="lease", key="l-7", value=value, revision=1)
    with pytest.raises(RecordError, match=complaint) as refusal:
        decode(damaged)
    assert "lease record 'l-7'" in str(refusal.value)


def test_an_unknown_word_in_a_record_is_refused() -> None:
    with pytest.raises(RecordError, match="'paused' is not a valid LeaseState"):
        decode(stored_with(encode(lease_of(1, 1)), state="paused"))


def test_an_unknown_kind_and_a_deletion_have_no_record() -> None:
    with pytest.raises(RecordError, match="unknown kind 'quota'"):
        decode(StoredValue(kind="quota", key="q", value=b"{}", revision=1))
    with pytest.raises(RecordError, match="'h1' was deleted"):
        decode(StoredValue(kind="hold", key="h1", value=None, revision=1))


def test_names_with_slashes_never_share_a_key() -> None:
    records = [unclaimed("a/b", "c"), unclaimed("a", "b/c"), unclaimed("a", "b%2Fc")]
    assert len({encode(record).key for record in records}) == 3


def test_a_time_that_is_no_number_has_no_record() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode(dataclasses.replace(HOLD, create_unix_s=math.nan))


def test_a_whole_device_has_all_of_its_share() -> None:
    lease = lease_of(1, 1)
    member = lease.members[0]
    share = dataclasses.replace(member.place.devices[0], share_pct=50)
    place = dataclasses.replace(member.place, devices=(share,))
    torn = dataclasses.replace(lease, members=(dataclasses.replace(member, place=place),))
    with pytest.raises(ValueError, match=r"share_pct of the whole device GPU-.*: 50, not 100"):
        encode(torn)
