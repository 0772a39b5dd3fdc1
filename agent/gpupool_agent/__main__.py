"""The program gpupool-agent."""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import structlog

from gpupool_agent.agent import Agent, agent_version
from gpupool_agent.checkpoint import CheckpointError, StateLockedError
from gpupool_agent.devices.host import real_adapters
from gpupool_agent.local.door import DoorTakenError
from gpupool_agent.log import configure_log, set_level
from gpupool_agent.notify import notify, reloading
from gpupool_agent.settings import AgentSettings, SettingsError, load_settings
from gpupool_agent.signals import call_on_hangup, stop_on_signals
from gpupool_agent.watchdog import feed

EXIT_CANNOT_START = 1
EXIT_SETTINGS = 78
"""EX_CONFIG: systemd does not restart on it."""

EXAMPLES = """\
examples:
  gpupool-agent --config /etc/gpupool/agent.toml
  gpupool-agent --allocators 127.0.0.1:7070 --state-dir /tmp/agent --socket /tmp/agent/sock
  GPUPOOL_AGENT_LABELS=zone=a,rack=r12 gpupool-agent

Every setting can stand in the file, in the environment as GPUPOOL_AGENT_<NAME>, or
as a flag; a flag wins over the environment, and that over the file. Lists are
separated by commas. Exit codes: 0 ended by a signal, 1 cannot start, 78 a setting is
not accepted.
"""


def parser() -> argparse.ArgumentParser:
    """Flags: one for each setting."""
    found = argparse.ArgumentParser(
        prog="gpupool-agent",
        description="Reports what this host has to the pool and carries out its leases.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("--version", action="version", version=f"gpupool-agent {agent_version()}")
    found.add_argument("--config", type=Path, metavar="FILE", help="settings file (TOML)")
    found.add_argument(
        "--check", action="store_true", help="check the settings, print them all, and exit"
    )
    found.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help="write node id, socket, metrics port and pid here (JSON) once serving",
    )
    for each in fields(AgentSettings):
        found.add_argument(
            f"--{each.name.replace('_', '-')}",
            dest=each.name,
            metavar="VALUE",
            help=each.metadata["text"].replace("%", "%%"),
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent until SIGTERM or SIGINT; gives the exit code."""
    flags = vars(parser().parse_args(arguments))
    config, ready_file, check = (flags.pop(name) for name in ("config", "ready_file", "check"))
    given = {key: value for key, value in flags.items() if value is not None}
    configure_log()
    log = structlog.get_logger()

    def load() -> AgentSettings:
        return load_settings(config, os.environ, given)

    # Until there is somebody who reads settings anew, there is nothing to read anew.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        settings = load()
    except SettingsError as error:
        print(f"gpupool-agent: {error}", file=sys.stderr)
        return EXIT_SETTINGS
    if check:
        print_settings(settings)
        return 0
    set_level(settings.log_level)
    try:
        asyncio.run(serve(settings, ready_file, load))
    except (StateLockedError, CheckpointError, DoorTakenError, OSError) as error:
        log.critical("agent.cannot_start", reason=str(error))
        return EXIT_CANNOT_START
    return 0


def print_settings(settings: AgentSettings) -> None:
    """All of them, as they are in the end."""
    try:
        for each in sorted(fields(settings), key=lambda field: field.name):
            print(f"{each.name} = {getattr(settings, each.name)}")
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has seen enough, as head has; what is left goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def serve(
    settings: AgentSettings, ready_file: Path | None, load: Callable[[], AgentSettings]
) -> None:
    """Run an agent of this host until a signal ends it; what it prepared goes on.

    ``load`` gives the settings as they are now, for a reload.
    """
    agent = Agent(settings, real_adapters(settings))
    call_on_hangup(lambda: reload(settings, load))
    ended = stop_on_signals(signal.SIGTERM, signal.SIGINT)
    run = asyncio.create_task(agent.run())
    alive = asyncio.create_task(_tell_alive(agent))
    end = asyncio.create_task(ended.wait())
    begin = asyncio.create_task(agent.started.wait())
    try:
        await asyncio.wait([run, end, begin], return_when=asyncio.FIRST_COMPLETED)
        if begin.done():
            _announce(agent, ready_file)
        await asyncio.wait([run, end], return_when=asyncio.FIRST_COMPLETED)
        notify("STOPPING=1")
    finally:
        for task in (end, begin, alive, run):
            task.cancel()
        results = await asyncio.gather(run, end, begin, alive, return_exceptions=True)
    failure = results[0]
    if isinstance(failure, Exception):
        raise failure


def reload(running: AgentSettings, load: Callable[[], AgentSettings]) -> None:
    """Take over the log level of the settings as they are now; name what needs a restart."""
    log = structlog.get_logger()
    with reloading():
        try:
            found = load()
        except SettingsError as error:
            log.warning("agent.not_reloaded", reason=str(error))
            return
        set_level(found.log_level)
        names = [each.name for each in fields(AgentSettings) if each.name != "log_level"]
        changed = [name for name in names if getattr(found, name) != getattr(running, name)]
        log.warning("agent.reloaded", log_level=found.log_level, needs_restart=changed)


async def _tell_alive(agent: Agent) -> None:
    await agent.started.wait()
    await feed(agent.stuck, agent.status)


def _announce(agent: Agent, ready_file: Path | None) -> None:
    settings = agent.settings
    metrics_port = None
    if settings.metrics_port >= 0:
        from gpupool_agent.metrics import serve_metrics

        metrics_port = serve_metrics(agent, settings.metrics_port).server_port
    if ready_file is not None:
        record = {
            "node_id": settings.node_id,
            "socket": str(settings.socket) if settings.socket else None,
            "metrics_port": metrics_port,
            "pid": os.getpid(),
        }
        beside = ready_file.with_name(f"{ready_file.name}.new")
        beside.write_text(json.dumps(record), encoding="utf-8")
        beside.replace(ready_file)
    notify("READY=1")


if __name__ == "__main__":
    sys.exit(main())
