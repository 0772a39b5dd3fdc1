"""Streams of past releases, held against this tree in both directions.

Old to new: every recorded message passes this tree's door. New to old: what this tree
says of the same things is read with the old release's own descriptors, and gives the
old release everything that it said itself.
"""

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message

from gpupool.v1 import lease_pb2, node_pb2
from gpupool.wire.lease import acquire_ask_from_proto
from gpupool.wire.node import (
    desired_state_from_proto,
    desired_state_to_proto,
    hello_from_proto,
    hello_to_proto,
    report_from_proto,
    report_to_proto,
)
from gpupool.wire.resources import lease_from_proto, lease_spec_to_proto, lease_to_proto

COMPAT = Path(__file__).resolve().parents[1] / "compat"
VERSIONS = [
    row["version"]
    for row in tomllib.loads((COMPAT / "releases.toml").read_text()).get("release", [])
]


def recorded(version: str) -> Iterator[dict[str, Any]]:
    for line in (COMPAT / version / "streams.jsonl").read_text().splitlines():
        yield json.loads(line)


def old_class(version: str, name: str) -> type[Message]:
    """A message class as the old release knew it, from its own descriptors."""
    files = descriptor_pb2.FileDescriptorSet.FromString(
        (COMPAT / version / "descriptors.binpb").read_bytes()
    )
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def said_again(message: Message) -> Message:
    """The same thing in this tree's own words: through the door and out again."""
    match message:
        case node_pb2.ConnectRequest() if message.HasField("hello"):
            return node_pb2.ConnectRequest(hello=hello_to_proto(hello_from_proto(message.hello)))
        case node_pb2.ConnectRequest():
            report = report_to_proto(report_from_proto(message.report))
            return node_pb2.ConnectRequest(report=report)
        case node_pb2.ConnectResponse():
            desired = desired_state_to_proto(desired_state_from_proto(message.desired_state))
            return node_pb2.ConnectResponse(desired_state=desired)
        case lease_pb2.AcquireResponse():
            return lease_pb2.AcquireResponse(lease=lease_to_proto(lease_from_proto(message.lease)))
        case lease_pb2.AcquireRequest():
            ask = acquire_ask_from_proto(message)
            again = lease_pb2.AcquireRequest()
            again.CopyFrom(message)
            again.spec.CopyFrom(lease_spec_to_proto(ask.spec))
            return again
        case _:
            raise AssertionError(f"no door for {message.DESCRIPTOR.full_name}")


PARSERS: dict[str, Callable[[], Message]] = {
    "gpupool.v1.ConnectRequest": node_pb2.ConnectRequest,
    "gpupool.v1.ConnectResponse": node_pb2.ConnectResponse,
    "gpupool.v1.AcquireRequest": lease_pb2.AcquireRequest,
    "gpupool.v1.AcquireResponse": lease_pb2.AcquireResponse,
}


@pytest.mark.parametrize("version", VERSIONS)
def test_both_sides_understand_what_the_other_says(version: str) -> None:
    seen = set()
    for line in recorded(version):
        seen.add((line["direction"], line["type"]))
        mine = ParseDict(line["message"], PARSERS[line["type"]]())
        told = said_again(mine).SerializeToString()
        heard = old_class(version, line["type"]).FromString(told)
        assert contains(MessageToDict(heard, preserving_proto_field_name=True), line["message"]), (
            line
        )
    assert {direction for direction, _ in seen} == {
        "node up",
        "node down",
        "client up",
        "client down",
    }


def contains(whole: Any, part: Any) -> bool:
    """Everything in ``part`` is in ``whole``, with the same value."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            key in whole and contains(whole[key], value) for key, value in part.items()
        )
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return bool(whole == part)
