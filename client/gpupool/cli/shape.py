"""The options that say what is asked for, shared by run, lease create and explain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpupool.cli.spec_file import spec_from_file
from gpupool.model.request import LabelSelector, Level, OnFailure, WorkloadClass

if TYPE_CHECKING:
    from gpupool.sdk.asking import Shape

_Command = TypeVar("_Command", bound=Callable[..., Any])

_LEVELS = click.Choice([str(level) for level in Level])

OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--gpus", type=float, help="Whole GPUs of each replica, or a part of one: 0.1."),
    click.option(
        "--memory", metavar="SIZE", help='GPU memory, as "10GiB": of the part, or of each GPU.'
    ),
    click.option("--model", "models", multiple=True, help="Accepted GPU model; may be repeated."),
    click.option("--replicas", type=int, help="Members of this shape.  [default: 1]"),
    click.option("--cpu", type=float, help="CPU cores of each replica."),
    click.option("--host-memory", metavar="SIZE", help="Host memory of each replica."),
    click.option(
        "--select",
        "selectors",
        multiple=True,
        metavar="LABEL[=V1,V2]",
        help="Only nodes with this label (and value); with ! before it, only others. "
        "May be repeated; all must hold.",
    ),
    click.option(
        "--level",
        type=_LEVELS,
        help="All members inside one of these, or no grant. This release: node or fabric.",
    ),
    click.option(
        "--prefer-level",
        "preferred_level",
        type=_LEVELS,
        help="The same if possible. This release: node or fabric.",
    ),
    click.option("--spread", type=_LEVELS, help="One member (--max-per-domain) in each of these."),
    click.option("--max-per-domain", type=int, help="Members in each --spread level."),
    click.option("--tenant", help="Who is charged.  [default: default]"),
    click.option("--uid", type=int, help="User id that the work runs as.  [default: your own]"),
    click.option("--priority", type=int, help="-1000..1000; higher goes first.  [default: 0]"),
    click.option("--name", help="Free text for people."),
    click.option(
        "--label", "labels", multiple=True, metavar="NAME=VALUE", help="For people; repeatable."
    ),
    click.option("--max-duration", metavar="TIME", help='Longest run, as "2h"; it ends then.'),
    click.option(
        "--disconnect",
        metavar="TIME",
        help="How long a node goes on without an allocator.  [default: 1d]",
    ),
    click.option(
        "--on-failure",
        type=click.Choice([str(word) for word in OnFailure]),
        help="What happens when a member is lost. This release: stop or wait.",
    ),
    click.option(
        "--class",
        "workload_class",
        type=click.Choice([str(word) for word in WorkloadClass]),
        help="What the work is like. Not in this release.",
    ),
    click.option(
        "--shared-trust",
        is_flag=True,
        default=None,
        help="Parts of a GPU may share an MPS server with other users'. Not in this release.",
    ),
    click.option(
        "--spec",
        "spec_file",
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
        help="A LeaseSpec in JSON or YAML, for several groups; instead of all the above. See "
        '"gpupool help spec-file".',
    ),
)


def takes_shape(command: _Command) -> _Command:
    """Adds the options; the command takes them as ``**shape``."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def shape_of(options: dict[str, Any]) -> Shape:
    """The words of the SDK for the options given. Raises InvalidRequestError."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    spec_file = given.pop("spec_file", None)
    if spec_file is not None:
        if given:
            option = next(iter(given)).replace("_", "-")
            raise click.UsageError(f"--{option} is not accepted beside --spec, which is complete")
        return {"spec": spec_from_file(spec_file)}
    if not given.keys() & {"gpus", "memory", "cpu", "host_memory"}:
        raise click.UsageError("say what is needed: --gpus, --memory, --cpu or --spec")
    if "selectors" in given:
        given["selectors"] = [_selector(text) for text in given["selectors"]]
    if "labels" in given:
        given["labels"] = dict(_pair("--label", text) for text in given["labels"])
    shape: Shape = {}
    shape.update(given)  # type: ignore[typeddict-item] # the options bear the SDK's names
    return shape


def _selector(text: str) -> LabelSelector:
    exclude = text.startswith("!")
    key, _, values = text.removeprefix("!").partition("=")
    return LabelSelector(
        key=key, values=tuple(values.split(",")) if values else (), exclude=exclude
    )


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"{option}: {text!r} is not in NAME=VALUE")
    return name, value
