"""C05: numbers that no sane request has are refused at the door, and change nothing."""

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from tests.e2e.pool_fixture import (
    ACTIVE,
    Pool,
    custom,
    details_of,
    part,
    request,
    running_pool,
    whole,
)

from gpupool import Client
from gpupool.errors import InvalidRequestError
from gpupool.v1 import lease_pb2, resources_pb2

INT64_MAX = 2**63 - 1
NAN, INF = float("nan"), float("inf")
WHOLE, SLICE = 3, 4
"""Numbers of the fields of Group that name GPUs."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One pool for all: it must be as new after each of them."""
    with running_pool(tmp_path_factory.mktemp("poison"), custom("n1", gpus=2)) as pool:
        yield pool


def _assert_untouched(pool: Pool) -> None:
    """Nothing was granted, queued or even noted, and the daemon lives."""
    summary = pool.summary()
    assert (summary.devices_free, summary.devices_used, summary.waiting) == (2, 0, 0)
    assert pool.leases(*resources_pb2.LeaseState.values()[1:]) == []
    assert not [event for event in pool.events() if event.kind.startswith("lease.")]
    assert pool.alarms() == []
    assert pool.daemon.is_alive


def _field(number: int, kind: int, payload: bytes) -> bytes:
    """A field as it stands on the wire."""
    return bytes([number << 3 | kind]) + payload


def _varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def _message(number: int, body: bytes) -> bytes:
    return _field(number, 2, _varint(len(body)) + body)


def _acquire(accelerator: int, body: bytes) -> bytes:
    """An Acquire with this body for its GPUs, put together by hand."""
    group = _field(2, 0, _varint(1)) + _message(accelerator, body)
    return _message(1, b"by-hand") + _message(2, _message(1, group))


def _send(pool: Pool, raw: bytes) -> grpc.RpcError:
    """What the pool says to these bytes; it must refuse them."""
    channel: Any = pool.calls.channel  # its stubs do not know calls without a serializer
    call = channel.unary_stream(
        "/gpupool.v1.LeaseService/Acquire",
        request_serializer=None,
        response_deserializer=lease_pb2.AcquireResponse.FromString,
    )
    with pytest.raises(grpc.RpcError) as refused:
        list(call(raw, timeout=60))
    return refused.value


def test_c05_a_well_made_request_by_hand_is_none_of_these() -> None:
    """The bytes below are what they seem: with good numbers they are an ordinary request."""
    made = lease_pb2.AcquireRequest.FromString(_acquire(WHOLE, _field(1, 0, _varint(2))))
    assert made.spec.groups[0].whole.count == 2
    assert made.request_id == "by-hand"


@pytest.mark.parametrize(
    ("accelerator", "body", "field"),
    [
        # As a client in another language would send a fraction, or NaN, for a share.
        (SLICE, _field(1, 1, struct.pack("<d", NAN)), "slice.share_pct"),
        (SLICE, _field(1, 1, struct.pack("<d", INF)), "slice.share_pct"),
        (SLICE, _field(1, 1, struct.pack("<d", 0.5)), "slice.share_pct"),
        (SLICE, _field(1, 5, struct.pack("<f", 1e-9)), "slice.share_pct"),
        (SLICE, _message(1, b"50%"), "slice.share_pct"),
        (SLICE, b"", "slice.share_pct"),
        (SLICE, _field(1, 0, _varint(-10)), "slice.share_pct"),
        (SLICE, _field(1, 0, _varint(101)), "slice.share_pct"),
        (SLICE, _field(1, 0, _varint(2**63)), "slice.share_pct"),
        (SLICE, _field(2, 0, _varint(2**63)), "slice.memory_mib"),
        (SLICE, _field(2, 0, _varint(INT64_MAX)), "slice.memory_mib"),
        (SLICE, _field(2, 0, _varint(2**24 + 1)), "slice.memory_mib"),
        (WHOLE, _field(1, 1, struct.pack("<d", NAN)), "whole.count"),
        (WHOLE, _field(1, 0, _varint(0)), "whole.count"),
        (WHOLE, _field(1, 0, _varint(-1)), "whole.count"),
        (WHOLE, _field(1, 0, _varint(2**63)), "whole.count"),
        (WHOLE, _field(1, 0, _varint(2**31 - 1)), "whole.count"),
        (WHOLE, _field(1, 0, _varint(1)) + _field(2, 0, _varint(-1)), "whole.min_memory_mib"),
    ],
    ids=lambda value: value.hex() or "empty" if isinstance(value, bytes) else str(value),
)
def test_c05_poison_on_the_wire_is_refused_with_field_and_range(
    pool: Pool, accelerator: int, body: bytes, field: str
) -> None:
    """C05: NaN, inf, fractions, negatives and overflow, as bytes that no stub would make."""
    error = _send(pool, _acquire(accelerator, body))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"spec.groups[0].{field}: " in details_of(error)
    assert ".." in details_of(error), "the accepted range is not named"
    _assert_untouched(pool)


def _group(**fields: Any) -> resources_pb2.Group:
    return resources_pb2.Group(replicas=1, whole=resources_pb2.WholeGpus(count=1), **fields)


def _spec(**fields: Any) -> resources_pb2.LeaseSpec:
    return resources_pb2.LeaseSpec(groups=[_group()], **fields)


