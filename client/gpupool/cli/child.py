"""A command run under a lease: started, told what we are told, waited for.

Signals are waited for, not handled: only so it is known whether one came from the
terminal, which has sent it to the command as well, or from somebody who named us.
"""

import os
import signal
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

FORWARDED = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
NOT_FOUND = 127
NOT_EXECUTABLE = 126
SIGNAL_BASE = 128
"""Exit codes as a shell gives them."""

_SI_KERNEL = 0x80
_WAITED_FOR = FORWARDED | {signal.SIGCHLD}


class Child:
    """A running command. It must be started, and waited for, on the main thread."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts it, with our files and terminal. Raises OSError where it cannot be run."""
        self._lock = threading.Lock()
        self._code: int | None = None
        # Unlike a fork, a spawn is safe beside the threads of the client.
        self._pid = os.posix_spawnp(
            command[0],
            list(command),
            dict(environment),
            setsigmask=[],
            setsigdef=list(FORWARDED | {signal.SIGPIPE}),
        )

    def send(self, number: int) -> None:
        """Sends a signal, unless it has ended; from any thread."""
        with self._lock:
            if self._code is None:
                os.kill(self._pid, number)

    def wait(self) -> int:
        """Passes signals on until it ends; its exit code, 128+n where signal n ended it."""
        while self._code is None:
            info = signal.sigwaitinfo(_WAITED_FOR)
            if info.si_signo == signal.SIGCHLD:
                self._reap()
            elif info.si_code != _SI_KERNEL:
                self.send(info.si_signo)
        return self._code

    def _reap(self) -> None:
        with self._lock:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self._code = code if code >= 0 else SIGNAL_BASE - code


@contextmanager
def signals_kept() -> Generator[None, None, None]:
    """Inside, signals wait; threads started inside never take one.

    A program-wide signal goes to any thread that does not block it, and would be
    lost for ``Child.wait`` if one of the client's threads took it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_end_us() -> Generator[None, None, None]:
    """Inside, a signal that would end us raises SystemExit(128+n), so that we let go."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(SIGNAL_BASE + number)

    before = {number: signal.signal(number, leave) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
