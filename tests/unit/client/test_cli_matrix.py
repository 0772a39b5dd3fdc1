"""gpupool gpus --matrix: how a node's GPUs and adapters are joined."""

from gpupool.cli.matrix import joint, matrix_data, matrix_table, rows_of
from gpupool.model.ids import DeviceUuid, NodeId
from gpupool.model.inventory import Device, Hca, HcaPort, NodeInventory
from gpupool.model.views import NodeState, NodeView

SWITCH = "pci0000:15/0000:15:01.0/0000:16:00.0"


def gpu(index: int, address: str, path: str = "", *, numa_node: int = 0, **peers: int) -> Device:
    named = {name.replace("_", ":").replace("zero", ".0"): links for name, links in peers.items()}
    return Device(
        uuid=DeviceUuid(f"GPU-{index}"),
        model="H100",
        index=index,
        pci_address=address,
        pci_path=path,
        numa_node=numa_node,
        cpus="0-55,112-167",
        nvlink_peers=named,
    )


def nic(name: str, address: str, path: str, numa_node: int = 0) -> Hca:
    port = HcaPort(number=1, port_guid="0" * 16, state="ACTIVE", rate_mbps=400_000, rail=2)
    return Hca(
        name=name,
        node_guid="0" * 16,
        pci_address=address,
        pci_path=path,
        numa_node=numa_node,
        ports=(port,),
    )


def node(devices: tuple[Device, ...], hcas: tuple[Hca, ...] = ()) -> NodeView:
    return NodeView(
        node_id=NodeId("n1"),
        state=NodeState.CONNECTED,
        boot_id="b",
        agent_version="0",
        inventory=NodeInventory(devices=devices, hcas=hcas),
        last_seen_unix_s=0.0,
        free_cpu_milli=0,
        free_host_memory_mib=0,
    )


NODE = node(
    (
        gpu(1, "0000:43:00.0", "pci0000:3d/0000:3d:01.0", nvswitch=16),
        gpu(0, "0000:1b:00.0", f"{SWITCH}/0000:17:02.0", nvswitch=18),
    ),
    (
        nic("mlx5_0", "0000:18:00.0", f"{SWITCH}/0000:17:00.0"),
        nic("mlx5_1", "0000:9a:00.0", "pci0000:97/0000:97:01.0", numa_node=1),
    ),
)


def test_the_matrix_is_that_of_nvidia_smi() -> None:
    assert matrix_table(NODE).splitlines() == [
        "node n1",
        "-     GPU0  GPU1  NIC0  NIC1  CPU AFFINITY  NUMA",
        "GPU0  X     NV16  PIX   SYS   0-55,112-167  0",
        "GPU1  NV16  X     NODE  SYS   0-55,112-167  0",
        "NIC0  PIX   NODE  X     SYS   -             0",
        "NIC1  SYS   SYS   SYS   X     -             1",
        "NIC0: mlx5_0 (InfiniBand ACTIVE 400 Gb/s rail 2)",
        "NIC1: mlx5_1 (InfiniBand ACTIVE 400 Gb/s rail 2)",
    ]


def test_programs_get_it_with_names_of_the_protos() -> None:
    [data] = matrix_data([NODE])
    assert data["node_id"] == "n1"
    assert data["rows"][0] == {
        "name": "GPU0",
        "uuid": "GPU-0",
        "pci_address": "0000:1b:00.0",
        "numa_node": 0,
        "cpus": "0-55,112-167",
        "joined": {"GPU0": "X", "GPU1": "NV16", "NIC0": "PIX", "NIC1": "SYS"},
    }
    assert data["rows"][3]["hca"] == "mlx5_1"


def test_gpus_joined_by_a_bridge_have_its_links_and_no_others() -> None:
    one = gpu(0, "0000:01:00.0", "pci0000:00/0000:00:01.0", **{"0000_02_00zero": 4})
    two = gpu(1, "0000:02:00.0", "pci0000:00/0000:00:02.0", **{"0000_01_00zero": 4})
    three = gpu(2, "0000:03:00.0", "pci0000:00/0000:00:03.0")
    assert (joint(one, two), joint(one, three)) == ("NV4", "PHB")


def test_mig_instances_of_a_gpu_are_one_row() -> None:
    parent = gpu(0, "0000:01:00.0")
    twin = Device(uuid=DeviceUuid("MIG-2"), model="m", index=0, pci_address="0000:01:00.0")
    assert [row.name for row in rows_of(node((parent, twin)))] == ["GPU0"]


def test_nothing_known_is_far_and_no_error() -> None:
    bare = (
        Device(uuid=DeviceUuid("GPU-a"), model="m", index=0),
        Device(uuid=DeviceUuid("GPU-b"), model="m", index=1),
    )
    assert matrix_table(node(bare)).splitlines()[2] == "GPU0  X     SYS   -             -"
