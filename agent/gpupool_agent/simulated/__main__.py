"""Run a fleet of simulated hosts with real agents.

python -m gpupool_agent.simulated --allocator 127.0.0.1:7070 --node dgx-h100:h100-01
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import structlog

from gpupool_agent.settings import AgentSettings, SettingsError, load_settings
from gpupool_agent.signals import stop_on_signals
from gpupool_agent.simulated.directory import (
    ControlDirectory,
    ControlPathError,
    DirectoryTakenError,
)
from gpupool_agent.simulated.fleet import Fleet
from gpupool_agent.simulated.host import make_hosts
from gpupool_agent.simulated.machine import machine_names
from gpupool_agent.simulated.nvml_library import install
from gpupool_agent.simulated.specs import (
    NodeSpec,
    SpecError,
    checked,
    parse_count,
    parse_node,
    read_nodes_csv,
)

_SETTINGS = {
    "inventory_period_s": "S",
    "usage_period_s": "S",
    "telemetry_period_s": "S",
    "strays": "WORD",
}
"""Settings of the agents that can be given, with what stands for their value."""


def main(argv: list[str] | None = None) -> int:
    """Run until SIGINT or SIGTERM; exit code 0, or 1 when an agent failed."""
    arguments = _parser().parse_args(argv)
    _log_to_stderr(verbose=arguments.verbose)
    _allow_many_files()
    install()
    try:
        specs, settings = _specs(arguments), _settings(arguments)
        with _directory(arguments.control) as directory:
            return asyncio.run(_run(arguments, specs, settings, directory))
    except (SpecError, SettingsError, DirectoryTakenError, ControlPathError, OSError) as error:
        print(f"fleet: {error}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _directory(given: Path | None) -> Generator[ControlDirectory]:
    """Open the given directory, or one that goes away with the fleet."""
    path = given or Path(tempfile.mkdtemp(prefix="gpupool-fleet-"))
    try:
        directory = ControlDirectory(path)
        try:
            yield directory
        finally:
            directory.close()
    finally:
        if given is None:
            shutil.rmtree(path, ignore_errors=True)


async def _run(
    arguments: argparse.Namespace,
    specs: list[NodeSpec],
    settings: AgentSettings,
    directory: ControlDirectory,
) -> int:
    stopping = stop_on_signals(signal.SIGINT, signal.SIGTERM)
    begun_s = time.monotonic()
    hosts = make_hosts(
        specs,
        settings,
        hardware=directory,
        state_directory=arguments.state_dir,
        socket_directory=arguments.local_socket_dir,
        cdi=arguments.cdi,
        mps_programs=arguments.mps_programs,
        helper=arguments.helper,
    )
    fleet = Fleet(directory, hosts)
    try:
        async with asyncio.TaskGroup() as group:
            # Whichever fails ends the others; an agent that fails ends the fleet.
            watch = group.create_task(fleet.wait_failed())
            start = group.create_task(fleet.start())
            ready = group.create_task(_say_ready(fleet, arguments.ready_file, begun_s))
            await stopping.wait()
            for task in (watch, start, ready):
                task.cancel()
    finally:
        await fleet.stop()
    return 0


async def _say_ready(fleet: Fleet, path: Path | None, begun_s: float) -> None:
    def progress(connected: int) -> None:
        print(f"fleet: {connected} of {len(fleet.hosts)} connected", file=sys.stderr, flush=True)

    await fleet.wait_connected(progress)
    connected_s = time.monotonic() - begun_s
    print(f"fleet: ready after {connected_s:.1f} s", file=sys.stderr, flush=True)
    # All of it stays until the end: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    if path is not None:
        fleet.write_ready_file(path, connected_s)


def _specs(arguments: argparse.Namespace) -> list[NodeSpec]:
    specs = [parse_node(text) for text in arguments.node]
    for text in arguments.count:
        specs += parse_count(text)
    for path in arguments.nodes_csv:
        specs += read_nodes_csv(path)
    part, _, parts = arguments.part.partition("/")
    if not part.isdecimal() or not parts.isdecimal() or not 1 <= int(part) <= int(parts):
        raise SpecError(f"--part is {arguments.part!r}; accepted is K/N with 1 <= K <= N")
    return checked(checked(specs)[int(part) - 1 :: int(parts)])


def _settings(arguments: argparse.Namespace) -> AgentSettings:
    flags = {"allocators": ",".join(arguments.allocator or ["127.0.0.1:7070"])}
    for name in _SETTINGS:
        text = getattr(arguments, name)
        if text is not None:
            flags[name] = text
    return load_settings(None, {}, flags)


def _log_to_stderr(*, verbose: bool) -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.INFO if verbose else logging.WARNING
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _allow_many_files() -> None:
    """Raise the limit of open files: a node has a handful of sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpupool_agent.simulated",
        description="Run simulated GPU hosts, each with a real agent and a connection of its own.",
        epilog=f"machines: {', '.join(machine_names())}, custom",
    )
    add = parser.add_argument
    add("--allocator", action="append", metavar="HOST:PORT", help="default 127.0.0.1:7070")
    add("--node", action="append", default=[], metavar="KIND:NAME[,KEY=VALUE...]")
    add("--count", action="append", default=[], metavar="KIND=COUNT", help="so many of a kind")
    add("--nodes-csv", action="append", default=[], type=Path, metavar="FILE", help="a trace's")
    add("--part", default="1/1", metavar="K/N", help="only every Nth node, from the Kth on")
    add("--control", type=Path, metavar="DIR", help="hardware and control socket live here")
    add("--state-dir", type=Path, metavar="DIR", help="where agents keep their checkpoints")
    add("--local-socket-dir", type=Path, metavar="DIR", help="a socket for each node's clients")
    add("--cdi", action="store_true", help="write CDI specs of leases beside each node's hardware")
    add("--ready-file", type=Path, metavar="FILE", help="JSON, written when all are connected")
    add("--mps-programs", action="store_true", help="MPS daemons are programs, not only values")
    add("--helper", action="store_true", help="agents have a root helper, which ends processes")
    for name, value in _SETTINGS.items():
        add(f"--{name.replace('_', '-')}", metavar=value, help=f"the agents' {name}")
    add("--verbose", action="store_true", help="log what agents do, not only what goes wrong")
    return parser


if __name__ == "__main__":
    sys.exit(main())
