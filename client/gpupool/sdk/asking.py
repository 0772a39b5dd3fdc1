"""From the words of a call ("gpus=0.1, memory='10GiB'") to a complete request."""

import os
import secrets
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TypedDict, TypeVar

from gpupool.errors import InvalidRequestError
from gpupool.model import limits
from gpupool.model.ids import RequestId
from gpupool.model.request import (
    GpuSlice,
    Group,
    LabelSelector,
    LeaseSpec,
    Level,
    OnFailure,
    TopologyConstraint,
    WholeGpus,
    WorkloadClass,
)
from gpupool.sdk.quantities import duration_s, memory_mib, whole_or_share
from gpupool.wire.errors import BadField
from gpupool.wire.lease import AcquireAsk, acquire_ask_from_proto, acquire_ask_to_proto

_Word = TypeVar("_Word", bound=StrEnum)


class Shape(TypedDict, total=False):
    """What is asked for. Every entry may be left out.

    gpus: whole GPUs of each replica, or a part of one below 1 (0.1 is 10 %).
    memory: GPU memory, MiB or "10GiB": of the slice, or at least of each GPU.
    models: accepted GPU models. replicas: members, 1 unless said.
    groups: several roles, instead of the entries above.
    cpu: cores of each replica. host_memory: MiB or "64GiB" of each replica.
    selectors: node labels, name to value or values; or LabelSelectors.
    level, preferred_level: required and preferred topology level for all members.
    spread: at most one member (or max_per_domain) in each such level.
    uid: user id that the work runs as, the caller's unless said.
    tenant, priority, name, labels, max_duration, disconnect, on_failure,
    workload_class, shared_trust, movable, isolated, spares, on_caller_node: see LeaseSpec.
    spec: a complete request, instead of everything above.
    """

    gpus: float
    memory: int | str
    models: Sequence[str]
    replicas: int
    groups: Sequence[Group]
    cpu: float
    host_memory: int | str
    selectors: Mapping[str, str | Sequence[str]] | Sequence[LabelSelector]
    level: Level | str
    preferred_level: Level | str
    spread: Level | str
    max_per_domain: int
    tenant: str
    uid: int
    priority: int
    name: str
    labels: Mapping[str, str]
    max_duration: float | str
    disconnect: float | str
    on_failure: OnFailure | str
    workload_class: WorkloadClass | str
    shared_trust: bool
    on_caller_node: bool
    movable: bool
    isolated: bool
    spares: int
    spec: LeaseSpec


class Ask(Shape, total=False):
    """A Shape, and how it is held.

    process: until this process ends, which the node's agent watches; so the agent knows
    what it runs on its GPUs, too. Needs the address of an agent's socket, and is the
    default there. ttl: seconds or "60s", renewed in the background; the default elsewhere.
    wait: longest time in the queue, seconds or "10m"; 0: none; left out: for ever.
    request_id: made unless given.
    """

    ttl: float | str
    process: bool
    wait: float | str | None
    request_id: str


_WHOLE_NUMBERS: dict[str, tuple[int, int]] = {
    "replicas": (1, limits.REPLICAS_MAX),
    "max_per_domain": (1, 1024),
    "uid": (0, limits.UID_MAX),
    "priority": (limits.PRIORITY_MIN, limits.PRIORITY_MAX),
    "spares": (0, limits.SPARES_MAX),
}

_CPU_MAX = limits.CPU_MILLI_MAX // 1000

_GROUP_WORDS = frozenset({"gpus", "memory", "models", "replicas", "cpu", "host_memory"})


def acquire_ask(ask: Ask, *, at_agent: bool = False) -> AcquireAsk:
    """The request of ``ask``. Raises InvalidRequestError, naming the field.

    ``at_agent``: it goes to an agent's socket.
    """
    wait = ask.get("wait")
    process = ask.get("process", at_agent and "ttl" not in ask)
    if process and "ttl" in ask:
        raise InvalidRequestError("ttl: a lease has a ttl or a process, not both", field="ttl")
    made = AcquireAsk(
        request_id=RequestId(ask.get("request_id") or f"sdk-{secrets.token_hex(12)}"),
        spec=lease_spec(ask),
        ttl_s=None if process else _ttl_s(ask),
        caller_process=process,
        wait_s=None if wait is None else duration_s(wait, "wait", 0.0, limits.WAIT_S_MAX),
    )
    return _through_the_door(made)


def lease_spec(shape: Shape) -> LeaseSpec:
    """The request of ``shape``. Raises InvalidRequestError, naming the field."""
    if "spec" in shape:
        others = sorted((set(shape) & set(Shape.__annotations__)) - {"spec"})
        if others:
            raise InvalidRequestError(
                f"{others[0]}: not accepted beside spec, which is complete", field=others[0]
            )
        return shape["spec"]
    _check_numbers(shape)
    spec = LeaseSpec(
        groups=_groups(shape),
        topology=_topology(shape),
        display_name=shape.get("name", ""),
        labels=dict(shape.get("labels", {})),
        tenant=shape.get("tenant", "default"),
        uid=shape.get("uid", os.getuid()),
        priority=shape.get("priority", 0),
        max_duration_s=_max_duration_s(shape),
        disconnect_s=duration_s(
            shape.get("disconnect", limits.DISCONNECT_S_DEFAULT),
            "disconnect",
            limits.DISCONNECT_S_MIN,
            limits.DISCONNECT_S_MAX,
        ),
        spares=shape.get("spares", 0),
        on_failure=_word(OnFailure, "on_failure", shape.get("on_failure")),
        isolated=shape.get("isolated", False),
        movable=shape.get("movable", False),
        workload_class=_word(WorkloadClass, "workload_class", shape.get("workload_class")),
        shared_trust=shape.get("shared_trust", False),
        on_caller_node=shape.get("on_caller_node", False),
    )
    return _through_the_door(AcquireAsk(request_id=RequestId("check"), spec=spec)).spec


