"""Requests from files: what is accepted, and how a wrong one is told."""

from pathlib import Path

import pytest

from gpupool.cli.spec_file import EXAMPLE, spec_from_file
from gpupool.errors import InvalidRequestError
from gpupool.model.request import GpuSlice, Level, OnFailure, WholeGpus


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "spec.yaml"


def test_the_example_of_the_help_is_a_request(file: Path) -> None:
    file.write_text(EXAMPLE)
    spec = spec_from_file(file)
    assert [group.name for group in spec.groups] == ["prefill", "decode", "router"]
    prefill, decode, router = spec.groups
    assert prefill.accelerator == WholeGpus(count=4)
    assert decode.accelerator == GpuSlice(share_pct=50)
    assert (decode.topology.spread, decode.topology.max_per_domain) == (Level.NODE, 2)
    assert router.accelerator is None
    assert router.node_selectors[0].values == ("r1", "r2")
    assert (spec.uid, spec.tenant, spec.priority) == (1000, "lab", 10)
    assert (spec.max_duration_s, spec.on_failure) == (12 * 3600, OnFailure.STOP)


def test_json_as_listings_print_it_is_read_back(file: Path) -> None:
    file.write_text(
        '{"groups": [{"replicas": 1.0, "slice": {"memory_mib": "2048"}, "cpuMilli": 500}], '
        '"max_duration": "7200s", "on_failure": "ON_FAILURE_UNSPECIFIED", "topology": null, '
        '"labels": {"team": "a"}, "movable": false}'
    )
    spec = spec_from_file(file)
    assert spec.groups[0].accelerator == GpuSlice(memory_mib=2048)
    assert (spec.groups[0].cpu_milli, spec.max_duration_s) == (500, 7200)
    assert (spec.on_failure, spec.labels) == (None, {"team": "a"})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("groups: 3", "spec.groups: 3 is not in lists"),
        ("groups: []", "spec.groups: 0 entries is not in 1..64 entries"),
        ("- groups", "spec: 'a list' is not in mappings with fields of groups, "),
        ("groups: [{replicas: two}]", "spec.groups[0].replicas: 'two' is not in whole numbers"),
        ("groups: [{replicas: 0}]", "spec.groups[0].replicas: 0 is not in 1..4096"),
        (
            "groups: [{replicas: .nan}]",
            "spec.groups[0].replicas: nan is not in whole numbers of -2147483648..2147483647",
        ),
        (
            "groups: [{replicas: 1, whole: {count: 65}}]",
            "spec.groups[0].whole.count: 65 is not in 1..64",
        ),
        (
            "groups: [{replicas: 1, whole: {count: 1}, slice: {share_pct: 10}}]",
            "spec.groups[0]: 'whole and slice' is not in one of whole, slice",
        ),
        ("groups: [{replicas: 1, repilcas: 3}]", "(near it: replicas)"),
        (
            "groups: [{replicas: 1}]\ntopology: {required: NODE}",
            "spec.topology.required: 'NODE' is not in LEVEL_GPU, ",
        ),
        ("groups: [{replicas: 1}]\nuid: -1", "spec.uid: -1 is not in whole numbers of 0.."),
        ("groups: [{replicas: 1}]\ntenant: 7", "spec.tenant: 7 is not in text"),
        ("groups: [{replicas: 1}]\nmovable: yes please", "spec.movable: 'yes please' is not in"),
        ("groups: [{replicas: 1}]\nmax_duration: long", "spec.max_duration: 'long' is not in"),
        ("groups: [{replicas: 1}]\nlabels: {a: 1}", "spec.labels['a']: 1 is not in text"),
        # What PyYAML itself fails on.
        ("max_duration: 2026-99-99", "spec.max_duration: '2026-99-99' is not in times"),
        ("priority: 2026-12-01", "spec.priority: 2026-12-01 is not in whole numbers"),
        ('priority: !!int "abc"', "spec.priority: 'abc' is not in whole numbers"),
        ('priority: !!int ""', "spec.priority: '' is not in whole numbers"),
        ('priority: !!float "x"', "spec.priority: 'x' is not in whole numbers"),
        ('movable: !!bool "zz"', "spec.movable: 'zz' is not in true, false"),
        ('display_name: !!timestamp "zz"', "spec.display_name: 'zz' is not in text"),
        ("priority: " + "9" * 5000, f"spec.priority: '{'9' * 79}... is not in whole numbers"),
        ("tenant: 0x" + "f" * 5000, f"spec.tenant: '0x{'f' * 77}... is not in text"),
        ("on_failure: -0x" + "f" * 5000, f"spec.on_failure: '-0x{'f' * 76}... is not in ON_"),
        ("uid: 1" + ":59" * 3000, "spec.uid: '1:59:59:"),
        ("max_duration: 0x" + "f" * 5000, f"spec.max_duration: '0x{'f' * 77}... is not in times"),
        (f"max_duration: {'9' * 4000}d", f"spec.max_duration: '{'9' * 79}... is not in 0..1"),
        (f"? 0x{'f' * 5000}\n: 1", "is not in its fields groups, "),
        ("[" * 3000, "spec: 33 levels is not in 1..32 levels"),
        ("{a: " * 3000, "spec: 33 levels is not in 1..32 levels"),
        ("a: &a [*a]\npriority: *a", "is not in its fields groups, "),
        ("priority: &a [*a, *a]", "spec.priority: 'a list' is not in whole numbers"),
        (r'display_name: "\ud800"', r"spec.display_name: '\ud800' is not in text of Unicode"),
        (r'groups: [{models: ["\udcff"]}]', "spec.groups[0].models[0]: '\\udcff' is not in text"),
        (r'labels: {"\ud800": a}', r"spec.labels key: '\ud800' is not in text of Unicode"),
        (r'labels: {a: "\ud800"}', r"spec.labels['a']: '\ud800' is not in text of Unicode"),
    ],
)
def test_what_is_wrong_is_told_by_field_value_and_range(file: Path, text: str, told: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidRequestError) as caught:
        spec_from_file(file)
    assert told in caught.value.message
    assert caught.value.field.startswith("spec")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"none\.yaml"):
        spec_from_file(tmp_path / "none.yaml")
