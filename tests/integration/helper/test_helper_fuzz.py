"""Whatever comes over the socket: it is refused, written down, and the helper goes on."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.helper.running import Helper, Peer, running, until

from gpupool_agent.helper.checks import ACTIONS
from gpupool_agent.helper.messages import MESSAGE_BYTES_MAX

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be the helper")

SO_SNDBUFFORCE = 32
"""Of <asm-generic/socket.h>: a send buffer beyond what other users may have."""

# One helper for all examples: what one leaves behind is what the next one meets.
fuzzed = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def helper() -> Iterator[Helper]:
    with running() as started:
        yield started
        assert started.process is not None
        assert started.process.poll() is None
        # Nothing was made by all of this.
        assert not (started.folder / "mps").exists()
        assert not (started.folder / "cdi").exists()
        assert not [line for line in started.lines() if line["event"] == "helper.wrong"]


@pytest.fixture(scope="module")
def peer(helper: Helper) -> Peer:
    return helper.peer()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def answers(helper: Helper) -> bool:
    """Whether there is room for one more connection."""
    try:
        return helper.ask("cdi_leases") == {"done": []}
    except (OSError, json.JSONDecodeError):
        return False


def refused(answer: dict[str, object]) -> bool:
    return set(answer) == {"id", "refused"}


@given(data=st.binary(min_size=1, max_size=400))
@fuzzed
def test_bytes_are_refused(peer: Peer, data: bytes) -> None:
    assert refused(peer.send(data))


@given(message=json_values)
@fuzzed
def test_json_of_any_kind_is_refused(peer: Peer, message: object) -> None:
    assert refused(peer.send(json.dumps(message).encode()))


@given(
    action=st.sampled_from(sorted(set(ACTIONS) - {"cdi_leases", "rescan_pci"})),
    fields=st.dictionaries(
        st.sampled_from(["gpu", "slot", "uid", "pid", "lines", "lease_id", "spec", "mode", "x"]),
        json_values,
        max_size=5,
    ),
)
@fuzzed
def test_wrong_fields_of_a_known_action_are_refused(
    peer: Peer, action: str, fields: dict[str, object]
) -> None:
    assert refused(peer.send(json.dumps({"id": 1, "action": action, **fields}).encode()))


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "l-1/../../x", "/etc/passwd", ".", "..", "", "a\0b", "a" * 129, "l-1.x"],
)
def test_a_lease_id_is_never_a_path(helper: Helper, peer: Peer, name: str) -> None:
    spec = '{"cdiVersion": "0.6.0", "kind": "gpupool.dev/lease"}'
    assert "refused" in peer.ask("write_cdi", lease_id=name, spec=spec)
    assert "refused" in peer.ask("remove_cdi", lease_id=name)


@pytest.mark.parametrize("slot", ["../../x", "0123456g", "0123456", "012345678", "0123ABCD", 1])
def test_a_slot_is_never_a_path(peer: Peer, slot: object) -> None:
    assert "refused" in peer.ask("stop_mps", slot=slot)
    assert "refused" in peer.ask("mps_daemon", slot=slot)


@pytest.mark.parametrize("extra", ["path", "environment", "peer_uid", "id2"])
def test_a_field_too_many_is_refused(peer: Peer, helper: Helper, extra: str) -> None:
    answer = peer.ask("set_compute_mode", gpu=helper.gpus[0], mode="default", **{extra: 0})
    assert answer == {"refused": "set_compute_mode: it has the fields gpu, mode, no others"}


@pytest.mark.parametrize("uid", [0, -1, 1, 999, 2**32 - 1, 2**64, True, "1000", 1000.0, None])
def test_a_user_that_is_not_permitted_is_refused(peer: Peer, helper: Helper, uid: object) -> None:
    assert "refused" in peer.ask("start_mps", slot="0123abcd", gpu=helper.gpus[0], uid=uid)


def test_a_key_that_stands_twice_is_refused(peer: Peer) -> None:
    answer = peer.send(b'{"id": 1, "action": "cdi_leases", "action": "rescan_pci"}')
    assert refused(answer)


def test_what_is_too_long_is_refused_and_the_connection_goes_on(peer: Peer) -> None:
    peer.channel.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 2**22)
    for size in (MESSAGE_BYTES_MAX + 1, 2**20):
        assert "at most" in str(peer.send(b" " * size)["refused"])
    assert peer.ask("cdi_leases") == {"done": []}


def test_deep_nesting_is_refused(peer: Peer) -> None:
    for data in (b"[" * 100_000, b'{"a":' * 20_000, b'{"id":' + b"9" * 10_000 + b"}"):
        assert refused(peer.send(data))


def test_every_refusal_is_written_down_bounded(peer: Peer, helper: Helper) -> None:
    before = len(helper.audit())
    peer.ask("x" * 100_000, **{"y" * 50_000: "z"})
    peer.send(b"\xff")
    lines = helper.audit()[before:]
    assert [line["outcome"] for line in lines] == ["refused", "refused"]
    assert all(len(json.dumps(line)) < 2000 for line in lines)


def test_connections_are_bounded_and_a_closed_one_makes_room() -> None:
    with running(connections_max=3) as helper:
        held = [helper.peer() for _ in range(3)]
        for each in held:
            each.ask("cdi_leases")
        with pytest.raises((OSError, json.JSONDecodeError)):
            helper.ask("cdi_leases")
        held.pop().close()
        until(lambda: answers(helper), "room for a connection")


def test_a_peer_that_does_not_listen_holds_up_nobody(helper: Helper) -> None:
    deaf = helper.peer()
    deaf.channel.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            deaf.channel.send(b'{"id": 1, "action": "cdi_leases"}')
    assert helper.ask("cdi_leases") == {"done": []}
    deaf.close()


def test_a_peer_that_goes_away_in_the_middle_does_no_harm(helper: Helper) -> None:
    for _ in range(20):
        gone = helper.peer()
        gone.channel.sendall(b'{"id": 1, "action": "cdi_leases"}')
        gone.close()
    until(lambda: answers(helper), "room for a connection")


def test_what_has_another_socket_type_gets_nowhere(helper: Helper) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel,
        pytest.raises(OSError, match="type"),
    ):
        channel.connect(str(helper.socket))


def test_the_log_is_all_json(helper: Helper) -> None:
    assert Path(helper.log).stat().st_size > 0
    assert helper.lines()
