"""The agent's settings: a TOML file, then GPUPOOL_AGENT_* in the environment, then flags."""

import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeGuard

from gpupool_agent.log import LEVELS

NODE_ID = re.compile(r"[A-Za-z0-9_.-]{1,253}\Z")
ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:]+\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5})\Z")
ENVIRONMENT_PREFIX = "GPUPOOL_AGENT_"
STATE_DIR = Path("/var/lib/gpupool-agent")
RUN_DIR = Path("/run/gpupool")
SYSFS_ROOT = Path("/sys")
SOCKET_PATH_BYTES_MAX = 107
"""Longest path of a Unix socket, unix(7): 108 bytes with the one that ends it."""

SOCKET = RUN_DIR / "agent.sock"
LABELS_MAX = 64
LABEL_CHARS_MAX = 253
ALLOCATORS_MAX = 16


class SettingsError(ValueError):
    """A setting is not acceptable; the text names key, value and accepted range."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"text": text})


class StrayPolicy(StrEnum):
    """What becomes of processes that should not be on their GPU."""

    REPORT = "report"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Everything that can be set, validated as a whole when it is made.

    Raises SettingsError.
    """

    node_id: str = _setting("", "Name of the node for ever; empty: the host's name.")
    allocators: tuple[str, ...] = _setting(
        ("127.0.0.1:7070",), "Addresses of the allocators, host:port, tried in turn (1..16)."
    )
    insecure: bool = _setting(
        False, "Speak without TLS to allocators elsewhere than on this host's loopback."
    )
    state_dir: Path | None = field(
        default=STATE_DIR,
        metadata={
            "text": "Where the checkpoint is kept. Empty: nothing is, and a restart forgets."
        },
    )
    socket: Path | None = field(
        default=SOCKET, metadata={"text": "Unix socket for local clients. Empty: none."}
    )
    run_dir: Path = field(
        default=RUN_DIR,
        metadata={"text": "Where MPS directories are; short, since sockets live in them."},
    )
    cdi_dir: Path | None = field(
        default=None,
        metadata={
            "text": "Where the agent writes CDI specs itself, for container engines that are"
            " told to read them there. Empty: only its root helper writes them."
        },
    )
    sysfs_root: Path = field(
        default=SYSFS_ROOT,
        metadata={"text": "Where the kernel's /sys is: adapters and PCI devices are read there."},
    )
    rail_rate_gbps: int = _setting(
        0,
        "What a port of the compute fabric should run at, in Gb/s (0..10000). 0: what the"
        " fastest port of the same product on this host does.",
    )
    helper_socket: Path | None = field(
        default=RUN_DIR.with_name("gpupool-helper") / "helper.sock",
        metadata={"text": "Unix socket of the root helper. Empty: the agent only reads."},
    )
    mps_exclusive: bool = _setting(
        True,
        "Put GPUs with slices into exclusive-process mode, so that nothing bypasses MPS. False:"
        " their compute mode stays as it is found, and a bypass is only detected.",
    )
    strays: str = _setting(
        StrayPolicy.REPORT.value,
        "Processes on GPUs that belong to no lease, outlive theirs or are outside its limits."
        " report: they are named, and their GPU is not offered. stop: they are also ended,"
        " through the root helper.",
    )
    labels: Mapping[str, str] = field(
        default_factory=dict[str, str],
        metadata={"text": "Labels of the node, for selection (at most 64)."},
    )
    metrics_port: int = _setting(
        7072, "Port of /metrics on 127.0.0.1 (0..65535). 0: any free one, -1: no metrics."
    )
    inventory_period_s: float = _setting(
        30.0, "How often devices are enumerated, in seconds (0.1..3600)."
    )
    usage_period_s: float = _setting(
        5.0, "How often processes and memory of devices are read, in seconds (0.1..3600)."
    )
    telemetry_period_s: float = _setting(
        15.0, "How often devices are measured, in seconds (0.1..3600)."
    )
    driver_deadline_s: float = _setting(
        5.0, "A driver call that takes longer counts as hung, in seconds (0.1..600)."
    )
    log_level: str = _setting(
        "info", "Least severe log line that is written: debug, info, warning or error."
    )
    local_connections_max: int = _setting(
        256,
        "Connections on the Unix socket at a time (1..4096): at most a quarter of them one"
        " user's, an eighth kept for root.",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "node_id", self.node_id or socket.gethostname())
        object.__setattr__(self, "labels", dict(self.labels))
        check(
            bool(NODE_ID.match(self.node_id)),
            "node_id",
            self.node_id,
            "1..253 characters of a-z, A-Z, 0-9, '-', '_' and '.'",
        )
        check(
            1 <= len(self.allocators) <= ALLOCATORS_MAX,
            "allocators",
            self.allocators,
            f"1..{ALLOCATORS_MAX} addresses",
        )
        for address in self.allocators:
            self._check_address(address)
        for key in ("inventory_period_s", "usage_period_s", "telemetry_period_s"):
            check(0.1 <= getattr(self, key) <= 3600, key, getattr(self, key), "0.1..3600")
        check(
            0.1 <= self.driver_deadline_s <= 600,
            "driver_deadline_s",
            self.driver_deadline_s,
            "0.1..600",
        )
        check(0 <= self.rail_rate_gbps <= 10_000, "rail_rate_gbps", self.rail_rate_gbps, "0..10000")
        check(-1 <= self.metrics_port <= 65535, "metrics_port", self.metrics_port, "-1..65535")
        check(
            1 <= self.local_connections_max <= 4096,
            "local_connections_max",
            self.local_connections_max,
            "1..4096",
        )
        check(self.log_level in LEVELS, "log_level", self.log_level, f"one of {', '.join(LEVELS)}")
        words = tuple(each.value for each in StrayPolicy)
        check(self.strays in words, "strays", self.strays, f"one of {', '.join(words)}")
        for key in ("socket", "helper_socket"):
            path: Path | None = getattr(self, key)
            check(
                path is None or len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX,
                key,
                path,
                f"a path of at most {SOCKET_PATH_BYTES_MAX} bytes",
            )
        check(
            len(self.labels) <= LABELS_MAX,
            "labels",
            len(self.labels),
            f"at most {LABELS_MAX} entries",
        )
        for name, value in self.labels.items():
            check(
                0 < len(name) <= LABEL_CHARS_MAX and len(value) <= LABEL_CHARS_MAX,
                f"labels.{name}",
                value,
                f"texts of at most {LABEL_CHARS_MAX} characters",
            )

    def _check_address(self, address: str) -> None:
        match = ADDRESS.match(address)
        good = match is not None and 0 < int(match["port"]) <= 65535
        check(good, "allocators", address, "host:port with a port of 1..65535")
        check(
            self.insecure or (match is not None and _is_loopback(match["host"])),
            "allocators",
            address,
            "an address on loopback, or insecure = true",
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load_settings(
    path: Path | None, environment: Mapping[str, str], flags: Mapping[str, str]
) -> AgentSettings:
    """Read the settings in their order; a later one replaces an earlier one.

    ``flags`` are texts by the setting's name. Raises SettingsError, also for a file
    that cannot be read and for a key that is not known.
    """
    return AgentSettings(**read_values(AgentSettings, ENVIRONMENT_PREFIX, path, environment, flags))


def read_values(
    kind: type[Any],
    prefix: str,
    path: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, str],
) -> dict[str, Any]:
    """Read what is set of a class of settings, each as its type; SettingsError."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"{path}: {error}") from error
    texts = {
        key.removeprefix(prefix).lower(): text
        for key, text in environment.items()
        if key.startswith(prefix)
    }
    values.update({**texts, **flags})
    known = {each.name: each for each in fields(kind)}
    for key in values:
        check(key in known, key, values[key], f"one of the keys {', '.join(known)}")
    return {key: _convert(key, known[key].type, value) for key, value in values.items()}


def _convert(key: str, kind: Any, value: Any) -> Any:
    """A value of TOML, or the text of an environment variable or flag, as its type."""
    try:
        return _CONVERT[kind](value)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{key}: {value!r} is not accepted: {error}") from error


def _to_bool(value: Any) -> bool:
    words = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ValueError("it must be true or false")


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("it must be a whole number")  # noqa: TRY004 - one error for the caller
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("it must be a number")  # noqa: TRY004 - one error for the caller
    return float(value)


def _to_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("it must be a text")  # noqa: TRY004 - one error for the caller
    return value


def _to_texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = value.split(",")
    if not _is_list(value):
        raise ValueError("it must be a list of texts")
    return tuple(_to_text(each).strip() for each in value)


def _to_labels(value: Any) -> dict[str, str]:
    """From a TOML table, or from "name=value,name=value"."""
    if isinstance(value, str):
        pairs = [each.partition("=") for each in value.split(",") if each]
        return {name.strip(): text.strip() for name, _, text in pairs}
    if not _is_table(value):
        raise ValueError("it must be a table of texts")
    return {_to_text(name): _to_text(text) for name, text in value.items()}


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _is_table(value: object) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


def _to_path(value: Any) -> Path | None:
    text = str(value) if isinstance(value, Path) else _to_text(value)
    return Path(text) if text else None


_CONVERT: dict[Any, Callable[[Any], Any]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_text,
    tuple[str, ...]: _to_texts,
    Mapping[str, str]: _to_labels,
    Path: _to_path,
    Path | None: _to_path,
}


def check(good: bool, key: str, value: object, accepted: str) -> None:
    """Raise SettingsError where a value is not good."""
    if not good:
        raise SettingsError(f"{key}: {value!r} is not accepted, it must be {accepted}")
