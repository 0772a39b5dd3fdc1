"""The helper's settings and its example file."""

import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from gpupool_agent.helper.settings import HelperSettings, load_settings
from gpupool_agent.settings import SettingsError


def test_the_example_file_holds_every_setting_with_its_default(root: Path) -> None:
    file = root / "systemd" / "helper.toml"
    assert load_settings(file, {}, {}) == HelperSettings()
    assert list(tomllib.loads(file.read_text())) == [each.name for each in fields(HelperSettings)]


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "helper.toml"
    file.write_text('uid_min = 2000\nagent_user = "a"\nsmi_program = "x"\n')
    environment = {"GPUPOOL_HELPER_AGENT_USER": "b", "GPUPOOL_HELPER_SMI_PROGRAM": "y"}
    found = load_settings(file, environment, {"smi_program": "z", "probe_program": "a,-b"})
    assert (found.uid_min, found.agent_user, found.smi_program) == (2000, "b", "z")
    assert found.probe_program == ("a", "-b")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("socket", "helper.sock"),
        ("socket", "/" + "x" * 107),
        ("socket", ""),
        ("mps_dir", "/" + "x" * 80),
        ("run_dir", "/run/../etc"),
        ("mps_supervisor", "upstart"),
        ("uid_min", "0"),
        ("uid_max", "999"),
        ("driver_deadline_s", "0"),
        ("connections_max", "0"),
        ("agent_user", ""),
        ("allow_root", "maybe"),
        ("unknown", "1"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_key(key: str, value: str) -> None:
    with pytest.raises(SettingsError, match=key):
        load_settings(None, {}, {key: value})