def _replicas(*counts: tuple[int, int]) -> resources_pb2.LeaseSpec:
    """Groups of so many replicas with so many GPUs each."""
    return resources_pb2.LeaseSpec(
        groups=[
            resources_pb2.Group(
                name=f"g{index}", replicas=replicas, whole=resources_pb2.WholeGpus(count=gpus)
            )
            for index, (replicas, gpus) in enumerate(counts)
        ]
    )


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (_replicas((2**31 - 1, 2**31 - 1)), "spec.groups[0].replicas"),
        (_replicas((-1, 64)), "spec.groups[0].replicas"),
        (_replicas((4096, 64)), "spec.groups (GPUs in all)"),
        (_replicas(*[(4096, 64)] * 64), "spec.groups (members in all)"),
        (resources_pb2.LeaseSpec(groups=[_group(cpu_milli=INT64_MAX)]), "cpu_milli"),
        (resources_pb2.LeaseSpec(groups=[_group(cpu_milli=-1)]), "cpu_milli"),
        (resources_pb2.LeaseSpec(groups=[_group(host_memory_mib=INT64_MAX)]), "host_memory_mib"),
        (_spec(priority=2**31 - 1), "spec.priority"),
        (_spec(priority=-(2**31)), "spec.priority"),
        (_spec(uid=2**32 - 1), "spec.uid"),
        (_spec(spares=-1), "spec.spares"),
        (_spec(max_duration={"seconds": INT64_MAX}), "spec.max_duration"),
        (_spec(max_duration={"seconds": -1}), "spec.max_duration"),
        (_spec(max_duration={"seconds": 60, "nanos": 2**31 - 1}), "spec.max_duration"),
        (_spec(disconnect_timeout={"seconds": -INT64_MAX}), "spec.disconnect_timeout"),
    ],
)
def test_c05_counts_and_products_that_overflow_are_refused(
    pool: Pool, spec: resources_pb2.LeaseSpec, field: str
) -> None:
    """C05: count x size never wraps round into something small, negative or free."""
    made = lease_pb2.AcquireRequest(request_id="poison", spec=spec)
    for ask in (
        lambda: list(pool.calls.leases.Acquire(made)),
        lambda: pool.calls.leases.DryRun(lease_pb2.DryRunRequest(spec=spec)),
        lambda: pool.calls.leases.AcquireMany(lease_pb2.AcquireManyRequest(requests=[made])),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            ask()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in details_of(refused.value)
        assert ".." in details_of(refused.value)
    _assert_untouched(pool)


@pytest.mark.parametrize("seconds", [-1, 0, INT64_MAX, 7 * 86_400 + 1])
def test_c05_a_ttl_out_of_range_is_refused(pool: Pool, seconds: int) -> None:
    """C05: a time to live that is none, or for ever, is no time to live."""
    made = request("poison", whole(1))
    made.ttl.seconds = seconds
    with pytest.raises(grpc.RpcError) as refused:
        list(pool.calls.leases.Acquire(made))
    assert "ttl: " in details_of(refused.value)
    _assert_untouched(pool)


@pytest.mark.parametrize(
    "value", [NAN, INF, -INF, -0.1, 0, 1e-9, 0.1000000001, "50%", 2**63, 2**64 + 1, 1e300, 1.5, -1]
)
def test_c05_the_sdk_refuses_a_poisoned_number_of_gpus(pool: Pool, value: object) -> None:
    """C05: the case's own list, as a Python program would pass it."""
    with Client(pool.address) as client:
        for ask in (client.acquire, client.dry_run):
            with pytest.raises(InvalidRequestError, match=r"gpus: .* is not in .*") as refused:
                ask(gpus=cast("float", value))
            assert refused.value.field == "gpus"
    _assert_untouched(pool)


@pytest.mark.parametrize(
    "words",
    [
        ("--gpus", "nan"),
        ("--gpus", "inf"),
        ("--gpus", "-0.1"),
        ("--gpus", "0"),
        ("--gpus", "1e-9"),
        ("--gpus", "0.1000000001"),
        ("--gpus", "50%"),
        ("--gpus", str(2**63)),
        ("--gpus", "64", "--replicas", "4096"),
        ("--gpus", "1", "--replicas", str(2**63)),
        ("--memory", "99999999999999999999TiB"),
        ("--gpus", "1", "--host-memory", "1e9GiB"),
        ("--gpus", "1", "--cpu", "nan"),
        ("--gpus", "1", "--ttl", "9" * 40 + "d"),
        ("--gpus", "1", "--max-duration", "nan"),
    ],
)
def test_c05_the_command_line_refuses_a_poisoned_number(pool: Pool, words: tuple[str, ...]) -> None:
    """C05: exit code 64, the option named, no traceback."""
    done = subprocess.run(
        [*_GPUPOOL, "--address", pool.address, "lease", "create", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 64, done.stderr
    *_, option, _ = words
    assert option.removeprefix("--").replace("-", "_") in done.stderr.replace("-", "_") or (
        "GPUs in all" in done.stderr
    )
    assert "Traceback" not in done.stderr
    _assert_untouched(pool)


_GPUPOOL = (sys.executable, "-m", "gpupool.cli.main")


@pytest.mark.parametrize("share", ["NaN", "Infinity", "-0.1", "1e-9", "0.5", '"50%"', "1e30"])
def test_c05_a_poisoned_spec_file_is_refused(pool: Pool, tmp_path: Path, share: str) -> None:
    """C05: also where the number comes out of a file in JSON."""
    spec = tmp_path / "spec.json"
    spec.write_text(f'{{"groups": [{{"replicas": 1, "slice": {{"share_pct": {share}}}}}]}}')
    done = subprocess.run(
        [*_GPUPOOL, "--address", pool.address, "lease", "create", "--spec", str(spec)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 64, done.stderr
    assert "share" in done.stderr
    assert "Traceback" not in done.stderr
    _assert_untouched(pool)


def test_c05_afterwards_the_pool_grants_as_ever(pool: Pool) -> None:
    """C05: the daemon has lost nothing by all of that."""
    assert pool.calls.acquire("sane", part(50)).state == ACTIVE
