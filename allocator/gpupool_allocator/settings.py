"""The allocator's settings: a TOML file, then the environment, then flags.

Each value is checked on its own, with a message that names the key, the value and
what is accepted; then those that depend on one another are checked together.
"""

import dataclasses
import ipaddress
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpupool import __version__
from gpupool_allocator.core.settings import PoolSettings

ENVIRONMENT_PREFIX = "GPUPOOL_ALLOCATOR_"

GRAINS_PCT = (1, 2, 4, 5, 10, 20, 25, 50, 100)

Raw = object
"""A value as it stands in the file (typed) or in the environment or a flag (text)."""


class BadSettingError(Exception):
    """A setting is not accepted; the text names key, value and accepted range."""

    def __init__(self, key: str, value: Raw, accepted: str, source: str) -> None:
        super().__init__(f"{source}: {key} = {value!r} is not accepted: {accepted}")
        self.key = key


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens; port 0 lets the system choose one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def _parse_address(raw: Raw) -> Address:
    if not isinstance(raw, str):
        raise TypeError
    host, _, port = raw.rpartition(":")
    number = int(port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not 0 <= number <= 65535:
        raise ValueError
    return Address(host, number)


def _parse_bool(raw: Raw) -> bool:
    if isinstance(raw, bool):
        return raw
    return {"true": True, "false": False}[str(raw).lower()]


def _setting(default: Any, parse: Callable[[Raw], Any], accepted: str, meaning: str) -> Any:
    return dataclasses.field(
        default=default, metadata={"parse": parse, "accepted": accepted, "meaning": meaning}
    )


def _whole(default: int, low: int, high: int, meaning: str) -> Any:
    def parse(raw: Raw) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise TypeError
        number = int(raw)
        if not low <= number <= high:
            raise ValueError
        return number

    return _setting(default, parse, f"a whole number in {low}..{high}", meaning)


def _grain(default: int, meaning: str) -> Any:
    def parse(raw: Raw) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int | str):
            raise TypeError
        number = int(raw)
        if number not in GRAINS_PCT:
            raise ValueError
        return number

    return _setting(default, parse, f"one of {GRAINS_PCT}, the divisors of 100", meaning)


def _seconds(default: float, low: float, high: float, meaning: str) -> Any:
    def parse(raw: Raw) -> float:
        if isinstance(raw, bool) or not isinstance(raw, int | float | str):
            raise TypeError
        number = float(raw)
        if not (math.isfinite(number) and low <= number <= high):
            raise ValueError
        return number

    return _setting(default, parse, f"seconds in {low:g}..{high:g}", meaning)


def _address(default: Address, meaning: str) -> Any:
    return _setting(default, _parse_address, "HOST:PORT with a port in 0..65535", meaning)


def _flag(*, default: bool, meaning: str) -> Any:
    return _setting(default, _parse_bool, "true or false", meaning)


def _choice(default: str, choices: tuple[str, ...], meaning: str) -> Any:
    def parse(raw: Raw) -> str:
        return choices[choices.index(str(raw))]

    return _setting(default, parse, "one of " + ", ".join(choices), meaning)


