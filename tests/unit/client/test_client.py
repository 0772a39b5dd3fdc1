"""The same SDK for programs without an event loop."""

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.unit.client.conftest import PoolThread

from gpupool import Client
from gpupool.errors import InvalidRequestError, NoCapacityError
from gpupool.model.lease import LeaseState


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


def test_a_client_that_nobody_refers_to_ends_its_thread(pool_thread: PoolThread) -> None:
    before = threading.active_count()
    client = Client(pool_thread.pool.address)
    assert client.pool().nodes == 1
    del client
    gc.collect()
    assert threading.active_count() == before


def test_importing_the_package_loads_neither_grpc_nor_the_sdk() -> None:
    code = (
        "import gpupool, gpupool.model.lease, sys; print([m for m in sys.modules if 'grpc' in m])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
