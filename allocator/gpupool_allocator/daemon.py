"""Puts the allocator together, serves, and takes it apart in order."""

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog

from gpupool import __version__
from gpupool_allocator import logs, systemd
from gpupool_allocator.core.pool import Pool
from gpupool_allocator.engine import Engine, EngineStoppedError
from gpupool_allocator.engine.feed import EventFeed
from gpupool_allocator.http.server import HttpServer
from gpupool_allocator.keeper import EXIT_CRASHED, Ports
from gpupool_allocator.metrics import Metrics
from gpupool_allocator.rpc.server import GrpcServer
from gpupool_allocator.settings import Address, AllocatorSettings, BadSettingError
from gpupool_allocator.signals import stop_on_signals
from gpupool_allocator.storage import records
from gpupool_allocator.storage.sqlite import SqliteStore
from gpupool_allocator.storage.store import StoreFullError
from gpupool_allocator.telemetry import TelemetryBook

STORE_FILE = "allocator.db"
STORE_CHECK_S = 2.0
"""How often the store is asked whether it still takes writes."""

MIB = 1024 * 1024

log = structlog.stdlib.get_logger("allocator")


@dataclass(frozen=True, slots=True)
class Restart:
    """Serve again, in a new term, on the ports that were served on."""

    settings: AllocatorSettings


class Office:
    """The store with its thread, and the pool as it was stored: one term of office.

    Everything that touches the store runs in that one thread.
    """

    def __init__(self, settings: AllocatorSettings) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._settings = settings

    async def begin(self) -> None:
        """Opens the store, begins a term and loads the pool; errors as the store's."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.thread, self._begin)

    def _begin(self) -> None:
        settings = self._settings
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.store = SqliteStore(
            settings.state_dir / STORE_FILE,
            max_bytes=settings.store_mib_max * MIB,
            history_max=settings.history_max,
            new_store=settings.new_store,
        )
        self.epoch = self._begin_term()
        self.last_sequence = self.store.bounds()[1]
        self.pool = Pool(
            settings.for_pool(),
            epoch=self.epoch,
            last_sequence=self.last_sequence,
            fits_store=records.fits_one_commit,
        )
        count = 0
        for stored in self.store.load():
            self.pool.restore(records.decode(stored))
            count += 1
        log.info("store.loaded", epoch=self.epoch, records=count, events=self.last_sequence)

    def _begin_term(self) -> int:
        try:
            return self.store.begin_term()
        except StoreFullError:
            # Reads and renewals can be served from a full disk, given a term to do it in.
            if not self.store.free_reserve():
                raise
            return self.store.begin_term()

    async def end(self) -> None:
        """Closes the store."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.thread, self.store.close)
        self.thread.shutdown()


Told = Callable[[Ports], None]
"""Is told where a term serves, as soon as it does."""


async def serve_terms(
    settings: AllocatorSettings, told: Told, load: Callable[[], AllocatorSettings]
) -> None:
    """Serves until SIGTERM or SIGINT, one term after the other.

    In one event loop: gRPC knows no second one. ``load`` gives the settings as they are
    now, for SIGHUP. Raises as ``serve``.
    """
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: reload(settings, load))
    # One event for all terms: a signal that comes between two of them ends the next.
    stopping = stop_on_signals(signal.SIGTERM, signal.SIGINT)
    outcome = await serve(settings, stopping, told)
    while outcome is not None:
        outcome = await serve(outcome.settings, stopping, told)


