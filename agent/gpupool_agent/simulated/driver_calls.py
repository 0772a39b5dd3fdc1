"""Calls to a simulated driver, which answers at once unless it hangs."""

from collections.abc import Callable
from typing import TypeVar

from gpupool_agent.devices.blocking import BlockingCalls, CallThreads
from gpupool_agent.simulated.node import SimulatedNode

T = TypeVar("T")


class SimulatedDriverCalls(BlockingCalls):
    """``BlockingCalls`` that need a thread only while the driver of their node hangs.

    A fleet would spend more on changing threads than on the calls. Faults are set by the
    event loop, so that no driver begins to hang in the middle of a call. What runs on the
    GPUs is looked up once a call, which asks for it again and again.
    """

    def __init__(self, node: SimulatedNode, threads: CallThreads) -> None:
        super().__init__("driver", threads)
        self._node = node

    async def call(self, function: Callable[[], T], deadline_s: float) -> T:
        """As ``BlockingCalls.call``."""
        if self._node.answering.is_set() and not self.hangs:
            with self._node.processes.at_one_moment():
                return self._context.run(function)
        return await super().call(function, deadline_s)