def _directory(default: Path, meaning: str) -> Any:
    def parse(raw: Raw) -> Path:
        path = Path(str(raw))
        if not path.is_absolute():
            raise ValueError
        return path

    return _setting(default, parse, "an absolute path", meaning)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Everything that can be set. Each field's metadata says what it means and accepts."""

    grpc_address: Address = _address(  # noqa: RUF009 - a field
        Address("127.0.0.1", 7070), "Where clients and agents connect."
    )
    http_address: Address = _address(  # noqa: RUF009 - a field
        Address("127.0.0.1", 7071), "Where /healthz, /readyz and /metrics are served."
    )
    insecure: bool = _flag(
        default=False,
        meaning="Accept addresses that other machines reach although nothing is encrypted.",
    )
    state_dir: Path = _directory(  # noqa: RUF009 - a field
        Path("/var/lib/gpupool"), "Where the store lies. One allocator at a time."
    )
    store_mib_max: int = _whole(
        16_384, 16, 1_048_576, "Size of the store, MiB, at which changes are refused."
    )
    new_store: bool = _flag(
        default=False,
        meaning="Begin a new pool where the store of an earlier one is empty or gone. For one "
        "start: what the nodes still run for the earlier one is unclaimed then.",
    )
    history_max: int = _whole(
        1_000_000, 1_000, 100_000_000, "Events kept; the oldest are forgotten first."
    )
    grain_pct: int = _grain(10, "Smallest step of a share, percent of a GPU.")
    heartbeat_timeout_s: float = _seconds(
        10.0, 1.0, 3600.0, "Silence after which a node counts as unreachable."
    )
    report_interval_s: float = _seconds(
        5.0, 0.1, 600.0, "How often an agent reports when nothing changes."
    )
    reconnects_per_s: int = _whole(
        500,
        1,
        100_000,
        "Agents that come back each second after a restart: they spread themselves over the "
        "time that this takes, so that those that are back are served meanwhile.",
    )
    queue_max: int = _whole(10_000, 1, 1_000_000, "Requests that may wait; more are refused.")
    aging_s: float = _seconds(
        3600.0, 1.0, 30 * 86400.0, "Waiting this long is worth one step of priority."
    )
    ended_kept: int = _whole(10_000, 0, 1_000_000, "Ended leases remembered for retries.")
    prepare_attempts: int = _whole(
        3,
        1,
        100,
        "How often a member is tried that its node cannot prepare, or prepares and loses again.",
    )
    keeper: bool = _flag(
        default=True,
        meaning="Serve from a child process, and replace it at once when it crashes. Else "
        "the process that is started serves itself.",
    )
    nodes_max: int = _whole(20_000, 1, 100_000, "Agents connected at one time.")
    calls_max: int = _whole(50_000, 16, 1_000_000, "Calls in flight at one time.")
    inbox_max: int = _whole(
        100_000, 16, 10_000_000, "Commands that wait for the engine; more are refused."
    )
    shutdown_grace_s: float = _seconds(
        5.0, 0.0, 600.0, "How long calls in flight may take to end at a stop."
    )
    log_level: str = _choice(
        "info", ("debug", "info", "warning", "error"), "Least severe log line that is written."
    )
    log_format: str = _choice(
        "auto", ("auto", "json", "console"), "auto: console on a terminal, else JSON."
    )
    check_invariants: bool = _flag(
        default=False, meaning="Check every promise after every batch. Slow; for tests."
    )

    def for_pool(self) -> PoolSettings:
        """The part that the core needs."""
        return PoolSettings(
            grain_pct=self.grain_pct,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            report_interval_s=self.report_interval_s,
            queue_max=self.queue_max,
            aging_s=self.aging_s,
            ended_kept=self.ended_kept,
            prepare_attempts=self.prepare_attempts,
            reconnects_per_s=self.reconnects_per_s,
            version=__version__,
        )


FIELDS = {field.name: field for field in dataclasses.fields(AllocatorSettings)}


def load(
    file: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    flags: Mapping[str, str] | None = None,
) -> AllocatorSettings:
    """Settings from all sources, later ones winning; BadSettingError names the culprit."""
    values: dict[str, Any] = {}
    if file is not None:
        values |= _parsed(_read_toml(file), str(file))
    from_environment = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): text
        for name, text in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    values |= _parsed(from_environment, "environment")
    values |= _parsed(flags or {}, "flags")
    settings = AllocatorSettings(**values)
    _check_together(settings)
    return settings


def _read_toml(file: Path) -> dict[str, Raw]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadSettingError(
            "config", str(file), f"a readable TOML file ({error})", "flags"
        ) from (error)


def _parsed(raw_values: Mapping[str, Raw], source: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, raw in raw_values.items():
        field = FIELDS.get(key)
        if field is None:
            raise BadSettingError(key, raw, "the keys are " + ", ".join(FIELDS), source)
        try:
            values[key] = field.metadata["parse"](raw)
        except (TypeError, ValueError, KeyError) as error:
            raise BadSettingError(key, raw, field.metadata["accepted"], source) from error
    return values


def _check_together(settings: AllocatorSettings) -> None:
    # One lost report must not make a node unreachable.
    if settings.heartbeat_timeout_s < 2 * settings.report_interval_s:
        raise BadSettingError(
            "heartbeat_timeout_s",
            settings.heartbeat_timeout_s,
            f"at least twice report_interval_s ({settings.report_interval_s:g})",
            "settings",
        )
    for key in ("grpc_address", "http_address"):
        address: Address = getattr(settings, key)
        if not address.is_loopback and not settings.insecure:
            raise BadSettingError(
                key,
                str(address),
                "a loopback address, or insecure = true: nothing is encrypted yet",
                "settings",
            )
