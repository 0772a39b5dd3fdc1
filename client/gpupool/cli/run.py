"""gpupool run: a command under a lease of its own."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import click

from gpupool.cli.child import NOT_EXECUTABLE, NOT_FOUND, Child, signals_end_us, signals_kept
from gpupool.cli.container import ENGINES, Container, container_command, find_engine
from gpupool.cli.session import Session, takes_address
from gpupool.cli.shape import shape_of, takes_shape
from gpupool.cli.words import asked_gpus, few, nodes_of
from gpupool.model.lease import ENDED, LeaseState

if TYPE_CHECKING:
    from gpupool.client import Lease as HeldLease
    from gpupool.errors import GpupoolError
    from gpupool.model.lease import Lease
    from gpupool.sdk.asking import Ask


@click.command(
    short_help="Runs a command under a lease of its own.",
    epilog="""\b
Examples:
  gpupool run --gpus 0.1 -- python serve.py
  gpupool run --gpus 2 --memory 40GiB --wait 30s -- torchrun train.py
  gpupool run --gpus 1 --model "NVIDIA H100 80GB HBM3" -- bash
  gpupool run --gpus 0.2 --container pytorch/pytorch -- python serve.py
  gpupool run --gpus 1 --container pytorch/pytorch --print""",
)
@takes_shape
@click.option(
    "--container",
    "image",
    default="",
    metavar="IMAGE",
    help="Run COMMAND, or what the image says, in a container of this image.",
)
@click.option(
    "--engine", default="", metavar="NAME", help="Container engine.  [default: podman, docker]"
)
@click.option(
    "--container-arg",
    "container_arguments",
    multiple=True,
    type=click.UNPROCESSED,
    metavar="ARG",
    help="One more argument for the engine, as --container-arg=--volume=/data:/data.",
)
@click.option(
    "--print",
    "print_only",
    is_flag=True,
    help="Print the engine's command, and hold the lease until interrupted.",
)
@click.option(
    "--wait", metavar="TIME", help='Longest wait in the queue, "30s", 0: none.  [default: for ever]'
)
@click.option(
    "--ttl",
    metavar="TIME",
    help="Hold by renewals instead of by this process.  [default: 60s, only over TCP]",
)
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
@takes_address
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.pass_obj
def run(
    session: Session,
    /,
    command: tuple[str, ...],
    wait: str | None,
    ttl: str | None,
    quiet: bool,
    image: str,
    engine: str,
    container_arguments: tuple[str, ...],
    print_only: bool,
    **options: Any,
) -> int:
    """Runs COMMAND with a lease's environment and ends the lease with it.

    Waits until the GPUs are granted, and says on standard error where it stands in
    the queue. Signals are passed on to COMMAND and its exit code is given back,
    128+n where signal n ended it. However this command ends, the lease ends too: by
    kill -9 also, where it was reached through the agent's socket of this node, which
    watches the process; else after its ttl.

    COMMAND runs here: through the agent's socket its GPUs are this node's. Members of
    a lease of several replicas on other nodes are not started: see "gpupool lease
    hostfile".

    With --container the command runs in a container that has the lease's GPUs by the
    CDI specs of the node (gpupool.io/lease) and of the driver (nvidia.com/gpu), its
    environment and, for parts of a GPU, the way to its MPS daemon.
    """
    container = _container(command, image, engine, container_arguments, print_only=print_only)
    ask = cast("Ask", shape_of(options))
    if wait is not None:
        ask["wait"] = wait
    narrator = Narrator(quiet=quiet)
    with signals_kept():
        client = session.client(on_outage=narrator.tell_outage)
    from gpupool.sdk.channel import is_agent_socket

    if ttl is not None:
        ask["ttl"] = ttl
    if is_agent_socket(client.address) and ask.get("replicas", 1) == 1:
        ask["on_caller_node"] = True
    with client, signals_end_us(), client.lease(on_change=narrator.tell, **ask) as lease:
        narrator.tell_members_elsewhere(lease)
        words = container_command(container, command, lease.env) if container else command
        if print_only:
            return _hold(lease, words, narrator)
        return _under_lease(lease, words, narrator)


def _container(
    command: tuple[str, ...],
    image: str,
    engine: str,
    arguments: tuple[str, ...],
    *,
    print_only: bool,
) -> Container | None:
    """What to run in a container; None: no container. Raises UsageError."""
    if image:
        # Only printed, it may be for another host's engine.
        found = engine or ENGINES[0] if print_only else find_engine(engine)
        return Container(engine=found, image=image, arguments=arguments)
    for given, name in (
        (engine, "--engine"),
        (arguments, "--container-arg"),
        (print_only, "--print"),
    ):
        if given:
            raise click.UsageError(f"{name} needs --container")
    if not command:
        raise click.UsageError("Missing argument '-- COMMAND...'.")
    return None


def _hold(lease: HeldLease, words: Sequence[str], narrator: Narrator) -> int:
    """Prints the command and waits until the lease ends or a signal ends us."""
    ended = Ending()
    narrator.child = ended
    click.echo(shlex.join(words))
    if not lease.lost:  # it ended before there was somebody to tell
        ended.wait()
    narrator.child = None
    return 0


def _under_lease(lease: HeldLease, command: Sequence[str], narrator: Narrator) -> int:
    with signals_kept():
        try:
            child = Child(command, os.environ | lease.env)
        except OSError as error:
            click.echo(f"gpupool: {command[0]}: {error.strerror}", err=True)
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        narrator.child = child
        if lease.lost:  # it ended before there was somebody to tell
            child.send(signal.SIGTERM)
        try:
            return child.wait()
        finally:
            narrator.child = None  # what ends now, ends by our own will


class Ending:
    """What stands for a command where there is none: whoever holds the lease by hand."""

    def __init__(self) -> None:
        self._told = threading.Event()

    def send(self, _number: int) -> None:
        """Ends the wait."""
        self._told.set()

    def wait(self) -> None:
        """Waits until the lease has ended."""
        self._told.wait()


class Narrator:
    """Says on standard error what becomes of the lease; ends the command when it ends."""

    def __init__(self, *, quiet: bool) -> None:
        self.child: Child | Ending | None = None
        self._quiet = quiet
        self._said = ""

    def tell(self, lease: Lease) -> None:
        """Called with each state of the lease, on the client's thread."""
        match lease.state:
            case LeaseState.PENDING:
                reason = lease.explanation.summary or "no reason given"
                self._say(f"waiting, position {lease.position}: {reason}")
            case LeaseState.ACTIVE if lease.degraded:
                self._say(f"lease {lease.lease_id} is degraded: {lease.degraded}")
            case LeaseState.ACTIVE:
                place = few(nodes_of(lease)) or "no node"
                self._say(f"lease {lease.lease_id}: GPUs {asked_gpus(lease)} on {place}")
            case state if state in ENDED and state is not LeaseState.RELEASED:
                self._end(lease)
            case LeaseState.RELEASING | LeaseState.RELEASED:
                self._end(lease)
            case _:
                pass  # granted: the nodes prepare, which takes a moment

    def tell_outage(self, error: GpupoolError, patience_s: float) -> None:
        """Says what is waited for while the pool cannot be reached."""
        self._say(f"{error.message}; tried again for {patience_s:g} s, Ctrl-C ends that")

    def tell_members_elsewhere(self, lease: HeldLease) -> None:
        """Points at the other members, which nobody starts, and at GPUs of another host."""
        from gpupool.sdk.members import member_here

        process, member = lease.current.process, member_here(lease.current)
        if process and member and member.place.node_id != process.node_id:
            self._say(f"its GPUs are on {member.place.node_id}, not on this host")
        others = len(lease.members) - 1
        if others > 0:
            self._say(
                f"{others} more member{'s are' if others > 1 else ' is'} not started: "
                f"see gpupool lease hostfile {lease.id}"
            )

    def _end(self, lease: Lease) -> None:
        if self.child is None:
            return  # by ourselves, or said by the error that follows
        why = lease.explanation.summary
        self._say(f"lease {lease.lease_id} is {lease.state}" + (f": {why}" if why else ""))
        self.child.send(signal.SIGTERM)

    def _say(self, line: str) -> None:
        if line != self._said and not self._quiet:
            self._said = line
            click.echo(f"gpupool: {line}", err=True)
