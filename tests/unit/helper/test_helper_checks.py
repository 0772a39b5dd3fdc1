"""Every field of every action, with everything that it may not be."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool_agent.helper.cdi import Mountable
from gpupool_agent.helper.checks import (
    ACTIONS,
    COMMANDS,
    ENVIRONMENT,
    FIELDS,
    PID_MAX,
    Policy,
    Probe,
    read_action,
)
from gpupool_agent.helper.messages import BadMessageError, decode, encode, message_id
from gpupool_agent.helper.refusal import RefusedError

GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"
MPS_DIR = Path("/run/gpupool-mps")
POLICY = Policy(
    uid_min=1000,
    uid_max=60000,
    allow_root=False,
    mountable=Mountable(mps_dir=MPS_DIR, paths=(Path("/dev/shm"),)),
)
SPEC: dict[str, Any] = {
    "cdiVersion": "0.6.0",
    "kind": "gpupool.dev/lease",
    "annotations": {"gpupool.dev/node": "n1"},
    "devices": [
        {
            "name": "l-1",
            "containerEdits": {
                "env": ["CUDA_VISIBLE_DEVICES=" + GPU],
                "deviceNodes": [{"path": "/dev/nvidia-caps-imex-channels/channel0"}],
                "mounts": [
                    {
                        "hostPath": "/run/gpupool-mps/0123abcd/pipe",
                        "containerPath": "/run/gpupool-mps/0123abcd/pipe",
                        "options": ["rw", "bind"],
                    },
                    {"hostPath": "/dev/shm", "containerPath": "/dev/shm"},
                ],
            },
        }
    ],
}
GOOD: dict[str, Any] = {
    "gpu": GPU,
    "slot": "0123abcd",
    "lease_id": "l-q3v7k2ambd5xw4ty",
    "mode": "exclusive_process",
    "number": 15,
    "pid": 4711,
    "start_ticks": 1,
    "uid": 1000,
    "lines": ["get_server_list", "start_server -uid 1000"],
    "environment": {"CUDA_VISIBLE_DEVICES": GPU},
    "deadline_s": 5,
    "spec": json.dumps(SPEC),
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def message(action: str, **changed: Any) -> dict[str, Any]:
    wanted = {each.name: GOOD[each.name] for each in fields(ACTIONS[action])}
    return {"id": 1, "action": action, **wanted, **changed}


def read(action: str, **changed: Any) -> Any:
    return read_action(message(action, **changed), POLICY)


def users_of(field: str) -> str:
    """An action that has the field."""
    return next(
        name for name, kind in ACTIONS.items() if field in {each.name for each in fields(kind)}
    )


@pytest.mark.parametrize("action", ACTIONS)
def test_each_action_is_read_as_it_was_asked(action: str) -> None:
    found = read(action)
    assert type(found) is ACTIONS[action]
    for each in fields(found):
        value = getattr(found, each.name)
        if each.name == "spec":
            assert json.loads(value) == SPEC
        else:
            assert value == (tuple(GOOD["lines"]) if each.name == "lines" else GOOD[each.name])


@pytest.mark.parametrize("action", ACTIONS)
def test_a_field_too_many_or_too_few_is_refused(action: str) -> None:
    with pytest.raises(RefusedError, match="no others"):
        read(action, more=1)
    for each in fields(ACTIONS[action]):
        short = message(action)
        del short[each.name]
        with pytest.raises(RefusedError, match="it has the fields"):
            read_action(short, POLICY)


@pytest.mark.parametrize("action", [None, 1, "", "SET_COMPUTE_MODE", "__class__", ["a"], {}])
def test_an_unknown_action_is_refused(action: object) -> None:
    with pytest.raises(RefusedError, match="is not one of"):
        read_action({"id": 1, "action": action}, POLICY)


@pytest.mark.parametrize("number", [None, -1, True, 1.0, "1", 2**53 + 1])
def test_a_number_that_is_none_is_refused(number: object) -> None:
    with pytest.raises(RefusedError, match="id"):
        read_action({"id": number, "action": "cdi_leases"}, POLICY)


@pytest.mark.parametrize("field", sorted(FIELDS))
@given(data=st.data())
def test_no_value_of_any_kind_passes_for_another(field: str, data: st.DataObject) -> None:
    """Whatever is not refused is what the field says it is."""
    value = data.draw(json_values)
    try:
        found = getattr(read(users_of(field), **{field: value}), field)
    except RefusedError as error:
        told = str(error)
        assert told.startswith(field)
        assert len(told) < 1000
        return
    good = {
        "number": lambda: found in (9, 15),
        "pid": lambda: type(found) is int and 1 < found <= PID_MAX,
        "start_ticks": lambda: type(found) is int and found >= 0,
        "uid": lambda: type(found) is int and 1000 <= found <= 60000,
        "deadline_s": lambda: 0.1 <= found <= 60,
        "environment": lambda: set(found) <= ENVIRONMENT,
        "lease_id": lambda: re.fullmatch("[A-Za-z0-9_-]+", found),
    }
    assert good[field](), value


@given(text=st.text())
def test_no_text_passes_for_a_uuid_a_slot_a_mode_or_a_command(text: str) -> None:
    for field, value in (("gpu", text), ("slot", text), ("mode", text), ("lines", [text])):
        if text in GOOD[field] or (field == "slot" and re.fullmatch("[0-9a-f]{8}", text)):
            continue
        if field == "lines" and any(each.fullmatch(text) for each in COMMANDS):
            continue
        if field == "mode" and text in ("default", "prohibited"):
            continue
        with pytest.raises(RefusedError):
            read(users_of(field), **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpu", GPU + "\n"),
        ("gpu", GPU.upper()),
        ("gpu", GPU[:-1]),
        ("gpu", "GPU-0"),
        ("slot", "0123abcd\n"),
        ("slot", "٠١٢٣٤٥٦٧"),
        ("lease_id", "-rf"),
        ("lease_id", "a/b"),
        ("number", 0),
        ("number", 19),
        ("number", 9.0),
        ("number", True),
        ("pid", 0),
        ("pid", 1),
        ("pid", -1),
        ("pid", PID_MAX + 1),
        ("uid", 0),
        ("uid", 999),
        ("uid", 60001),
        ("deadline_s", 0),
        ("deadline_s", 61),
        ("deadline_s", True),
        ("deadline_s", float("inf")),
        ("deadline_s", float("nan")),
        ("lines", []),
        ("lines", ["ps"] * 65),
        ("lines", "ps"),
        ("lines", ["ps\nquit"]),
        ("lines", ["ps "]),
        ("lines", ["start_server -uid 0"]),
        ("lines", ["start_server -uid 999"]),
        ("lines", ["terminate_client 0 1"]),
        ("lines", ["set_default_active_thread_percentage 101"]),
        ("lines", ["set_default_active_thread_percentage 0"]),
        ("lines", ["sm_partition add x 1"]),
        ("environment", {"LD_PRELOAD": "x"}),
        ("environment", {"PATH": "/tmp"}),
        ("environment", {"GPUPOOL_LEASE_ID": "a\0b"}),
        ("environment", {"GPUPOOL_LEASE_ID": "a\nb"}),
        ("environment", {"GPUPOOL_LEASE_ID": 1}),
        ("environment", {"GPUPOOL_LEASE_ID": "x" * 1025}),
        ("spec", "{}"),
        ("spec", "[1]"),
        ("spec", "{"),
        ("spec", "[" * 60000),
        ("spec", " " * 65537),
        ("spec", '{"cdiVersion": "0.6.0", "kind": "gpupool.dev/a", "kind": "nvidia.com/gpu"}'),
    ],
)
def test_what_is_just_beside_is_refused(field: str, value: object) -> None:
    # A uid in a command is refused as any uid is.
    with pytest.raises(RefusedError, match=f"{field}|uid"):
        read(users_of(field), **{field: value})


def edits(**changed: Any) -> dict[str, Any]:
    return {**SPEC, "containerEdits": changed}


@pytest.mark.parametrize(
    "spec",
    [
        {**SPEC, "kind": "nvidia.com/gpu"},
        {**SPEC, "hooks": []},
        edits(hooks=[{"hookName": "createRuntime", "path": "/bin/sh"}]),
        edits(intelRdt={}),
        edits(mounts=[{"hostPath": "/", "containerPath": "/host"}]),
        edits(mounts=[{"hostPath": "/run/gpupool-mps/../../etc", "containerPath": "/x"}]),
        edits(mounts=[{"hostPath": "//run/gpupool-mps/a", "containerPath": "/x"}]),
        edits(mounts=[{"hostPath": "/run/gpupool-mps-evil", "containerPath": "/x"}]),
        edits(mounts=[{"hostPath": "/run/gpupool-mps", "containerPath": "/x"}]),
        edits(mounts=[{"hostPath": "/run/gpupool-mps/0123abcd", "containerPath": "/x"}]),
        edits(mounts=[{"hostPath": "/run/gpupool-mps/0123abcd/log", "containerPath": "/x"}]),
        edits(mounts=[{"hostPath": "/run/gpupool-mps/0123abcd/pipe/log", "containerPath": "/x"}]),
        edits(mounts=[{"hostPath": "/run/gpupool-mps/0123abcg/pipe", "containerPath": "/x"}]),
        edits(mounts=[{"hostPath": "/run/gpupool-mps/a/0123abcd/pipe", "containerPath": "/x"}]),
        edits(mounts=[{"hostPath": "/run/gpupool-mps/pipe", "containerPath": "/x"}]),
        edits(mounts=[{"hostPath": "/dev/shm/link", "containerPath": "/x"}]),
        edits(mounts=[{"hostPath": "run", "containerPath": "/x"}]),
        edits(mounts=[{"hostPath": "/dev/shm", "containerPath": "../x"}]),
        edits(mounts=[{"hostPath": "/dev/shm", "containerPath": "/x", "options": ["suid"]}]),
        edits(mounts=[{"hostPath": "/dev/shm", "containerPath": "/x", "options": [["ro"]]}]),
        edits(mounts=[{"hostPath": "/dev/shm", "containerPath": "/x", "options": [{}]}]),
        edits(mounts=[{"hostPath": "/dev/shm", "containerPath": "/x", "type": "overlay"}]),
        edits(deviceNodes=[{"path": "/dev/sda"}]),
        edits(deviceNodes=[{"path": "/dev/nvidia0", "hostPath": "/dev/mem"}]),
        edits(deviceNodes=[{"path": "/dev/nvidia0", "major": 8}]),
        edits(deviceNodes=[{"path": "/dev/nvidia0", "type": "b"}]),
        edits(deviceNodes=[{"path": "/dev/nvidia-caps/../sda"}]),
        edits(env=["LD_PRELOAD=/x.so"]),
        edits(env=["PATH=/x"]),
        edits(env=["no value"]),
        edits(env=[1]),
        {**SPEC, "devices": [{"name": "../x"}]},
    ],
    ids=str,
)
def test_a_spec_that_would_give_more_than_a_lease_needs_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match="spec"):
        read("write_cdi", spec=json.dumps(spec))


@given(value=json_values, key=st.sampled_from(["kind", "devices", "containerEdits", "annotations"]))
def test_a_spec_with_anything_in_any_place_is_read_or_refused(value: object, key: str) -> None:
    try:
        found = json.loads(read("write_cdi", spec=json.dumps({**SPEC, key: value})).spec)
    except RefusedError:
        return
    assert found["kind"].startswith("gpupool")
    assert "hooks" not in json.dumps(found)


@given(
    place=st.sampled_from(["env", "deviceNodes", "mounts"]),
    key=st.sampled_from(["hostPath", "containerPath", "path", "permissions", "type", "options"]),
    value=json_values,
)
def test_an_edit_with_anything_in_any_place_is_read_or_refused(
    place: str, key: str, value: object
) -> None:
    known: dict[str, dict[str, Any]] = {
        "mounts": {"hostPath": "/dev/shm", "containerPath": "/x"},
        "deviceNodes": {"path": "/dev/nvidia0"},
        "env": {},
    }
    for each in (value, {**known[place], key: value}, {**known[place], key: [value]}):
        try:
            found = json.loads(read("write_cdi", spec=json.dumps(edits(**{place: [each]}))).spec)
        except RefusedError:
            continue
        assert found["containerEdits"] == {place: [each]}


def test_root_is_permitted_where_the_operator_says_so() -> None:
    policy = Policy(uid_min=1000, uid_max=60000, allow_root=True, mountable=POLICY.mountable)
    found = read_action(message("probe", uid=0), policy)
    assert isinstance(found, Probe)
    assert found.uid == 0


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_none(data: bytes) -> None:
    try:
        found = decode(data)
    except BadMessageError as error:
        told = str(error)
        assert len(told) < 300
        return
    assert decode(encode(found)) == found
    assert message_id(found) >= 0


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"\xff", b'{"a": NaN}', b'{"a": 1, "a": 2}', b'{"a":' * 5000],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(BadMessageError):
        decode(data)
