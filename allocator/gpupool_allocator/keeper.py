"""The parent of the process that serves: it has the programs loaded, and forks.

A crash of the allocator is answered by starting anew from the store, and every agent and
holder waits for that. Loading the programs takes longer than loading the pool, so the
process that was started loads them, forks a child that serves, and forks the next one as
soon as that has crashed. It opens no store and no port itself, and has no second thread.

It leaves the rest to whoever started it (systemd): a child that stopped as asked, that
cannot start, or that crashed before it served ends the keeper with the same outcome.
"""

import ctypes
import functools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NoReturn

import structlog

FORWARDED = (signal.SIGTERM, signal.SIGINT)
"""Ask it to end."""

WAITED_FOR = (*FORWARDED, signal.SIGHUP, signal.SIGCHLD)
"""SIGHUP goes to the child too, which reads its settings anew."""

EXIT_CRASHED = 70
"""The child ended itself, to go on from the store."""

CALM_S = 10.0
"""A child that lived this long did not die of its start."""

PAUSE_S_MIN = 0.1
PAUSE_S_MAX = 5.0
"""Waits before a child when several in a row died young; the first is replaced at once."""

_PR_SET_PDEATHSIG = 1
"""prctl(2), in <linux/prctl.h>."""

log = structlog.stdlib.get_logger("keeper")


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a child served; the next one serves there too, also when the system chose."""

    grpc: int
    http: int


Serve = Callable[[Ports | None, Callable[[Ports], None]], int]
"""Serves on given ports, calls back when it does, and returns an exit code."""


def keep(serve: Serve) -> int:
    """Runs ``serve`` in a child, and in a new one when that crashed; the exit code.

    For the main thread of a process that has no other. SIGTERM and SIGINT go to the child;
    SIGKILL of this process ends it too.
    """
    # Only taken where they are waited for: none is lost between a fork and what follows.
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    # Whoever started this process may have ignored it: then no child's end would be told.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ports: Ports | None = None
    died_young = 0
    while True:
        child = _Child(serve, ports)
        code, stopped = child.wait()
        if stopped and code < 0:
            # It is gone, as asked, and whatever ended it has left the store right.
            return 0
        crashed = code < 0 or code == EXIT_CRASHED
        if stopped or not crashed or child.served is None:
            return 128 - code if code < 0 else code
        ports = child.served
        died_young = 0 if child.age_s >= CALM_S else died_young + 1
        log.warning("allocator.starts_anew", outcome=_outcome(code), lived_s=round(child.age_s, 3))
        wait_s = pause_s(died_young)
        if wait_s and signal.sigtimedwait(FORWARDED, wait_s) is not None:
            return 0


def pause_s(died_young: int) -> float:
    """Wait before the next child, in seconds, when so many in a row died young."""
    if died_young <= 1:
        return 0.0
    return min(PAUSE_S_MAX, PAUSE_S_MIN * 2.0 ** min(died_young - 2, 16))


class _Child:
    """One process that serves. ``served``: where it did, once it is gone."""

    def __init__(self, serve: Serve, ports: Ports | None) -> None:
        self.served: Ports | None = None
        self._began_at = time.monotonic()
        keeper = os.getpid()
        self._told, tell = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            # Each term of office tells, on the same ports: the first one counts.
            told = functools.cache(functools.partial(_write_ports, tell))
            _be_child(keeper, lambda: serve(ports, told))
        os.close(tell)

    @property
    def age_s(self) -> float:
        """Time since its start, seconds."""
        return time.monotonic() - self._began_at

    def wait(self) -> tuple[int, bool]:
        """Its exit code (negative: the signal that ended it), and whether it was asked to end."""
        stopped = False
        while True:
            number = signal.sigwait(WAITED_FOR)
            if number != signal.SIGCHLD:
                stopped = stopped or number in FORWARDED
                os.kill(self._pid, number)
                continue
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                with os.fdopen(self._told) as told:
                    ports = told.read()
                self.served = Ports(**json.loads(ports)) if ports else None
                return os.waitstatus_to_exitcode(status), stopped


def _be_child(keeper: int, serve: Callable[[], int]) -> NoReturn:
    """The child's life; it never returns into the keeper's code."""
    code = 1
    try:
        _die_with(keeper)
        # Until it listens itself, a stop is the end: there is nothing to tidy up yet. A reload
        # must not be.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)
        code = serve()
    except BaseException:  # noqa: BLE001, RUF100 - the last frame there is
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with(keeper: int) -> None:
    """Has the kernel end this process when the keeper is gone: nobody could stop it then."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != keeper:
        # It died before the kernel was asked.
        os._exit(EXIT_CRASHED)


def _write_ports(tell: int, ports: Ports) -> None:
    os.write(tell, json.dumps(asdict(ports)).encode())
    os.close(tell)


def _outcome(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}: {signal.strsignal(-code)}"
