"""The program gpupool-helper."""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import structlog

from gpupool_agent.helper.actions import Actions
from gpupool_agent.helper.driver import NvmlDriver
from gpupool_agent.helper.server import HelperServer, SocketTakenError
from gpupool_agent.helper.settings import HelperSettings, load_settings
from gpupool_agent.log import configure_log
from gpupool_agent.notify import notify
from gpupool_agent.settings import SettingsError
from gpupool_agent.signals import stop_on_signals
from gpupool_agent.watchdog import feed

EXIT_CANNOT_START = 1
EXIT_SETTINGS = 78
"""EX_CONFIG: systemd does not restart on it."""

EXAMPLES = """\
examples:
  gpupool-helper --config /etc/gpupool/helper.toml
  gpupool-helper --agent-user 1000 --socket /tmp/helper/sock --socket-group 1000

Runs as root. Every setting can stand in the file, in the environment as
GPUPOOL_HELPER_<NAME>, or as a flag; a flag wins over the environment, and that over the
file. Lists are separated by commas. Exit codes: 0 ended by a signal, 1 cannot start, 78 a
setting is not accepted.
"""


def parser() -> argparse.ArgumentParser:
    """Flags: one for each setting."""
    found = argparse.ArgumentParser(
        prog="gpupool-helper",
        description="Does for the agent of this host the few things that only root may do.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = f"gpupool-helper {metadata.version('gpupool')}"
    found.add_argument("--version", action="version", version=version)
    found.add_argument("--config", type=Path, metavar="FILE", help="settings file (TOML)")
    found.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help="write socket and pid here (JSON) once serving",
    )
    for each in fields(HelperSettings):
        found.add_argument(
            f"--{each.name.replace('_', '-')}",
            dest=each.name,
            metavar="VALUE",
            help=each.metadata["text"].replace("%", "%%"),
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; gives the exit code."""
    flags = vars(parser().parse_args(arguments))
    config, ready_file = flags.pop("config"), flags.pop("ready_file")
    given = {key: value for key, value in flags.items() if value is not None}
    configure_log()
    log = structlog.get_logger()
    try:
        settings = load_settings(config, os.environ, given)
        asyncio.run(serve(settings, ready_file))
    except SettingsError as error:
        print(f"gpupool-helper: {error}", file=sys.stderr)
        return EXIT_SETTINGS
    except (SocketTakenError, OSError) as error:
        log.critical("helper.cannot_start", reason=str(error))
        return EXIT_CANNOT_START
    return 0


async def serve(settings: HelperSettings, ready_file: Path | None) -> None:
    """Serve until a signal ends it; daemons that it started go on."""
    serving = asyncio.Event()
    ended = stop_on_signals(signal.SIGTERM, signal.SIGINT)
    server = HelperServer(settings, Actions(settings, NvmlDriver()))
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(server.serve(serving)),
        asyncio.create_task(_announce(settings, serving, ready_file)),
        asyncio.create_task(feed()),
    ]
    end: asyncio.Task[Any] = asyncio.create_task(ended.wait())
    try:
        await asyncio.wait([tasks[0], end], return_when=asyncio.FIRST_COMPLETED)
        notify("STOPPING=1")
    finally:
        for task in (end, *tasks):
            task.cancel()
        results = await asyncio.gather(*tasks, end, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _announce(settings: HelperSettings, serving: asyncio.Event, file: Path | None) -> None:
    await serving.wait()
    structlog.get_logger().info("helper.serving", socket=str(settings.socket))
    if file is not None:
        beside = file.with_name(f"{file.name}.new")
        beside.write_text(json.dumps({"socket": str(settings.socket), "pid": os.getpid()}))
        beside.replace(file)
    notify(f"READY=1\nSTATUS=serving on {settings.socket}")


if __name__ == "__main__":
    sys.exit(main())
