"""A background thread with an event loop, for programs that have none."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, TypeVar

from gpupool.errors import WrongStateError

CANCEL_GRACE_S = 10.0
"""Longest time that Ctrl-C waits for what is under way to be given up cleanly."""

_STOP_S = 5.0

_Result = TypeVar("_Result")


class LoopThread:
    """Runs coroutines for other threads; any number of them at once."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="gpupool client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """The coroutine's result. WrongStateError once stopped.

        When the calling thread is interrupted (Ctrl-C), the coroutine is cancelled
        and has CANCEL_GRACE_S to give up what it holds before the interrupt goes on.
        """
        if self._loop.is_closed():
            coroutine.close()
            raise WrongStateError("the client is closed")
        given_up, ended = threading.Event(), threading.Event()
        tasks: list[asyncio.Task[Any] | None] = []

        async def to_end() -> _Result:
            tasks.append(asyncio.current_task())
            try:
                if given_up.is_set():
                    coroutine.close()
                    raise asyncio.CancelledError
                return await coroutine
            finally:
                ended.set()

        def give_up() -> None:
            for task in filter(None, tasks):
                task.cancel()
            if not tasks:
                # Begun by the next turn of the loop, if it is to begin at all.
                self._loop.call_soon(lambda: None if tasks else ended.set())

        # The interrupt may come at any line from here, also before there is a future.
        try:
            return asyncio.run_coroutine_threadsafe(to_end(), self._loop).result()
        except (KeyboardInterrupt, SystemExit):
            given_up.set()
            self._loop.call_soon_threadsafe(give_up)
            ended.wait(CANCEL_GRACE_S)
            if not tasks:
                coroutine.close()
            raise

    def iterate(self, items: AsyncGenerator[_Result, None]) -> Generator[_Result, None, None]:
        """The items of an async generator, which is closed when this one is."""

        async def following() -> tuple[_Result] | None:
            try:
                return (await anext(items),)
            except StopAsyncIteration:
                return None

        try:
            while (found := self.run(following())) is not None:
                yield found[0]
        finally:
            # A closed client has closed its generators itself.
            if not self._loop.is_closed():
                self.run(items.aclose())

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Does ``last`` and ends the thread; bounded, and silent when called twice."""
        if self._loop.is_closed() or not self._thread.is_alive():
            last.close()
            return
        future = asyncio.run_coroutine_threadsafe(last, self._loop)
        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        # Garbage may be collected on the loop's own thread, which cannot wait for itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            pending = asyncio.all_tasks(self._loop)
            for task in pending:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
