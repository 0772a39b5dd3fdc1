"""What a request may ask for: a closed list of actions, each argument checked. Pure.

``read_action`` takes what a peer sent and gives an action that is safe to look into, or
refuses it. What only the machine knows (whether the driver lists that GPU, whether that
process is the one meant) is checked where the action is carried out.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from gpupool_agent.helper.cdi import SLOT, Mountable, checked_spec
from gpupool_agent.helper.refusal import RefusedError, is_list, is_table, refuse, shown

UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
LEASE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", re.ASCII)
VALUE = re.compile(r"[ -~]{0,1024}", re.ASCII)
MODES = ("default", "exclusive_process", "prohibited")
SIGNALS = (9, 15)

PID_MAX = 2**22
"""Highest pid of Linux, proc(5)."""

TICKS_MAX = 2**63 - 1
UID_MAX = 2**32 - 2
PROBE_DEADLINE_S_MAX = 60.0
LINES_MAX = 64
VARIABLES_MAX = 16

ENVIRONMENT = frozenset(
    {
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_DEVICE_ORDER",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "CUDA_MPS_CLIENT_PRIORITY",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_MPS_SM_PARTITION",
        "CUDA_VISIBLE_DEVICES",
        "GPUPOOL_LEASE_ID",
    }
)
"""Names that a probe may be given. Nothing that changes how a program is loaded."""

_PID = r"[1-9][0-9]{0,6}"
_PERCENT = r"(100|[1-9][0-9]?)(\.0)?"
_DEVICE = r"([0-9]{1,2}|GPU-[0-9a-f-]{36})"
_MEMORY = r"[1-9][0-9]{0,7}[MG]"
COMMANDS = tuple(
    re.compile(text, re.ASCII)
    for text in (
        r"get_server_list",
        rf"get_server_status {_PID}",
        r"start_server -uid (?P<uid>[0-9]{1,10})",
        rf"shutdown_server {_PID}( -f)?",
        rf"get_client_list {_PID}",
        rf"get_device_client_list( {_PID})?",
        rf"ps( -p {_PID})?",
        rf"device_query( {_PID})?( --csv)?",
        rf"set_default_active_thread_percentage {_PERCENT}",
        r"get_default_active_thread_percentage",
        rf"set_active_thread_percentage {_PID} {_PERCENT}",
        rf"get_active_thread_percentage {_PID}",
        rf"set_default_device_pinned_mem_limit {_DEVICE} {_MEMORY}",
        rf"get_default_device_pinned_mem_limit {_DEVICE}",
        rf"set_device_pinned_mem_limit {_PID} {_DEVICE} {_MEMORY}",
        rf"get_device_pinned_mem_limit {_PID} {_DEVICE}",
        r"set_default_client_priority [01]",
        r"get_default_client_priority",
        rf"terminate_client {_PID} {_PID}",
        r"quit( -t [0-9]{1,2})?",
    )
)
"""Commands of protocol 2 that may be given to a daemon; a line is one of them, whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the operator permits; see HelperSettings."""

    uid_min: int
    uid_max: int
    allow_root: bool
    mountable: Mountable


@dataclass(frozen=True, slots=True, kw_only=True)
class SetComputeMode:
    """Set a GPU's compute mode."""

    gpu: str
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMps:
    """Start the daemon of a slot."""

    slot: str
    gpu: str
    uid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsDaemon:
    """Find the daemon of a slot."""

    slot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMps:
    """End the daemon of a slot, and remove what it has."""

    slot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MpsCommands:
    """Give commands to the daemon of a slot."""

    slot: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Run the probe program as a user."""

    slot: str
    uid: int
    environment: Mapping[str, str]
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndProcess:
    """Signal a process on a GPU."""

    gpu: str
    pid: int
    start_ticks: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOf:
    """Read the lease id of a process on a GPU."""

    gpu: str
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCdi:
    """Write a lease's CDI spec."""

    lease_id: str
    spec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveCdi:
    """Remove a lease's CDI spec."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CdiLeases:
    """List the leases that have a CDI spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetGpu:
    """Reset a GPU."""

    gpu: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RescanPci:
    """Have the kernel look for devices."""


Action = (
    SetComputeMode
    | StartMps
    | MpsDaemon
    | StopMps
    | MpsCommands
    | Probe
    | EndProcess
    | LeaseOf
    | WriteCdi
    | RemoveCdi
    | CdiLeases
    | ResetGpu
    | RescanPci
)


