"""What the pool says arrives as it was said; what anybody else says cannot get past the door."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property import wire_strategies as some

from gpupool.model.lease import Lease
from gpupool.model.request import GpuSlice, LeaseSpec, WholeGpus
from gpupool.v1 import agent_pb2, lease_pb2, node_pb2, pool_pb2, resources_pb2
from gpupool.wire import agent, lease, node, pool, resources, views
from gpupool.wire.errors import BadField
from gpupool.wire.times import duration_from_proto, duration_to_proto

Parse = Callable[[Any], object]

MESSAGES: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Any], type[Any], Parse]] = {
    "acquire": (
        some.asks(),
        lease.acquire_ask_to_proto,
        lease_pb2.AcquireRequest,
        lease.acquire_ask_from_proto,
    ),
    "refusal": (
        some.refusals,
        lease.refusal_to_proto,
        lease_pb2.Refusal,
        lease.refusal_from_proto,
    ),
    "lease": (
        some.leases,
        resources.lease_to_proto,
        resources_pb2.Lease,
        resources.lease_from_proto,
    ),
    "hello": (some.hellos, node.hello_to_proto, node_pb2.Hello, node.hello_from_proto),
    "welcome": (some.welcomes, node.welcome_to_proto, node_pb2.Welcome, node.welcome_from_proto),
    "report": (some.reports, node.report_to_proto, node_pb2.Report, node.report_from_proto),
    "telemetry": (
        some.telemetry,
        node.telemetry_to_proto,
        node_pb2.Telemetry,
        node.telemetry_from_proto,
    ),
    "desired state": (
        some.desired_states,
        node.desired_state_to_proto,
        node_pb2.DesiredState,
        node.desired_state_from_proto,
    ),
    "unclaimed": (
        some.unclaimed,
        views.unclaimed_to_proto,
        pool_pb2.UnclaimedAssignment,
        views.unclaimed_from_proto,
    ),
    "adopt ask": (
        some.adopt_asks,
        agent.adopt_ask_to_proto,
        agent_pb2.AdoptProcessRequest,
        agent.adopt_ask_from_proto,
    ),
    "adopted": (
        some.adopted,
        agent.adopted_to_proto,
        agent_pb2.AdoptProcessResponse,
        agent.adopted_from_proto,
    ),
    "pool": (
        some.summaries,
        views.pool_summary_to_proto,
        pool_pb2.GetPoolResponse,
        views.pool_summary_from_proto,
    ),
    "hold": (some.holds(), pool.hold_to_proto, pool_pb2.Hold, pool.hold_from_proto),
    "event": (some.events, pool.event_to_proto, pool_pb2.Event, pool.event_from_proto),
}


@pytest.mark.parametrize("name", MESSAGES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_what_was_sent_is_what_is_read(name: str, data: st.DataObject) -> None:
    strategy, to_proto, message, from_proto = MESSAGES[name]
    said = data.draw(strategy)
    assert from_proto(message.FromString(to_proto(said).SerializeToString())) == said


@pytest.mark.parametrize("name", MESSAGES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_bytes_are_refused_or_read_as_something_sendable(
    name: str, data: st.DataObject
) -> None:
    strategy, to_proto, message, from_proto = MESSAGES[name]
    raw = bytearray(to_proto(data.draw(strategy)).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=6))
    parsed = message()
    try:
        parsed.MergeFromString(bytes(raw))
    except DecodeError:
        return
    try:
        read = from_proto(parsed)
    except BadField as bad:
        assert_says_what_is_wrong(bad)
        return
    assert from_proto(to_proto(read)) == read


def assert_says_what_is_wrong(bad: BadField) -> None:
    assert bad.field
    assert bad.accepted
    assert len(str(bad)) < 2000


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_random_bytes_never_become_a_request_outside_the_limits(raw: bytes) -> None:
    message = resources_pb2.LeaseSpec()
    try:
        message.MergeFromString(raw)
        spec = resources.lease_spec_from_proto(message)
    except (BadField, DecodeError):
        return
    assert_within_limits(spec)


def assert_within_limits(spec: LeaseSpec) -> None:
    assert 1 <= len(spec.groups) <= 64
    assert sum(group.replicas for group in spec.groups) <= 16384
    for group in spec.groups:
        match group.accelerator:
            case WholeGpus():
                assert 1 <= group.accelerator.count <= 64
            case GpuSlice():
                assert 0 <= group.accelerator.share_pct <= 100
                assert group.accelerator.share_pct or group.accelerator.memory_mib
            case None:
                pass


@given(some.seconds(0, 3650 * 86400))
def test_durations_keep_every_nanosecond(seconds: float) -> None:
    assert duration_from_proto("", "ttl", duration_to_proto(seconds), 0, 4e8) == seconds


@given(some.leases)
@settings(max_examples=20, deadline=None)
def test_a_lease_says_nothing_of_how_long_it_would_have_waited(found: Lease) -> None:
    assert resources.lease_from_proto(resources.lease_to_proto(found)).wait_s is None
