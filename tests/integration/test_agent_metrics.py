"""The agent's metrics, scraped over HTTP."""

import asyncio
import contextlib
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.agent_allocator import RunningAgent, TinyAllocator, until
from tests.agent_bench import assignment, whole

from gpupool_agent.core.readings import GpuProcess
from gpupool_agent.metrics import serve_metrics


@contextlib.contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def scrape(running: RunningAgent) -> str:
    server = serve_metrics(running.agent, 0)
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=20) as answer:
            return answer.read().decode()
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()


async def test_metrics_show_what_the_agent_knows_and_are_well_formed(tmp_path: Path) -> None:
    allocator = TinyAllocator(epoch=3)
    address = await allocator.start()
    running = RunningAgent(tmp_path, address)
    await allocator.want(assignment("a", 1, whole(0)))
    await until(lambda: allocator.state("a") == "prepared" and allocator.telemetry, "telemetry")
    with sleeping() as stray:
        running.driver.processes["GPU-1"] = (GpuProcess(pid=stray.pid, memory_mib=700),)
        await until(lambda: allocator.devices["GPU-1"].strays, "the stray")
        text = await scrape(running)
    await running.stop()
    await allocator.stop()
    for line in (
        "gpupool_agent_connected 1.0",
        "gpupool_agent_epoch 3.0",
        'gpupool_agent_assignments{state="prepared"} 1.0',
        'gpupool_agent_devices{state="clean"} 1.0',
        'gpupool_agent_devices{state="unclean"} 1.0',
        'gpupool_agent_gpu_utilization_percent{uuid="GPU-0"} 7.0',
        'gpupool_agent_strays{cause="no_lease"} 1.0',
        'gpupool_agent_strays{cause="over_memory"} 0.0',
        "gpupool_agent_adopted_processes 0.0",
        "gpupool_agent_processes_stopped_total 0.0",
    ):
        assert line in text.splitlines()
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed, so the format was not linted")
    lint = await asyncio.to_thread(
        subprocess.run, [promtool, "check", "metrics"], input=text, text=True, capture_output=True
    )
    assert lint.returncode == 0, lint.stderr
