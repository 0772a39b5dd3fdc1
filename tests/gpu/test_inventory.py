"""What the agent says of the GPUs, and what nvidia-smi says of them."""

from pathlib import Path

import pytest
from tests.host_pool.machines import Machine
from tests.host_pool.pool import HostPool, host_pool
from tests.host_pool.smi import read_smi

ROUNDING_MIB = 1
"""nvidia-smi rounds total and reserve each on its own."""

RECORDED = ("a100-sxm4-v12", "a10g", "gtx-1070-ti", "rtx-3080-v13")


def test_the_agents_inventory_is_that_of_nvidia_smi(machine: Machine, folder: Path) -> None:
    with host_pool(machine, folder) as pool:
        assert pool.client is not None
        [node] = pool.client.nodes()
        told = {each.uuid: each for each in node.inventory.devices if each.parent_uuid is None}
        instances = [each for each in node.inventory.devices if each.parent_uuid is not None]
        expected = pool.smi()
        assert expected
        for gpu in expected:
            own = [each for each in instances if each.parent_uuid == gpu.uuid]
            assert len(own) == (gpu.mig_instances if gpu.mig_enabled else 0)
            # A GPU that is divided into instances is not leased itself.
            assert (gpu.uuid in told) == (not gpu.mig_enabled)
            if gpu.mig_enabled:
                continue
            device = told[gpu.uuid]
            assert (device.model, device.pci_address) == (gpu.name, gpu.pci_address)
            assert device.serial == ("" if gpu.serial == "N/A" else gpu.serial)
            if gpu.memory_total_mib is None:
                assert device.memory_mib is None
            else:
                usable_mib = gpu.memory_total_mib - gpu.memory_reserved_mib
                assert device.memory_mib is not None
                assert abs(device.memory_mib - usable_mib) <= ROUNDING_MIB
        assert set(told) <= {gpu.uuid for gpu in expected}


def listed(pool: HostPool) -> dict[str, set[int]]:
    """Processes by GPU, as our driver code lists them."""
    return {uuid: set(pids or ()) for uuid, pids in pool.listing()["pids"].items()}


def test_processes_and_compute_modes_are_those_of_nvidia_smi(
    machine: Machine, folder: Path
) -> None:
    with host_pool(machine, folder, mps_exclusive="false") as pool:
        holder = pool.holder()
        held = holder.acquire(gpus=0.1, memory=2048)
        clients = [
            pool.cuda_client(held.environment, "--memory-mib", "128"),
            pool.cuda_client(held.environment, "--memory-mib", "256"),
        ]
        smi = {each.uuid: each for each in pool.smi()}
        ours = listed(pool)
        assert {client.process.pid for client in clients} <= ours[held.devices[0]]
        assert ours == {uuid: set(smi[uuid].pids) for uuid in ours}
        modes = pool.listing()["compute_modes"]
        assert modes == {uuid: smi[uuid].compute_mode for uuid in modes}
        for client in clients:
            client.leave()
        holder.release(held)
        assert not listed(pool)[held.devices[0]] & {each.process.pid for each in clients}


@pytest.mark.parametrize("name", RECORDED)
def test_listings_of_real_hosts_are_read(name: str, shared: Path) -> None:
    import gzip

    file = shared / "data" / "host_topology" / "nvidia_smi_xml" / f"{name}.xml.gz"
    if not file.exists():
        pytest.skip(f"no recording {name}")
    gpus = read_smi(gzip.decompress(file.read_bytes()).decode())
    assert gpus
    for gpu in gpus:
        assert gpu.uuid.startswith("GPU-")
        assert gpu.name
        assert gpu.memory_total_mib
        assert gpu.compute_mode in {"default", "exclusive_process", "prohibited"}
        assert gpu.pci_address.count(":") == 2
        assert gpu.pci_address == gpu.pci_address.lower()
    assert gpus[0].mig_enabled == (name == "a100-sxm4-v12")
