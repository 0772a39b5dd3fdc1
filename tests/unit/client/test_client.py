"""The same SDK for programs without an event loop."""

import asyncio
import gc
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.client.conftest import PoolThread
from tests.unit.client.small_pool import unclaimed

from gpupool import Client
from gpupool.cli.main import run_with
from gpupool.errors import InvalidRequestError, NoCapacityError
from gpupool.model.errors import ErrorKind
from gpupool.model.lease import LeaseState
from gpupool.sdk.loop_thread import CANCEL_GRACE_S


def test_the_readmes_one_liner_grants_and_releases(pool_thread: PoolThread) -> None:
    with Client(pool_thread.pool.address).lease(gpus=2, level="node") as lease:
        assert lease.state is LeaseState.ACTIVE
        assert lease.env["CUDA_VISIBLE_DEVICES"] == "GPU-0"
        lease_id = lease.id
    assert pool_thread.pool.state_of(lease_id) is LeaseState.RELEASED


def test_many_threads_share_a_client(pool_thread: PoolThread) -> None:
    with Client(pool_thread.pool.address) as client, ThreadPoolExecutor(8) as threads:

        def use() -> str:
            with client.lease(gpus=1) as lease:
                return lease.id

        used = [future.result() for future in [threads.submit(use) for _ in range(16)]]
        assert len(set(used)) == 16
        assert list(client.list_leases()) == []


def test_errors_are_those_of_the_async_client(pool_thread: PoolThread) -> None:
    with Client(pool_thread.pool.address) as client:
        with pytest.raises(NoCapacityError):
            client.acquire(gpus=9, wait=0)
        with pytest.raises(InvalidRequestError, match="address"):
            Client("nowhere")


def test_changes_are_an_iterator_that_can_be_left(pool_thread: PoolThread) -> None:
    with Client(pool_thread.pool.address) as client, client.lease(gpus=1) as lease:
        changes = lease.changes()
        assert next(changes).state is LeaseState.ACTIVE
        ended = replace(pool_thread.pool.leases[lease.id], state=LeaseState.PREEMPTED)
        pool_thread.run(lambda: pool_thread.pool.set(ended))
        assert [state.state for state in changes] == [LeaseState.PREEMPTED]
        assert next(iter(client.events())).sequence == 1


def test_unclaimed_work_is_listed_and_ended(pool_thread: PoolThread) -> None:
    pool_thread.pool.unclaimed = [unclaimed("n1", 0)]
    with Client(pool_thread.pool.address) as client:
        assert [found.lease_id for found in client.unclaimed()] == ["l-old"]
        client.end_unclaimed("n1", "l-old")
        assert list(client.unclaimed()) == []


def test_the_command_lists_unclaimed_work_and_ends_it(
    pool_thread: PoolThread, capsys: pytest.CaptureFixture[str]
) -> None:
    pool_thread.pool.unclaimed = [unclaimed("n1", 0), replace(unclaimed("n1", 1), ending=True)]

    def call(*words: str) -> tuple[int, str, str]:
        code = run_with(["unclaimed", *words, "--address", pool_thread.pool.address])
        return code, *capsys.readouterr()

    code, output, errors = call("list")
    assert (code, errors) == (0, "")
    assert output.splitlines() == [
        "NODE  LEASE  RANK   UID  STATE   DEVICES",
        "n1    l-old     0  1001  kept    GPU-0",
        "n1    l-old     1  1001  ending  GPU-1",
    ]
    first, second = json.loads(call("list", "-o", "json")[1])
    assert (first["node_id"], first["rank"], first["ending"]) == ("n1", 0, False)
    assert second["place"]["devices"][0]["device_uuid"] == "GPU-1"
    assert call("end", "n1", "l-old") == (0, "l-old on n1 is ending\n", "")
    code, output, errors = call("end", "n1", "l-old")
    assert (code, output) == (ErrorKind.NOT_FOUND.value.exit_code, "")
    assert "nothing to end" in errors


def test_a_client_that_nobody_refers_to_ends_its_thread(pool_thread: PoolThread) -> None:
    before = threading.active_count()
    client = Client(pool_thread.pool.address)
    assert client.pool().nodes == 1
    del client
    gc.collect()
    assert threading.active_count() == before


@pytest.mark.parametrize("scheduled", [False, True])
def test_an_interrupt_between_asking_and_waiting_gives_up_what_was_asked(
    pool_thread: PoolThread, monkeypatch: pytest.MonkeyPatch, scheduled: bool
) -> None:
    ask = asyncio.run_coroutine_threadsafe

    def interrupted(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", ask)
        if scheduled:
            ask(work, loop)
        else:
            work.close()
        raise KeyboardInterrupt

    with Client(pool_thread.pool.address) as client:
        events = client.events(after=0, follow=True)
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
        asked = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            next(events)
        assert time.monotonic() - asked < CANCEL_GRACE_S / 2


def test_importing_the_package_loads_neither_grpc_nor_the_sdk() -> None:
    code = (
        "import gpupool, gpupool.model.lease, sys; print([m for m in sys.modules if 'grpc' in m])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
