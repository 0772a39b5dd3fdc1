import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gpupool_allocator.settings import FIELDS, Address, AllocatorSettings, BadSettingError, load

EXAMPLE = Path(__file__).parents[3] / "systemd" / "allocator.toml"


def test_the_example_file_names_every_setting_with_its_default() -> None:
    assert set(tomllib.loads(EXAMPLE.read_text())) == set(FIELDS)
    assert load(EXAMPLE, {}) == AllocatorSettings()


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "allocator.toml"
    file.write_text("grain_pct = 5\nqueue_max = 7\naging_s = 60\n")
    environment = {"GPUPOOL_ALLOCATOR_QUEUE_MAX": "8", "GPUPOOL_ALLOCATOR_AGING_S": "70"}
    settings = load(file, environment, {"aging_s": "80.5"})
    assert (settings.grain_pct, settings.queue_max, settings.aging_s) == (5, 8, 80.5)


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("grain_pct", "3", "divisors of 100"),
        ("queue_max", "0", "1..1000000"),
        ("queue_max", "many", "a whole number"),
        ("heartbeat_timeout_s", "nan", "seconds in 1..3600"),
        ("heartbeat_timeout_s", "inf", "seconds in 1..3600"),
        ("grpc_address", "localhost", "HOST:PORT"),
        ("grpc_address", "127.0.0.1:70700", "HOST:PORT"),
        ("http_address", ":7071", "HOST:PORT"),
        ("insecure", "perhaps", "true or false"),
        ("state_dir", "relative/path", "an absolute path"),
        ("log_level", "loud", "one of debug"),
    ],
)
def test_a_value_out_of_range_is_refused_with_key_value_and_range(
    key: str, value: str, accepted: str
) -> None:
    with pytest.raises(BadSettingError) as caught:
        load(None, {}, {key: value})
    assert key in str(caught.value)
    assert repr(value) in str(caught.value)
    assert accepted in str(caught.value)


@pytest.mark.parametrize("text", ["queue_max = true", "aging_s = false", "queue_max = 1.5"])
def test_a_value_of_another_type_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "allocator.toml"
    file.write_text(text)
    with pytest.raises(BadSettingError, match=text.split(maxsplit=1)[0]):
        load(file, {})


def test_an_unknown_key_is_an_error_in_the_file_and_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "allocator.toml"
    file.write_text("quueue_max = 1\n")
    with pytest.raises(BadSettingError, match="quueue_max"):
        load(file, {})
    with pytest.raises(BadSettingError, match="quueue_max"):
        load(None, {"GPUPOOL_ALLOCATOR_QUUEUE_MAX": "1"})


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("grain_pct =")
    with pytest.raises(BadSettingError, match=r"broken\.toml"):
        load(file, {})
    with pytest.raises(BadSettingError, match=r"absent\.toml"):
        load(tmp_path / "absent.toml", {})


def test_an_address_that_others_reach_needs_insecure() -> None:
    with pytest.raises(BadSettingError, match="insecure"):
        load(None, {}, {"grpc_address": "0.0.0.0:7070"})
    settings = load(None, {}, {"grpc_address": "0.0.0.0:7070", "insecure": "true"})
    assert settings.grpc_address == Address("0.0.0.0", 7070)  # noqa: S104


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "[::1]", "localhost"])
def test_loopback_needs_no_leave(host: str) -> None:
    assert load(None, {}, {"grpc_address": f"{host}:0"}).grpc_address.is_loopback


def test_an_ipv6_address_is_written_with_brackets() -> None:
    assert str(load(None, {}, {"grpc_address": "[::1]:7070"}).grpc_address) == "[::1]:7070"


def test_one_lost_report_does_not_make_a_node_unreachable() -> None:
    with pytest.raises(BadSettingError, match="at least twice report_interval_s"):
        load(None, {}, {"heartbeat_timeout_s": "9", "report_interval_s": "5"})


def test_every_setting_says_what_it_means_and_accepts() -> None:
    for field in dataclasses.fields(AllocatorSettings):
        assert field.metadata["meaning"].endswith(".")
        assert field.metadata["accepted"]


@pytest.mark.parametrize("library", ["structlog", "aiohttp", "grpc_health"])
def test_without_its_libraries_the_program_says_what_to_install(library: str) -> None:
    script = (
        f"import sys; sys.modules['{library}'] = None; "
        "from gpupool_allocator.__main__ import main; sys.exit(main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 69
    assert f"{library} is not installed" in done.stderr
    assert "[allocator]" in done.stderr
    assert "Traceback" not in done.stderr
