"""Settings of the agent: file, environment, flags, and refusals that name the key."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from gpupool_agent.settings import AgentSettings, SettingsError, load_settings


def test_the_example_file_holds_every_setting_with_its_default(root: Path) -> None:
    path = root / "systemd" / "agent.toml"
    assert load_settings(path, {}, {}) == AgentSettings()
    text = path.read_text()
    assert [each.name for each in fields(AgentSettings) if each.name not in text] == []


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text('node_id = "file"\nusage_period_s = 7\nlabels = {zone = "a"}\n')
    environment = {
        "GPUPOOL_AGENT_NODE_ID": "environment",
        "GPUPOOL_AGENT_INVENTORY_PERIOD_S": "9",
        "GPUPOOL_AGENT_LABELS": "zone=b,rack=r1",
        "GPUPOOL_ADDRESS": "not ours",
    }
    settings = load_settings(path, environment, {"node_id": "flag", "socket": ""})
    assert settings.node_id == "flag"
    assert settings.usage_period_s == 7.0
    assert settings.inventory_period_s == 9.0
    assert settings.labels == {"zone": "b", "rack": "r1"}
    assert settings.socket is None


def test_an_empty_node_id_is_the_name_of_the_host() -> None:
    assert AgentSettings().node_id


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"node_id": "a b"}, "node_id: 'a b' is not accepted, it must be 1..253 characters"),
        ({"allocators": ""}, "allocators: '' is not accepted, it must be host:port"),
        ({"allocators": "127.0.0.1:0"}, "it must be host:port with a port of 1..65535"),
        ({"allocators": "10.0.0.1:7070"}, "an address on loopback, or insecure = true"),
        ({"allocators": "127.0.0.1.example.org:7070"}, "an address on loopback, or insecure"),
        ({"usage_period_s": "nan"}, "usage_period_s: nan is not accepted, it must be 0.1..3600"),
        ({"usage_period_s": "often"}, "usage_period_s: 'often' is not accepted"),
        ({"driver_deadline_s": "0"}, "driver_deadline_s: 0.0 is not accepted"),
        ({"metrics_port": "65536"}, "metrics_port: 65536 is not accepted, it must be -1..65535"),
        ({"metrics_port": "1.5"}, "metrics_port: '1.5' is not accepted"),
        ({"insecure": "perhaps"}, "insecure: 'perhaps' is not accepted: it must be true or false"),
        ({"local_connections_max": "0"}, "it must be 1..4096"),
        ({"labels": "=x"}, "labels.: 'x' is not accepted"),
        ({"period": "3"}, "period: '3' is not accepted, it must be one of the keys node_id"),
    ],
)
def test_a_bad_setting_is_refused_with_key_value_and_range(
    flags: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(None, {}, flags)
    assert message in str(refused.value)


def test_a_file_that_is_no_toml_or_not_there_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    with pytest.raises(SettingsError, match=r"agent\.toml"):
        load_settings(path, {}, {})
    path.write_text("node_id = ")
    with pytest.raises(SettingsError, match=r"agent\.toml"):
        load_settings(path, {}, {})


def test_a_value_of_the_wrong_kind_in_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text("allocators = [1]\n")
    with pytest.raises(SettingsError, match=r"allocators: \[1\] is not accepted"):
        load_settings(path, {}, {})


def test_another_host_is_accepted_without_tls_when_that_is_said() -> None:
    assert AgentSettings(allocators=("10.0.0.1:7070",), insecure=True).insecure


def run_check(file: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpupool_agent", "--check", "--config", str(file), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_check_prints_what_is_in_force_and_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('node_id = "h100-01"\n')
    done = run_check(file, "--usage-period-s", "7")
    assert done.returncode == 0
    assert {"node_id = h100-01", "usage_period_s = 7.0"} <= set(done.stdout.splitlines())
    file.write_text("node_id = 7\n")
    refused = run_check(file)
    assert (refused.returncode, refused.stdout) == (78, "")
    assert "node_id" in refused.stderr


@pytest.mark.parametrize("program", ["agent", "helper"])
def test_without_its_libraries_a_program_says_what_to_install(program: str) -> None:
    script = (
        "import sys; sys.modules['structlog'] = None; sys.argv[1:] = ['--help']; "
        f"from gpupool_agent import entry; sys.exit(entry.{program}())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 69
    assert "structlog is not installed" in done.stderr
    assert "[agent]" in done.stderr
    assert "Traceback" not in done.stderr
