"""gpupool lease: create, list, show, release, adopt, watch, env, hostfile."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import click

from gpupool.cli.named import check_node
from gpupool.cli.output import Column, Listing, printable, table, takes_output
from gpupool.cli.session import Session, takes_address
from gpupool.cli.shape import shape_of, takes_shape
from gpupool.cli.words import (
    ago,
    asked_gpus,
    cause_line,
    devices_of,
    few,
    given_of,
    nodes_of,
    state_of,
    utc,
)
from gpupool.model.lease import ENDED, Lease, LeaseState, Member

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpupool.sdk.asking import Ask

STATES = click.Choice([str(state) for state in LeaseState])


def _to_proto(lease: Lease) -> Message:
    from gpupool.wire.resources import lease_to_proto

    return lease_to_proto(lease)


LEASES: Listing[Lease] = Listing(
    columns=(
        Column("LEASE", lambda lease: lease.lease_id),
        Column("STATE", state_of),
        Column("GPUS", asked_gpus, right=True),
        Column("NODES", lambda lease: few(nodes_of(lease))),
        Column("TENANT", lambda lease: lease.spec.tenant),
        Column("PRIORITY", lambda lease: lease.spec.priority, right=True),
        Column("AGE", lambda lease: ago(lease.create_unix_s), right=True),
        Column("NAME", lambda lease: lease.spec.display_name),
    ),
    to_proto=_to_proto,
)

MEMBERS: tuple[Column[Member], ...] = (
    Column("RANK", lambda member: member.rank, right=True),
    Column("GROUP", lambda member: member.group),
    Column("STATE", lambda member: member.state),
    Column("NODE", lambda member: member.place.node_id),
    Column("DEVICES", devices_of),
    Column("GIVEN", given_of),
)


def _lines(form: Callable[[str, str], str]) -> Callable[[dict[str, str]], str]:
    return lambda variables: "\n".join(form(*variable) for variable in variables.items())


# Slurm and env files take a value as it stands, to the end of its line.
ENVIRONMENTS: dict[str, Callable[[dict[str, str]], str]] = {
    "shell": _lines(lambda name, value: f"export {name}={shlex.quote(value)}"),
    "json": lambda variables: json.dumps(variables, indent=2),
    "env": _lines(lambda name, value: f"{name}={value}"),
    "slurm": _lines(lambda name, value: f"export {name}={value}"),
}
"""A member's environment, as its reader takes it."""


@click.group()
def lease() -> None:
    """Leases: what a holder has of the pool."""


@lease.command(
    epilog="""\b
Examples:
  gpupool lease create --gpus 8 --level node --ttl 2h
  gpupool lease create --gpus 4 --replicas 4 --model GB200 --wait 10m
  gpupool lease create --spec gang.yaml -o json""",
)
@takes_shape
@click.option(
    "--wait", metavar="TIME", help='Longest wait in the queue, "30s", 0: none.  [default: for ever]'
)
@click.option(
    "--ttl", metavar="TIME", default="1h", show_default=True, help="It ends then: 1s..7d."
)
@takes_output
@takes_address
@click.pass_obj
def create(session: Session, /, wait: str | None, ttl: str, output: str, **options: Any) -> None:
    """Takes a lease and leaves it held until it is released or its ttl ends.

    Nothing renews it: for a lease that lives with a program, use "gpupool run" or
    the Python client.
    """
    ask = cast("Ask", shape_of(options))
    ask["ttl"] = ttl
    if wait is not None:
        ask["wait"] = wait
    with session.client() as client:
        held = client.acquire(on_change=_tell_wait, **ask).current
    if output == "table":
        LEASES.show([held], output)
    else:
        LEASES.show_one(held, output)


@lease.command(
    name="list",
    epilog="""\b
Examples:
  gpupool lease list
  gpupool lease list --state pending --tenant lab -o json""",
)
@click.option("--state", "states", multiple=True, type=STATES, help="Only these; repeatable.")
@click.option("--tenant", default="", help="Only this tenant's.")
@click.option("--node", "node_id", default="", help="Only with a member on this node.")
@takes_output
@takes_address
@click.pass_obj
def list_leases(
    session: Session, states: tuple[str, ...], tenant: str, node_id: str, output: str
) -> None:
    """Lists leases: those that have not ended, unless --state says others."""
    wanted = [LeaseState(state) for state in states]
    with session.client() as client:
        found = list(client.list_leases(states=wanted, tenant=tenant, node_id=node_id))
        if node_id and not found:
            check_node(client, node_id)
    LEASES.show(found, output)


@lease.command(epilog="\b\nExample:\n  gpupool lease show LEASE -o yaml")
@click.argument("lease_id", metavar="LEASE")
@takes_output
@takes_address
@click.pass_obj
def show(session: Session, lease_id: str, output: str) -> None:
    """Shows one lease with its members, and why it waits or ended."""
    with session.client() as client:
        found = client.get_lease(lease_id)
    if output != "table":
        LEASES.show_one(found, output)
        return
    for name, value in _facts(found):
        click.echo(f"{name + ':':<13}{printable(value)}")
    if found.members:
        click.echo("\n" + table(MEMBERS, found.members))


