"""A request from a file: a LeaseSpec in JSON or YAML, with the field names of the proto.

Read field by field, so that what is wrong is told by its path, its value and what is
accepted there. Ranges are those of every request and are checked by the same door.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from gpupool.cli.text import is_unicode
from gpupool.errors import InvalidRequestError

if TYPE_CHECKING:
    from google.protobuf.descriptor import FieldDescriptor

    from gpupool.model.request import LeaseSpec

EXAMPLE = """\
groups:                      # one or more; each a named role of equal members
- name: prefill
  replicas: 2
  whole: {count: 4}          # GPUs of each member
  models: [NVIDIA H100 80GB HBM3]
- name: decode
  replicas: 4
  slice: {share_pct: 50}     # or memory_mib: or both
  topology: {spread: LEVEL_NODE, max_per_domain: 2}
- name: router               # no GPUs
  replicas: 1
  cpu_milli: 4000
  host_memory_mib: 8192
  node_selectors:
  - {key: rack, values: [r1, r2]}
uid: 1000                    # the work's user; 0, root, unless given
tenant: lab
priority: 10
max_duration: 12h
on_failure: ON_FAILURE_STOP
display_name: two-stage serving
"""
"""A request as its file may be, for help and docs."""

_DURATION = "google.protobuf.Duration"
_DURATION_S_MAX = 1e10
_INTEGER = re.compile(r"-?[0-9]{1,20}").fullmatch


def spec_from_file(path: Path) -> LeaseSpec:
    """The request in a file; "-": on standard input. InvalidRequestError names the field."""
    import yaml

    from gpupool.cli.spec_yaml import read_yaml
    from gpupool.v1.resources_pb2 import LeaseSpec as LeaseSpecMessage
    from gpupool.wire.errors import BadField
    from gpupool.wire.request import lease_spec_from_proto

    try:
        with click.open_file(str(path)) as file:
            data = read_yaml(file)  # JSON is YAML
        message = LeaseSpecMessage()
        _fill(message, data, "spec")
        return lease_spec_from_proto(message)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidRequestError(f"spec: {path}: {error}", field="spec") from error
    except BadField as bad:
        raise InvalidRequestError(f"{path}: {bad}", field=bad.field) from bad


def _fill(message: Any, data: object, at: str) -> None:
    """Puts a mapping into a message. Raises BadField."""
    from gpupool.wire.errors import BadField

    fields: Mapping[str, FieldDescriptor] = message.DESCRIPTOR.fields_by_name
    # JSON as other programs write it has the same names in another case.
    camels: Mapping[str, FieldDescriptor] = message.DESCRIPTOR.fields_by_camelcase_name
    names = list(fields)
    if not isinstance(data, Mapping):
        raise BadField(at, _kind(data), f"mappings with fields of {', '.join(names)}")
    chosen: dict[str, str] = {}
    for key, value in cast("Mapping[object, object]", data).items():
        field = fields.get(str(key)) or camels.get(str(key))
        if field is None:
            near = get_close_matches(str(key), names, n=1)
            hint = f" (near it: {near[0]})" if near else ""
            raise BadField(at, str(key), f"its fields {', '.join(names)}{hint}")
        if value is None:
            continue
        group = field.containing_oneof
        if group is not None and chosen.setdefault(group.name, field.name) != field.name:
            both = f"{chosen[group.name]} and {field.name}"
            raise BadField(at, both, f"one of {', '.join(each.name for each in group.fields)}")
        _set(message, field, value, f"{at}.{field.name}")


def _set(message: Any, field: FieldDescriptor, value: object, at: str) -> None:
    from gpupool.wire.errors import BadField

    known = getattr(message, field.name)
    if isinstance(known, MutableMapping):
        if not isinstance(value, Mapping):
            raise BadField(at, _kind(value), "mappings of text to text")
        for key, text in cast("Mapping[object, object]", value).items():
            known[_text(key, f"{at} key")] = _text(text, f"{at}[{key!r}]")
    elif isinstance(known, MutableSequence):
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise BadField(at, _kind(value), "lists")
        entries = cast("Any", known)
        for index, each in enumerate(cast("Sequence[object]", value)):
            if field.message_type is not None:
                _fill(entries.add(), each, f"{at}[{index}]")
            else:
                entries.append(_scalar(field, each, f"{at}[{index}]"))
    elif field.message_type is None:
        setattr(message, field.name, _scalar(field, value, at))
    else:
        known.SetInParent()  # also where all in it is zero
        if field.message_type.full_name == _DURATION:
            known.FromNanoseconds(round(_seconds(value, at) * 1e9))
        else:
            _fill(known, value, at)


def _scalar(field: FieldDescriptor, value: object, at: str) -> object:
    from gpupool.wire.errors import BadField

    if field.cpp_type == field.CPPTYPE_STRING:
        return _text(value, at)
    if field.cpp_type == field.CPPTYPE_BOOL:
        if not isinstance(value, bool):
            raise BadField(at, _kind(value), "true, false")
        return value
    if field.enum_type is not None:
        numbers = {each.name: each.number for each in field.enum_type.values}
        if not isinstance(value, str) or value not in numbers:
            raise BadField(at, _kind(value), ", ".join(name for name in numbers if numbers[name]))
        return numbers[value]
    return _integer(field, value, at)


def _integer(field: FieldDescriptor, value: object, at: str) -> int:
    from gpupool.wire.errors import BadField

    bits = 64 if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) else 32
    if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
        least, most = 0, 2**bits - 1
    else:
        least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    # JSON of protos has big numbers as text.
    if (isinstance(value, str) and _INTEGER(value)) or (
        isinstance(value, float) and value.is_integer()
    ):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadField(at, _kind(value), f"whole numbers of {least}..{most}")
    return value


def _text(value: object, at: str) -> str:
    from gpupool.wire.errors import BadField

    if not isinstance(value, str):
        raise BadField(at, _kind(value), "text; in YAML a number is quoted to be text")
    if not is_unicode(value):
        raise BadField(at, value, "text of Unicode without surrogates")
    return value


def _seconds(value: object, at: str) -> float:
    """A time as the options take it, "2h", or as JSON has it, "7200s"."""
    from gpupool.sdk.quantities import duration_s

    if isinstance(value, bool) or not isinstance(value, int | float | str):
        from gpupool.wire.errors import BadField

        raise BadField(at, _kind(value), 'times as "30s", "2h" or seconds')
    return duration_s(value, at, 0.0, _DURATION_S_MAX)


def _kind(value: object) -> object:
    """A value, or where it is long what it is, in words of JSON and YAML."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list) else value