async def serve(settings: AllocatorSettings, stopping: asyncio.Event, told: Told) -> Restart | None:
    """Serves until ``stopping`` is set (None) or until a new term is needed (Restart).

    Ends the process with EXIT_CRASHED when the engine cannot go on. OSError and the
    store's errors: it cannot start.
    """
    stop = asyncio.create_task(stopping.wait())
    office = Office(settings)
    await office.begin()
    service = _Service(office, settings)
    try:
        told(await service.start())
        await asyncio.wait({stop, *service.tasks}, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            systemd.notify("STOPPING=1")
            await service.stop(settings.shutdown_grace_s)
            return None
        reason = service.new_term_reason()
        log.warning("allocator.new_term", reason=reason)
        await service.stop(0)
        return Restart(on_ports(settings, service.ports))
    finally:
        stop.cancel()
        for task in service.tasks:
            task.cancel()


def reload(running: AllocatorSettings, load: Callable[[], AllocatorSettings]) -> None:
    """Takes over the log level of the settings as they are now; names what needs a restart."""
    with systemd.reloading():
        try:
            found = load()
        except BadSettingError as error:
            log.warning("allocator.not_reloaded", reason=str(error))
            return
        logs.set_level(found.log_level)
        names = [each.name for each in dataclasses.fields(found) if each.name != "log_level"]
        changed = [name for name in names if getattr(found, name) != getattr(running, name)]
        log.warning("allocator.reloaded", log_level=found.log_level, needs_restart=changed)


class _Service:
    """Everything that serves in one term."""

    def __init__(self, office: Office, settings: AllocatorSettings) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self._office = office
        self._settings = settings
        self._metrics = Metrics(__version__)
        self._telemetry = TelemetryBook()
        self._engine = Engine(
            office.pool,
            office.store,
            epoch=office.epoch,
            in_thread=office.thread,
            metrics=self._metrics,
            feed=EventFeed(office.store, office.thread, newest=office.last_sequence),
            inbox_max=settings.inbox_max,
            check_invariants=settings.check_invariants,
        )
        self.rpc = GrpcServer(self._engine, settings, self._telemetry)

    @property
    def ports(self) -> Ports:
        """Where it serves."""
        return Ports(grpc=self.rpc.port, http=self.http.port)

    async def start(self) -> Ports:
        """GRPC first: after a crash, agents and holders wait for it."""
        await self._engine.check_store()
        self._running = asyncio.create_task(self._engine.run())
        self.tasks += [
            self._running,
            asyncio.create_task(self.rpc.agents.watch_silence()),
            asyncio.create_task(_watch_store(self._engine)),
        ]
        await self.rpc.start()
        # What was loaded stays: from now on only what comes and goes is looked through.
        gc.freeze()
        gc.enable()
        self.http = HttpServer(self._engine, self._metrics, self._telemetry)
        await self.http.start(self._settings.http_address)
        _announce(self._settings, self._office.epoch, self.ports)
        self._alive = asyncio.create_task(systemd.feed_watchdog(self._engine.stuck))
        return self.ports

    def new_term_reason(self) -> str:
        """Why a new term is needed; ends the process when something crashed instead."""
        error = next((task.exception() for task in self.tasks if task.done()), None)
        if isinstance(error, EngineStoppedError) and error.new_term:
            return str(error)
        # Not an exception through the callers: on its way they would tidy up and
        # answer calls, from memory that may be wrong. The store is right.
        log.critical(
            "allocator.crashed",
            reason=str(error),
            exc_info=error,
            recent_events=self._engine.recent_events(),
        )
        logs.flush()
        os._exit(EXIT_CRASHED)

    async def stop(self, grace_s: float) -> None:
        """No new calls; those in flight end; what was accepted is committed; the store closes."""
        log.info("allocator.stopping", grace_s=grace_s)
        self._alive.cancel()
        self.http.begin_stop()
        await self.rpc.stop(grace_s)
        self._engine.stop()
        await asyncio.wait({self._running})
        if self._running.exception() is not None:
            self.new_term_reason()
        await self.http.stop()
        await self._office.end()
        log.info("allocator.stopped")


def on_ports(settings: AllocatorSettings, ports: Ports) -> AllocatorSettings:
    """Settings for serving where clients have found us, also when the system chose."""
    return dataclasses.replace(
        settings,
        grpc_address=Address(settings.grpc_address.host, ports.grpc),
        http_address=Address(settings.http_address.host, ports.http),
    )


async def _watch_store(engine: Engine) -> None:
    while True:
        await asyncio.sleep(STORE_CHECK_S)
        await engine.check_store()


def _announce(settings: AllocatorSettings, epoch: int, ports: Ports) -> None:
    for address in (settings.grpc_address, settings.http_address):
        if not address.is_loopback:
            log.warning("allocator.insecure", address=str(address), reason="nothing is encrypted")
    log.info(
        "allocator.serving", version=__version__, epoch=epoch, grpc=ports.grpc, http=ports.http
    )
    systemd.notify(f"READY=1\nSTATUS=serving gRPC on port {ports.grpc}, HTTP on port {ports.http}")


def write_ready_file(file: Path, ports: Ports, *, must: bool) -> None:
    """Tells whoever started it where, and as which process, it serves.

    Raises OSError where it ``must``: at a first start somebody waits for the file. Later
    nobody is helped by an allocator that ends because of it.
    """
    written = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        text = json.dumps({**dataclasses.asdict(ports), "pid": os.getpid()}) + "\n"
        written.write_text(text)
        written.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
        if must:
            raise
        log.warning("ready_file.failed", file=str(file), reason=str(error))