@lease.command(epilog="\b\nExample:\n  gpupool lease release LEASE --reason 'done early'")
@click.argument("lease_ids", metavar="LEASE...", nargs=-1, required=True)
@click.option("--reason", default="", help="For the history.")
@takes_address
@click.pass_obj
def release(session: Session, lease_ids: tuple[str, ...], reason: str) -> None:
    """Ends leases. Ending an ended one is no error."""
    with session.client() as client:
        for lease_id in lease_ids:
            click.echo(f"{lease_id} {client.release(lease_id, reason).state}")


@lease.command(epilog="\b\nExample:\n  gpupool lease adopt LEASE --pid 4711")
@click.argument("lease_id", metavar="LEASE")
@click.option(
    "--pid", "pids", type=int, multiple=True, required=True, help="Process id; repeatable."
)
@takes_address
@click.pass_obj
def adopt(session: Session, lease_id: str, pids: tuple[int, ...]) -> None:
    """Takes processes that run on this host into a lease.

    For what was started without the lease's environment, as by a notebook server. A
    process must be on a GPU that the lease has on this host. From then on it counts to
    the lease and is ended with it. Process and lease must be yours, unless you are root.
    """
    with session.client() as client:
        for pid in pids:
            adopted = client.adopt(lease_id, pid)
            what = f"process {pid} ({printable(adopted.command)})"
            click.echo(f"{what} on {', '.join(adopted.device_uuids)} is of {lease_id} now")


@lease.command(epilog="\b\nExample:\n  gpupool lease watch LEASE -o json")
@click.argument("lease_id", metavar="LEASE")
@takes_output
@takes_address
@click.pass_obj
def watch(session: Session, lease_id: str, output: str) -> None:
    """Shows each state of a lease until it has ended; JSON is one line for each."""
    with session.client() as client:
        for state in client.watch_lease(lease_id):
            LEASES.show_next(state, output)


@lease.command(
    epilog="""\b
Examples:
  eval "$(gpupool lease env LEASE)"
  gpupool lease env LEASE -o json
  gpupool lease env LEASE -o slurm   # in a TaskProlog
  gpupool lease env LEASE -o env > lease.env && podman run --env-file lease.env IMAGE""",
)
@click.argument("lease_id", metavar="LEASE")
@click.option(
    "-o",
    "--output",
    type=click.Choice(list(ENVIRONMENTS)),
    default="shell",
    show_default=True,
    help="For a shell, for programs (notebooks), as lines of name=value, for Slurm's TaskProlog.",
)
@click.option("--rank", type=int, help="Of this member.  [default: the one on this host, else 0]")
@takes_address
@click.pass_obj
def env(session: Session, lease_id: str, rank: int | None, output: str) -> None:
    """Prints a member's environment, as export lines for a shell unless asked otherwise."""
    from gpupool.errors import NotFoundError
    from gpupool.sdk.members import environment_of, member_here

    with session.client() as client:
        found = client.get_lease(lease_id)
    member = member_here(found)
    if rank is not None:
        member = next((member for member in found.members if member.rank == rank), None)
        if member is None:
            last = len(found.members) - 1
            raise NotFoundError(f"rank: {rank} is not in 0..{last}", field="rank")
    click.echo(ENVIRONMENTS[output](dict(sorted(environment_of(found, member).items()))))


@lease.command(epilog="\b\nExample:\n  mpirun --hostfile <(gpupool lease hostfile LEASE) ./train")
@click.argument("lease_id", metavar="LEASE")
@takes_address
@click.pass_obj
def hostfile(session: Session, lease_id: str) -> None:
    """Prints "node slots=N" for each node, in the order of ranks.

    N counts a slot for each GPU, or each member where members have parts or none.
    """
    with session.client() as client:
        found = client.get_lease(lease_id)
    slots: dict[str, int] = {}
    for member in found.members:
        whole = sum(share.whole for share in member.place.devices)
        node_id = member.place.node_id
        slots[node_id] = slots.get(node_id, 0) + max(1, whole)
    for node, count in slots.items():
        click.echo(f"{node} slots={count}")


def _facts(found: Lease) -> Iterable[tuple[str, object]]:
    yield "lease", found.lease_id
    yield "state", state_of(found)
    if found.degraded:
        yield "degraded", found.degraded
    yield "name", found.spec.display_name
    yield "gpus", asked_gpus(found)
    yield "tenant", found.spec.tenant
    yield "user", found.caller.user or found.caller.uid
    yield "priority", found.spec.priority
    yield "created", utc(found.create_unix_s)
    if found.end_unix_s is not None:
        yield "ended" if found.state in ENDED else "ends", utc(found.end_unix_s)
    if found.expire_unix_s is not None:
        yield "expires", f"{utc(found.expire_unix_s)} unless it is renewed"
    if found.process is not None:
        yield "held by", f"process {found.process.pid} on {found.process.node_id}"
    else:
        yield "held by", f"renewals within {found.ttl_s:g} s" if found.ttl_s else "nobody"
    if found.position:
        yield "position", found.position
    if found.explanation.summary:
        yield "why", found.explanation.summary
    for cause in found.explanation.causes:
        yield "", cause_line(cause)
    if found.explanation.nearest_change:
        yield "would help", found.explanation.nearest_change


def _tell_wait(found: Lease) -> None:
    if found.state is LeaseState.PENDING:
        reason = found.explanation.summary or "no reason given"
        click.echo(f"gpupool: waiting, position {found.position}: {reason}", err=True)