def read_action(message: Mapping[str, Any], policy: Policy) -> Action:
    """The action that a message asks for; RefusedError where it is not one of the list."""
    name = message.get("action")
    kind = ACTIONS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise RefusedError(f"action: {shown(name)} is not one of {', '.join(ACTIONS)}")
    number = message.get("id")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= 2**53:
        raise RefusedError("id: it must be a whole number in 0..2^53")
    wanted = [each.name for each in fields(kind)]
    given = set(message) - {"id", "action"}
    if given != set(wanted):
        raise RefusedError(f"{name}: it has the fields {', '.join(wanted) or 'none'}, no others")
    values = {field: FIELDS[field](message[field], policy) for field in wanted}
    return cast("Action", kind(**values))


def _matching(field: str, pattern: re.Pattern[str], meaning: str) -> Callable[[Any, Policy], str]:
    def check(value: Any, _policy: Policy) -> str:
        if not isinstance(value, str) or pattern.fullmatch(value) is None:
            refuse(field, value, meaning)
        return value

    return check


def _number(field: str, low: int, high: int) -> Callable[[Any, Policy], int]:
    def check(value: Any, _policy: Policy) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            refuse(field, value, f"a whole number in {low}..{high}")
        return value

    return check


def _one_of(field: str, accepted: tuple[Any, ...]) -> Callable[[Any, Policy], Any]:
    def check(value: Any, _policy: Policy) -> Any:
        # True == 1 in Python, so the type counts too.
        if not any(type(value) is type(each) and value == each for each in accepted):
            refuse(field, value, f"one of {', '.join(map(str, accepted))}")
        return value

    return check


def _uid(value: Any, policy: Policy) -> int:
    uid = _number("uid", 0, UID_MAX)(value, policy)
    if uid == 0 and not policy.allow_root:
        refuse("uid", uid, "a user other than root (allow_root is false)")
    if uid != 0 and not policy.uid_min <= uid <= policy.uid_max:
        refuse("uid", uid, f"in {policy.uid_min}..{policy.uid_max} (uid_min, uid_max)")
    return uid


def _lines(value: Any, policy: Policy) -> tuple[str, ...]:
    if not is_list(value) or not 1 <= len(value) <= LINES_MAX:
        refuse("lines", value, f"a list of 1..{LINES_MAX} commands")
    for line in value:
        found = (
            next(filter(None, (each.fullmatch(line) for each in COMMANDS)), None)
            if isinstance(line, str)
            else None
        )
        if found is None:
            refuse("lines", line, "a command of the closed list")
        elif "uid" in found.groupdict():
            _uid(int(found["uid"]), policy)
    return tuple(value)


def _environment(value: Any, _policy: Policy) -> dict[str, str]:
    if not is_table(value) or len(value) > VARIABLES_MAX:
        refuse("environment", value, f"an object of at most {VARIABLES_MAX} variables")
    for name, text in value.items():
        if name not in ENVIRONMENT:
            refuse("environment", name, f"one of {', '.join(sorted(ENVIRONMENT))}")
        if not isinstance(text, str) or VALUE.fullmatch(text) is None:
            refuse(f"environment.{name}", text, "at most 1024 printable ASCII characters")
    return value


def _deadline_s(value: Any, _policy: Policy) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0.1 <= value <= PROBE_DEADLINE_S_MAX:
        refuse("deadline_s", value, f"seconds in 0.1..{PROBE_DEADLINE_S_MAX:g}")
    return float(value)


def _spec(value: Any, policy: Policy) -> str:
    if not isinstance(value, str):
        refuse("spec", value, "a text")
    return checked_spec(value, policy.mountable)


FIELDS: Mapping[str, Callable[[Any, Policy], Any]] = {
    "gpu": _matching("gpu", UUID, "a GPU's or MIG instance's UUID"),
    "slot": _matching("slot", SLOT, "8 lower case hex digits"),
    "lease_id": _matching("lease_id", LEASE_ID, "1..128 letters, digits, '-' and '_'"),
    "mode": _one_of("mode", MODES),
    "number": _one_of("number", SIGNALS),
    "pid": _number("pid", 2, PID_MAX),
    "start_ticks": _number("start_ticks", 0, TICKS_MAX),
    "uid": _uid,
    "lines": _lines,
    "environment": _environment,
    "deadline_s": _deadline_s,
    "spec": _spec,
}
"""How each field is checked, by its name: it means the same in every action."""

ACTIONS: Mapping[str, type[Any]] = {
    "set_compute_mode": SetComputeMode,
    "start_mps": StartMps,
    "mps_daemon": MpsDaemon,
    "stop_mps": StopMps,
    "mps_commands": MpsCommands,
    "probe": Probe,
    "end_process": EndProcess,
    "lease_of": LeaseOf,
    "write_cdi": WriteCdi,
    "remove_cdi": RemoveCdi,
    "cdi_leases": CdiLeases,
    "reset_gpu": ResetGpu,
    "rescan_pci": RescanPci,
}
"""The closed list, by name."""
