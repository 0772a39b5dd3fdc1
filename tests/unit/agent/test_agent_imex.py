"""IMEX channels: found on the host, given to leases in an NVLink domain that spans hosts."""

from pathlib import Path

import pytest
from tests.agent_bench import assignment, gpu, part, whole

from gpupool.model.inventory import Device
from gpupool.model.lease import DeviceShare
from gpupool_agent.core.environment import IMEX_CHANNELS, imex_environment
from gpupool_agent.devices.imex import imex_channels


def test_imex_channels_are_numbers_and_a_host_without_any_has_none(tmp_path: Path) -> None:
    for name in ("channel0", "channel12", "channel2047", "channel01", "channelx", "other"):
        (tmp_path / name).touch()
    assert imex_channels(tmp_path) == (0, 12, 2047)
    assert imex_channels(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("domain", "share", "channels", "expected"),
    [
        ("c.1", whole(0), (3, 0), {"GPUPOOL_IMEX_CHANNEL": f"{IMEX_CHANNELS}/channel0"}),
        ("c.1", whole(0), (), {}),
        ("", whole(0), (0,), {}),
        # A slice's server is shared: what it imports would be its neighbours' too.
        ("c.1", part(0, 10), (0,), {}),
    ],
)
def test_whole_gpus_of_a_domain_that_spans_hosts_have_the_lowest_channel(
    domain: str, share: DeviceShare, channels: tuple[int, ...], expected: dict[str, str]
) -> None:
    device = Device(uuid=gpu(0), model="GB200", nvlink_domain=domain)
    made = assignment("a", 1, share)
    assert imex_environment(made, devices=(device,), channels=channels) == expected
