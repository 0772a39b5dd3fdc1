"""Calls that may block in the kernel for ever, one at a time, on a thread of their own.

A call that hangs takes one daemon thread with it and nothing else: no shared pool,
no heartbeat. While it hangs every further call is refused at once. A thread whose call
has returned waits a moment for another one, of any agent that shares the threads, and
then ends: an agent at rest has none, and many agents in one process start few.
"""

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

Work = Callable[[], None]
Inbox = queue.SimpleQueue[Work]

IDLE_S = 1.0
"""How long a thread waits for another call. Starting one costs as much as several calls."""


class CallHangsError(Exception):
    """A call did not return within its deadline, or an earlier one has not yet."""


class CallThreads:
    """Threads that wait for a call. There is no bound: no call waits for another's thread."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        # The last to wait is the first to be taken, so that those not needed end.
        self._waiting: list[Inbox] = []

    def run(self, work: Work) -> None:
        """Do it now, on a thread that waits or else on a new one."""
        with self._lock:
            inbox = self._waiting.pop() if self._waiting else None
        if inbox is None:
            inbox = self._start()
        inbox.put(work)

    def _start(self) -> Inbox:
        inbox = Inbox()
        name = "blocking call"
        threading.Thread(target=self._serve, args=(inbox,), name=name, daemon=True).start()
        return inbox

    def _serve(self, inbox: Inbox) -> None:
        work: Work | None = inbox.get()
        while work is not None:
            work()
            # While it waits it keeps nothing of the call before.
            work = None
            work = self._next(inbox)

    def _next(self, inbox: Inbox) -> Work | None:
        with self._lock:
            self._waiting.append(inbox)
        try:
            return inbox.get(timeout=self._idle_s)
        except queue.Empty:
            pass
        with self._lock:
            if inbox in self._waiting:
                self._waiting.remove(inbox)
                return None
        # Taken at the last moment: work is on its way.
        return inbox.get()


class BlockingCalls:
    """Runs blocking calls of one agent, inside the context it was made in."""

    def __init__(self, name: str, threads: CallThreads | None = None) -> None:
        self._name = name
        self._threads = threads or CallThreads()
        self._context = contextvars.copy_context()
        self._lock = asyncio.Lock()
        self._running: asyncio.Future[Any] | None = None

    @property
    def hangs(self) -> bool:
        """Whether a call is under way that has not returned."""
        return self._running is not None and not self._running.done()

    async def call(self, function: Callable[[], T], deadline_s: float) -> T:
        """Give what ``function`` gives or raise what it raises; CallHangsError."""
        async with self._lock:
            if self.hangs:
                raise CallHangsError(f"an earlier call to the {self._name} has not returned")
            future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            self._running = future
            # Its outcome may come when nobody waits for it any more.
            future.add_done_callback(_retrieve)
            self._threads.run(lambda: self._work(function, future))
            done, _ = await asyncio.wait({future}, timeout=deadline_s)
            if not done:
                raise CallHangsError(f"the {self._name} has not answered for {deadline_s:g} s")
            return future.result()

    async def returned(self) -> None:
        """Wait until no call is under way."""
        if self._running is not None and not self._running.done():
            await asyncio.wait({self._running})

    def _work(self, function: Callable[[], T], future: asyncio.Future[T]) -> None:
        outcome: T | None = None
        error: BaseException | None = None
        try:
            outcome = self._context.run(function)
        except BaseException as raised:  # noqa: BLE001, RUF100 - handed to the caller as it is
            error = raised
        loop = future.get_loop()
        if loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(_settle, future, outcome, error)
        except RuntimeError:
            # The loop was closed between the two lines: nobody waits any more.
            return


def _settle(future: asyncio.Future[Any], outcome: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(outcome)
    else:
        future.set_exception(error)


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
