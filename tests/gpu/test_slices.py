"""MPS slices on a host, through its agent, root helper and daemons, as their clients see them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.host_pool.machines import Machine
from tests.host_pool.pool import HostPool, host_pool, until
from tests.host_pool.smi import SmiGpu

Record = Callable[[str, object], None]

SHARES_PCT = (20, 30)
MEMORY_MIB = (3072, 4096)
OVERHEAD_MIB_MAX = 1024
"""What a context may take of a slice's memory before the first allocation."""


def gpu_of(pool: HostPool, uuid: str) -> SmiGpu:
    return next(each for each in pool.smi() if each.uuid == uuid)


def test_two_slices_side_by_side_see_their_multiprocessors_and_their_memory(
    machine: Machine, folder: Path, record_property: Record
) -> None:
    with host_pool(machine, folder, mps_exclusive="false") as pool:
        holder = pool.holder()
        whole = {each.device.uuid: each.device.sm_count for each in pool.devices()}
        held = [
            holder.acquire(gpus=share / 100, memory=memory)
            for share, memory in zip(SHARES_PCT, MEMORY_MIB, strict=True)
        ]
        assert len({each.devices[0] for each in held}) == 1
        [uuid] = {each.devices[0] for each in held}
        # Both at once, so that each is told what is its own and not what is left.
        clients = [
            pool.cuda_client(each.environment, "--until-refused", "--step-mib", "64")
            for each in held
        ]
        for client, each, share, memory in zip(clients, held, SHARES_PCT, MEMORY_MIB, strict=True):
            said = client.said
            assert said["devices"] == 1
            # Rounded down to what the hardware can divide, and told as it is.
            assert 0 < said["sm_count"] <= whole[uuid] * share // 100
            assert said["sm_count"] == each.sm_count
            assert memory - OVERHEAD_MIB_MAX <= said["memory_mib"] <= memory
            record_property(f"multiprocessors of {share} %", said["sm_count"])
            record_property(f"MiB got of {memory}", said["memory_mib"])
        pids = {client.process.pid for client in clients}
        assert pids <= gpu_of(pool, uuid).pids
        assert pids <= set(pool.listing()["pids"][uuid])
        assert [client.leave() for client in clients] == [0, 0]
        record_property("first slice ready, ms", round(held[0].ready_ms))
        record_property("second slice ready, ms", round(held[1].ready_ms))
        record_property("second slice ended, ms", round(holder.release(held[1])))
        record_property("last slice ended, ms", round(holder.release(held[0])))
        assert pool.left() == []
        until(pool.all_offered, "the GPU to be offered again")


def test_a_slice_of_a_user_without_rights_is_that_users(machine: Machine, folder: Path) -> None:
    with host_pool(machine, folder, mps_exclusive="false") as pool:
        users = pool.users
        if not users.slices:
            pytest.skip("other users cannot reach this interpreter")
        holder = pool.holder()
        assert holder.said["uid"] == users.slices
        held = holder.acquire(gpus=0.1, memory=2048)
        client = pool.cuda_client(held.environment)
        assert Path(f"/proc/{client.process.pid}").stat().st_uid == users.slices
        assert pool.device(held.devices[0]).uid == users.slices
        # The pipe directory is the way in: nobody else's process gets through it.
        pipe = Path(held.environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert pipe.stat().st_uid == 0
        assert pipe.stat().st_mode & 0o007 == 0
        client.leave()
        holder.release(held)
        assert pool.left() == []


def test_an_option_leaves_the_compute_mode_as_it_is_found(machine: Machine, folder: Path) -> None:
    with host_pool(machine, folder, mps_exclusive="false") as pool:
        found = {each.uuid: each.compute_mode for each in pool.smi()}
        holder = pool.holder()
        held = holder.acquire(gpus=0.1, memory=2048)
        client = pool.cuda_client(held.environment)
        assert {each.uuid: each.compute_mode for each in pool.smi()} == found
        client.leave()
        holder.release(held)
        assert {each.uuid: each.compute_mode for each in pool.smi()} == found


def test_a_gpu_with_slices_is_exclusive_and_gets_its_mode_back(
    exclusive_machine: Machine, folder: Path
) -> None:
    with host_pool(exclusive_machine, folder) as pool:
        found = {each.uuid: each.compute_mode for each in pool.smi()}
        holder = pool.holder()
        held = holder.acquire(gpus=0.1, memory=2048)
        [uuid] = held.devices
        client = pool.cuda_client(held.environment)
        assert gpu_of(pool, uuid).compute_mode == "exclusive_process"
        assert pool.listing()["compute_modes"][uuid] == "exclusive_process"
        # Whoever goes past MPS gets no context.
        around = pool.cuda_client_started({"CUDA_VISIBLE_DEVICES": uuid})
        _, why = around.process.communicate(timeout=60)
        assert around.process.returncode == 1
        assert "cuCtxCreate" in why
        client.leave()
        holder.release(held)
        assert {each.uuid: each.compute_mode for each in pool.smi()} == found
        assert pool.left() == []


def test_a_holder_that_is_killed_leaves_nothing_and_its_gpu_is_offered_again(
    machine: Machine, folder: Path
) -> None:
    with host_pool(machine, folder, mps_exclusive="false") as pool:
        holder = pool.holder()
        held = holder.acquire(gpus=0.1, memory=2048)
        client = pool.cuda_client(held.environment, "--memory-mib", "256")
        holder.kill()
        # Its lease has ended, and so does what runs under it.
        until(lambda: client.process.poll() is not None, "the client to be ended")
        until(pool.all_offered, "the GPU to be offered again")
        assert client.process.pid not in gpu_of(pool, held.devices[0]).pids
        assert pool.left() == []


def test_a_whole_gpu_is_seen_whole(machine: Machine, folder: Path) -> None:
    with host_pool(machine, folder) as pool:
        holder = pool.holder()
        held = holder.acquire(gpus=1)
        [uuid] = held.devices
        client = pool.cuda_client(held.environment, "--memory-mib", "512")
        assert client.said["devices"] == 1
        assert client.said["sm_count"] == pool.device(uuid).device.sm_count
        assert "CUDA_MPS_PIPE_DIRECTORY" not in held.environment
        assert client.process.pid in gpu_of(pool, uuid).pids
        assert client.leave() == 0
        holder.release(held)
        until(pool.all_offered, "the GPU to be offered again")
