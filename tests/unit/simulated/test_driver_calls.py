"""Calls to a simulated driver: no thread while it answers, one while it hangs."""

import os
import threading
from pathlib import Path

import pytest

from gpupool_agent.devices.blocking import CallHangsError, CallThreads
from gpupool_agent.simulated.driver_calls import SimulatedDriverCalls
from gpupool_agent.simulated.gpu_processes import GpuProcess, start_ticks_of
from gpupool_agent.simulated.machine import load_machine
from gpupool_agent.simulated.node import SimulatedNode

DEADLINE_S = 10.0


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    return SimulatedNode(node_id="n1", machine=load_machine("dgx-h100"), directory=tmp_path)


def add_process(node: SimulatedNode) -> None:
    ticks = start_ticks_of(os.getpid())
    assert ticks is not None
    uuid = node.gpus[0].uuid
    node.processes.add(
        GpuProcess(pid=os.getpid(), start_ticks=ticks, uid=0, uuids=(uuid,), memory_mib=100)
    )


async def test_a_driver_that_answers_needs_no_thread(node: SimulatedNode) -> None:
    calls = SimulatedDriverCalls(node, CallThreads())
    assert await calls.call(threading.current_thread, DEADLINE_S) is threading.main_thread()
    with pytest.raises(ZeroDivisionError):
        await calls.call(lambda: 1 // 0, DEADLINE_S)


async def test_one_that_hangs_holds_up_its_own_thread_alone(node: SimulatedNode) -> None:
    calls = SimulatedDriverCalls(node, CallThreads())
    returns = threading.Event()

    def hang() -> threading.Thread:
        node.answering.wait()
        returns.wait()
        return threading.current_thread()

    node.answering.clear()
    with pytest.raises(CallHangsError, match="has not answered"):
        await calls.call(hang, 0.05)
    # It answers again, but its call has not returned: that one still is in its context.
    node.answering.set()
    with pytest.raises(CallHangsError, match="an earlier call"):
        await calls.call(hang, DEADLINE_S)
    returns.set()
    await calls.returned()
    assert await calls.call(hang, DEADLINE_S) is threading.main_thread()


async def test_a_call_sees_its_node_at_one_moment_and_the_next_one_sees_it_anew(
    node: SimulatedNode,
) -> None:
    calls = SimulatedDriverCalls(node, CallThreads())

    def look_twice() -> tuple[int, int]:
        before = node.used_mib(node.gpus[0])
        add_process(node)
        return before, node.used_mib(node.gpus[0])

    idle_mib = node.machine.gpu.memory_idle_mib
    assert await calls.call(look_twice, DEADLINE_S) == (idle_mib, idle_mib)
    assert node.used_mib(node.gpus[0]) == idle_mib + 100
    assert await calls.call(lambda: node.used_mib(node.gpus[0]), DEADLINE_S) == idle_mib + 100
