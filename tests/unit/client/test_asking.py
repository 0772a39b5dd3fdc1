"""What the words of a call ask for."""

import math

import pytest

from gpupool.errors import InvalidRequestError
from gpupool.model.request import GpuSlice, Group, LabelSelector, LeaseSpec, Level, WholeGpus
from gpupool.sdk.asking import Ask, Shape, acquire_ask, lease_spec
from gpupool.sdk.quantities import duration_s, memory_mib


def only_group(shape: Shape) -> Group:
    return lease_spec(shape).groups[0]


@pytest.mark.parametrize(
    ("shape", "accelerator"),
    [
        ({"gpus": 8}, WholeGpus(count=8)),
        ({"gpus": 1.0, "memory": "40GiB"}, WholeGpus(count=1, min_memory_mib=40960)),
        ({"gpus": 0.1}, GpuSlice(share_pct=10)),
        ({"gpus": 0.29}, GpuSlice(share_pct=29)),
        ({"gpus": 0.5, "memory": 1024}, GpuSlice(share_pct=50, memory_mib=1024)),
        ({"memory": "10GiB"}, GpuSlice(memory_mib=10240)),
        ({"gpus": 0, "memory": "10GiB"}, GpuSlice(memory_mib=10240)),
        ({"cpu": 2}, None),
    ],
)
def test_gpus_and_memory_become_whole_gpus_or_a_slice(
    shape: Shape, accelerator: WholeGpus | GpuSlice | None
) -> None:
    assert only_group(shape).accelerator == accelerator


@pytest.mark.parametrize("gpus", [-1, 1.5, 0.123, math.nan, math.inf, 0.001, 1e300])
def test_gpus_that_are_no_amount_are_refused(gpus: float) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        lease_spec({"gpus": gpus})
    assert refused.value.field


def test_everything_of_a_call_reaches_the_request() -> None:
    spec = lease_spec(
        {
            "gpus": 1,
            "replicas": 3,
            "models": ["NVIDIA H100"],
            "cpu": 1.5,
            "host_memory": "1GiB",
            "selectors": {"zone": ["a", "b"], "disk": "nvme"},
            "level": "block",
            "spread": Level.NODE,
            "max_duration": "2h",
            "tenant": "lab",
            "priority": 7,
        }
    )
    group = spec.groups[0]
    assert (group.replicas, group.models, group.cpu_milli) == (3, ("nvidia h100",), 1500)
    assert group.host_memory_mib == 1024
    assert group.node_selectors == (
        LabelSelector(key="zone", values=("a", "b")),
        LabelSelector(key="disk", values=("nvme",)),
    )
    assert (spec.topology.required, spec.topology.spread) == (Level.BLOCK, Level.NODE)
    assert (spec.max_duration_s, spec.tenant, spec.priority) == (7200.0, "lab", 7)


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        ({"gpus": 1, "level": "rack"}, "level"),
        ({"gpus": 1, "ttl": 5, "process": True}, "ttl"),
        ({"gpus": 1, "spec": LeaseSpec(groups=(Group(),))}, "gpus"),
        ({"gpus": 1, "groups": [Group()]}, "gpus"),
        ({"gpus": 1, "ttl": "soon"}, "ttl"),
        ({"gpus": 1, "memory": "much"}, "memory"),
        ({"gpus": 1, "ttl": math.nan}, "ttl"),
        ({"gpus": 1, "replicas": 2**40}, "replicas"),
        ({"gpus": 2**40}, "gpus"),
        ({"gpus": 1, "wait": -1}, "wait"),
        ({"gpus": 65}, "gpus"),
        ({"gpus": 0}, "gpus"),
    ],
)
def test_a_bad_word_is_named(ask: Ask, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        acquire_ask(ask)
    assert refused.value.field == field


def test_sizes_round_up_and_durations_take_units() -> None:
    assert memory_mib("1.5GiB") == 1536
    assert memory_mib("1GB") == 954
    assert memory_mib("7") == 7
    assert duration_s("90") == 90.0
    assert duration_s("1.5m") == 90.0
    assert duration_s("250ms") == 0.25