def _check_numbers(shape: Shape) -> None:
    """Refuses by their own names numbers that the wire's fields could not even hold."""
    for field, (least, most) in _WHOLE_NUMBERS.items():
        value = shape.get(field, least)
        if not (isinstance(value, int) and least <= value <= most):
            raise _bad(field, value, f"{least}..{most}, whole numbers")
    for field in ("gpus", "cpu"):
        value = shape.get(field, 0)
        if not isinstance(value, (int, float)):
            raise _bad(field, value, "numbers")
    if not 0 <= shape.get("cpu", 0) <= _CPU_MAX:
        raise _bad("cpu", shape.get("cpu"), f"0..{_CPU_MAX}")
    for field in ("memory", "host_memory"):
        value = shape.get(field, 0)
        if not isinstance(value, (int, str)):
            raise _bad(field, value, 'sizes as "10GiB", "512MiB" or whole MiB')


def _bad(field: str, value: object, accepted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {value!r} is not in {accepted}", field=field)


def _ttl_s(ask: Ask) -> float:
    ttl = ask.get("ttl", limits.TTL_S_DEFAULT)
    return duration_s(ttl, "ttl", limits.TTL_S_MIN, limits.TTL_S_MAX)


def _max_duration_s(shape: Shape) -> float | None:
    if "max_duration" not in shape:
        return None
    least, most = limits.MAX_DURATION_S_MIN, limits.MAX_DURATION_S_MAX
    return duration_s(shape["max_duration"], "max_duration", least, most)


def _groups(shape: Shape) -> tuple[Group, ...]:
    if "groups" not in shape:
        return (_group(shape),)
    others = sorted(set(shape) & _GROUP_WORDS)
    if others:
        raise InvalidRequestError(f"{others[0]}: not accepted beside groups", field=others[0])
    return tuple(shape["groups"])


def _group(shape: Shape) -> Group:
    return Group(
        replicas=shape.get("replicas", 1),
        accelerator=_accelerator(shape),
        models=tuple(shape.get("models", ())),
        node_selectors=_selectors(shape.get("selectors", ())),
        cpu_milli=round(shape.get("cpu", 0) * 1000),
        host_memory_mib=memory_mib(
            shape.get("host_memory", 0), "host_memory", limits.HOST_MEMORY_MIB_MAX
        ),
    )


def _accelerator(shape: Shape) -> WholeGpus | GpuSlice | None:
    mib = memory_mib(shape.get("memory", 0), "memory", limits.GPU_MEMORY_MIB_MAX)
    if "gpus" not in shape:
        # Memory alone is a slice that reserves no compute.
        return GpuSlice(memory_mib=mib) if mib else None
    whole, share_pct = whole_or_share(shape["gpus"])
    if whole:
        return WholeGpus(count=whole, min_memory_mib=mib)
    if share_pct or mib:
        return GpuSlice(share_pct=share_pct, memory_mib=mib)
    if not (shape.get("cpu") or shape.get("host_memory")):
        raise _bad("gpus", shape["gpus"], "numbers above 0 where nothing else is asked for")
    return None


def _selectors(
    selectors: Mapping[str, str | Sequence[str]] | Sequence[LabelSelector],
) -> tuple[LabelSelector, ...]:
    if not isinstance(selectors, Mapping):
        return tuple(selectors)
    return tuple(
        LabelSelector(key=key, values=(values,) if isinstance(values, str) else tuple(values))
        for key, values in selectors.items()
    )


def _topology(shape: Shape) -> TopologyConstraint:
    return TopologyConstraint(
        required=_word(Level, "level", shape.get("level")),
        preferred=_word(Level, "preferred_level", shape.get("preferred_level")),
        spread=_word(Level, "spread", shape.get("spread")),
        max_per_domain=shape.get("max_per_domain", 1),
    )


def _word(words: type[_Word], field: str, value: str | None) -> _Word | None:
    if value is None:
        return None
    try:
        return words(value)
    except ValueError:
        accepted = ", ".join(words)
        raise InvalidRequestError(f"{field}: {value!r} is not in {accepted}", field=field) from None


def _through_the_door(ask: AcquireAsk) -> AcquireAsk:
    """What the pool would read, so that bad input is refused before it is sent."""
    try:
        return acquire_ask_from_proto(acquire_ask_to_proto(ask))
    except BadField as bad:
        raise InvalidRequestError(str(bad), field=bad.field) from bad
    except (TypeError, ValueError, OverflowError) as error:
        # Numbers that no field of the wire can hold.
        raise InvalidRequestError(f"spec: {error}", field="spec") from error
