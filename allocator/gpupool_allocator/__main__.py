"""The program ``gpupool-allocator``."""

import argparse
import asyncio
import dataclasses
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gpupool import __version__
from gpupool_allocator.settings import FIELDS, AllocatorSettings, BadSettingError, load

EXIT_CANNOT_START = 1
EXIT_UNAVAILABLE = 69
"""EX_UNAVAILABLE: a library of the program is not installed."""
EXIT_BAD_SETTINGS = 78

DESCRIPTION = "The allocator of gpupool: grants leases on the pool's GPUs."
EXAMPLES = """\
examples:
  gpupool-allocator --state-dir /var/lib/gpupool
  gpupool-allocator --config /etc/gpupool/allocator.toml --log-level debug
  gpupool-allocator --grpc-address 127.0.0.1:0 --http-address 127.0.0.1:0 \\
      --state-dir /tmp/pool --ready-file /tmp/pool/ready.json
  GPUPOOL_ALLOCATOR_GRAIN_PCT=5 gpupool-allocator --check

Settings are read from the file, then the environment (GPUPOOL_ALLOCATOR_<KEY>), then
flags; the last one wins. A flag's key with '_' for '-' is its key in the file.

exit codes:
  0   stopped by SIGTERM or SIGINT
  1   cannot start: port taken, store locked by another allocator, store unreadable
  69  a library is not installed: gpupool is here without its extra [allocator]
  70  crashed, to go on from the store (a restart is safe); with keeper = true only when
      it had not served yet, since else a new process has taken over
  78  a setting is not accepted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    arguments = _parser().parse_args(argv)
    flags = {key: value for key in FIELDS if (value := getattr(arguments, key)) is not None}
    try:
        settings = load(arguments.config, os.environ, flags)
    except BadSettingError as error:
        sys.stderr.write(f"gpupool-allocator: {error}\n")
        return EXIT_BAD_SETTINGS
    if arguments.check:
        _print_settings(settings)
        return 0
    return _run(settings, arguments.ready_file, lambda: load(arguments.config, os.environ, flags))


def _print_settings(settings: AllocatorSettings) -> None:
    try:
        for key, value in sorted(dataclasses.asdict(settings).items()):
            shown = str(getattr(settings, key)) if isinstance(value, dict) else value
            sys.stdout.write(f"{key} = {shown}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has seen enough, as head has. What is still buffered goes nowhere,
        # so that the interpreter does not complain about it either when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(
    settings: AllocatorSettings,
    ready_file: Path | None,
    load_again: Callable[[], AllocatorSettings],
) -> int:
    try:
        import structlog

        from gpupool_allocator import daemon, keeper, logs
    except ModuleNotFoundError as error:
        # People who only work with a pool have the program on their path all the same.
        library = (error.name or "").partition(".")[0]
        sys.stderr.write(
            f"gpupool-allocator: {library} is not installed; install gpupool with its extra "
            "[allocator] (from a checkout: pip install '.[allocator]')\n"
        )
        return EXIT_UNAVAILABLE
    from gpupool_allocator.storage.records import RecordError
    from gpupool_allocator.storage.store import StoreError, StoreFullError, StoreLockedError

    # Until there is somebody who reads settings anew, there is nothing to read anew.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    logs.set_up(settings.log_level, settings.log_format)
    log = structlog.stdlib.get_logger("allocator")

    def serve(ports: keeper.Ports | None, told: Callable[[keeper.Ports], None]) -> int:
        # All that is made until calls are served is there to stay: looking for garbage in
        # it takes a fifth of a start, and after a crash agents and holders wait for that.
        gc.disable()
        log.info("allocator.starting", version=__version__)

        def tell(found: keeper.Ports) -> None:
            # The keeper first: from here on a crash is one of an allocator that has served.
            told(found)
            if ready_file is not None:
                daemon.write_ready_file(ready_file, found, must=ports is None)

        wanted = settings if ports is None else daemon.on_ports(settings, ports)
        try:
            asyncio.run(daemon.serve_terms(wanted, tell, load_again))
        except (OSError, StoreLockedError, StoreFullError, StoreError, RecordError) as error:
            log.critical("allocator.cannot_start", reason=str(error))
            return EXIT_CANNOT_START
        finally:
            logs.flush()
        return 0

    if settings.keeper:
        return keeper.keep(serve)
    return serve(None, lambda _: None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpupool-allocator",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gpupool-allocator {__version__}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    parser.add_argument(
        "--check", action="store_true", help="check the settings, print them all, and exit"
    )
    parser.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help="JSON file that is written when calls are served: ports and pid",
    )
    settings = parser.add_argument_group("settings")
    for key, field in FIELDS.items():
        is_switch = isinstance(field.default, bool)
        settings.add_argument(
            "--" + key.replace("_", "-"),
            dest=key,
            nargs="?" if is_switch else None,
            const="true" if is_switch else None,
            metavar="BOOL" if is_switch else "VALUE",
            help=f"{field.metadata['meaning']} Accepted: {field.metadata['accepted']}. "
            f"Default: {_shown(field.default)}.".replace("%", "%%"),
        )
    return parser


def _shown(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


if __name__ == "__main__":
    sys.exit(main())
