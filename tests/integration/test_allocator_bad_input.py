"""Whatever is sent: a status comes back, the pool is as it was, the daemon lives."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from tests.integration.allocator_daemon import Calls, Daemon, PlayedAgent, part, playing, whole

from gpupool.v1 import lease_pb2, node_pb2, pool_pb2, resources_pb2
from gpupool.wire.request import lease_spec_to_proto

CALL_S = 20.0

# One event loop for all: gRPC is bound to the first that it sees.
one_loop = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    made = Daemon(tmp_path_factory.mktemp("allocator"))
    yield made.start()
    made.end()


async def picture(calls: Calls) -> list[bytes]:
    """All that the pool shows and that a refused command must not change."""
    pool = await calls.pool.GetPool(pool_pb2.GetPoolRequest())
    leases = await calls.leases.ListLeases(lease_pb2.ListLeasesRequest())
    holds = await calls.pool.ListHolds(pool_pb2.ListHoldsRequest())
    return [m.SerializeToString(deterministic=True) for m in (pool, leases, holds)]


def acquire_request(**changes: Any) -> lease_pb2.AcquireRequest:
    request = lease_pb2.AcquireRequest(request_id="bad", spec=lease_spec_to_proto(part(10)))
    request.wait.seconds = 0
    for path, value in changes.items():
        target: Any = request
        *parts, last = path.split("__")
        for part_name in parts:
            target = target[int(part_name)] if part_name.isdigit() else getattr(target, part_name)
        setattr(target, last, value)
    return request


BAD = {
    "spec.groups[0].slice.share_pct": {"spec__groups__0__slice__share_pct": 250},
    "spec.groups[0].slice.memory_mib": {"spec__groups__0__slice__memory_mib": -1},
    "spec.groups[0].replicas": {"spec__groups__0__replicas": 2**31 - 1},
    "spec.groups[0].cpu_milli": {"spec__groups__0__cpu_milli": 2**63 - 1},
    "spec.groups[0].host_memory_mib": {"spec__groups__0__host_memory_mib": -(2**63)},
    "spec.groups[0].name": {"spec__groups__0__name": "UPPER case"},
    "spec.display_name": {"spec__display_name": "x" * 10 * 1024 * 1024},
    "spec.tenant": {"spec__tenant": "t\n\x1b[31m"},
    "spec.uid": {"spec__uid": 2**32 - 1},
    "spec.priority": {"spec__priority": 1001},
    "spec.max_duration": {"spec__max_duration__seconds": 2**62},
    "spec.disconnect_timeout": {"spec__disconnect_timeout__seconds": -5},
    "spec.on_failure": {"spec__on_failure": 99},
    "spec.workload_class": {"spec__workload_class": -7},
    "spec.topology.required": {"spec__topology__required": 1_000_000},
    "spec.spares": {"spec__spares": -1},
    "ttl": {"ttl__seconds": 0, "ttl__nanos": 1},
    "wait": {"wait__seconds": 5, "wait__nanos": -5},
    "request_id": {"request_id": ""},
}


@pytest.mark.parametrize("field", BAD)
@one_loop
async def test_a_bad_field_is_named_with_its_accepted_range(daemon: Daemon, field: str) -> None:
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1")):
        before = await picture(calls)
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in calls.leases.Acquire(acquire_request(**BAD[field]), timeout=CALL_S):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(f"{field}: ")
        assert " is not in " in (caught.value.details() or "")
        refusal = lease_pb2.Refusal.FromString(
            dict(caught.value.trailing_metadata() or ())["gpupool-refusal-bin"]  # type: ignore[arg-type]
        )
        assert refusal.field == field
        assert refusal.code == "INVALID_ARGUMENT"
        assert await picture(calls) == before


@pytest.mark.parametrize(
    "method",
    [
        f"/{service.full_name}/{method.name}"
        for file in (lease_pb2, pool_pb2, node_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ],
)
@one_loop
async def test_bytes_that_are_no_message_are_bad_input_for_every_method(
    daemon: Daemon, method: str
) -> None:
    async with daemon.connected() as calls:
        call = calls.channel.stream_stream(method)(
            _each(b"\xff\xff\xff\xff\x0f garbage"), timeout=CALL_S
        )
        assert await _drained(call) is grpc.StatusCode.INVALID_ARGUMENT
        # A string field with what is no UTF-8, where the first field is one.
        call = calls.channel.stream_stream(method)(_each(b"\x0a\x02\xc3\x28"), timeout=3.0)
        assert await _drained(call) is not grpc.StatusCode.UNKNOWN


@one_loop
async def test_a_message_above_the_limit_is_refused(daemon: Daemon) -> None:
    async with daemon.connected() as calls:
        request = acquire_request(spec__display_name="x" * 17 * 1024 * 1024)
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in calls.leases.Acquire(request, timeout=CALL_S):
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@one_loop
async def test_a_request_that_no_record_could_hold_is_refused(daemon: Daemon) -> None:
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1")):
        wide = lease_spec_to_proto(whole(1, replicas=4096))
        for number in range(3):
            wide.groups.add().CopyFrom(wide.groups[0])
            wide.groups[-1].name = f"g{number}"
        with pytest.raises(aio.AioRpcError) as caught:
            await calls.leases.DryRun(lease_pb2.DryRunRequest(spec=wide), timeout=CALL_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "bytes as a record" in (caught.value.details() or "")

        long = lease_spec_to_proto(part(10))
        for number in range(32):
            selector = long.groups[0].node_selectors.add(key=f"k{number}")
            selector.values.extend(f"{value:0250}" for value in range(64))
        for number in range(4):
            long.groups.add().CopyFrom(long.groups[0])
            long.groups[-1].name = f"g{number}"
        request = acquire_request()
        request.spec.CopyFrom(long)
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in calls.leases.Acquire(request, timeout=CALL_S):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("token", ["nonsense", "A" * 10_000, "\x00", "bm9kZXM="])
@one_loop
async def test_a_page_token_of_somebody_else_is_refused(daemon: Daemon, token: str) -> None:
    async with daemon.connected() as calls:
        for call in (
            calls.leases.ListLeases(lease_pb2.ListLeasesRequest(page_token=token)),
            calls.pool.ListNodes(pool_pb2.ListNodesRequest(page_token=token)),
            calls.pool.ListDevices(pool_pb2.ListDevicesRequest(page_token=token)),
            calls.pool.ListHolds(pool_pb2.ListHoldsRequest(page_token=token)),
            calls.pool.ListUnclaimed(pool_pb2.ListUnclaimedRequest(page_token=token)),
        ):
            with pytest.raises(aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (caught.value.details() or "").startswith("page_token: ")


@one_loop
async def test_an_unknown_method_is_unimplemented(daemon: Daemon) -> None:
    async with daemon.connected() as calls:
        with pytest.raises(aio.AioRpcError) as caught:
            await calls.channel.unary_unary("/gpupool.v1.LeaseService/Steal")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


NUMBERS = [0, 1, -1, 5, 100, 101, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)]
TEXTS = ["", "x", "n1", "l-1", "default", "\x00", "é" * 300, "x" * 100_000, "../..", "GPU-n1-0"]


def wild(kind: type[Message], random_numbers: random.Random, depth: int = 0) -> Message:
    """A message whose fields hold whatever their types can."""
    message: Any = kind()
    for field in kind.DESCRIPTOR.fields:
        if random_numbers.random() < 0.4 or depth > 5:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name
            key, value = (_wild_value(entry[part], random_numbers) for part in ("key", "value"))
            getattr(message, field.name)[key] = value
            continue
        if field.message_type is not None:
            made = wild(GetMessageClass(field.message_type), random_numbers, depth + 1)
            if field.is_repeated:
                getattr(message, field.name).append(made)
            else:
                getattr(message, field.name).CopyFrom(made)
            continue
        value = _wild_value(field, random_numbers)
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return message


def _wild_value(field: FieldDescriptor, random_numbers: random.Random) -> Any:
    number = random_numbers.choice(NUMBERS)
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return random_numbers.choice(TEXTS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return random_numbers.random() < 0.5
        case FieldDescriptor.CPPTYPE_UINT32:
            return abs(number) % 2**32
        case FieldDescriptor.CPPTYPE_INT32 | FieldDescriptor.CPPTYPE_ENUM:
            return max(min(number, 2**31 - 1), -(2**31))
        case _:
            return number


@one_loop
async def test_wild_messages_are_all_answered_and_change_nothing_they_should_not(
    daemon: Daemon,
) -> None:
    random_numbers = random.Random(20_261)
    methods = [
        (f"/{service.full_name}/{method.name}", GetMessageClass(method.input_type))
        for file in (lease_pb2, pool_pb2, node_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    async with daemon.connected() as calls, playing(calls, PlayedAgent("n1")):
        for path, kind in methods:
            requests = [wild(kind, random_numbers) for _ in range(60)]
            await asyncio.gather(*(_answered(calls, path, request) for request in requests))
        lease = await calls.acquire("after", part(10), wait_s=0)
        assert lease.state == resources_pb2.LEASE_STATE_ACTIVE
        await calls.leases.Release(lease_pb2.ReleaseRequest(lease_id=lease.lease_id))
    assert daemon.is_alive
    assert "rpc.failed" not in daemon.log()
    assert daemon.get("/healthz")[0] == 200


async def _answered(calls: Calls, path: str, request: Message) -> None:
    call = calls.channel.stream_stream(path)(_each(request.SerializeToString()), timeout=CALL_S)
    code = await _drained(call, answers_max=3)
    assert code not in (
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    ), (path, str(request)[:2000], await call.details())


async def _each(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def _drained(call: Any, answers_max: int = 1000) -> grpc.StatusCode:
    """The call's status; one that goes on answering is cancelled."""
    for _ in range(answers_max):
        try:
            answer = await asyncio.wait_for(call.read(), 2.0)
        except TimeoutError:
            # A stream that waits for what will happen, as it should.
            break
        except aio.AioRpcError as error:
            return error.code()
        if answer is aio.EOF:
            return await call.code()
    call.cancel()
    return grpc.StatusCode.CANCELLED
