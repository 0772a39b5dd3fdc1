"""Described machines: complete, checked, and the same hardware at each start."""

import pytest

from gpupool_agent.simulated.machine import (
    MachineError,
    custom_machine,
    gpu_uuid,
    hca_guid,
    load_machine,
    machine_names,
    parse_machine,
)

EXPECTED_GPUS = {
    "dgx-a100": 8,
    "dgx-h100": 8,
    "gb10": 1,
    "gb200-tray": 4,
    "hgx-b200": 8,
    "pcie-l40s": 4,
}


def test_every_described_machine_is_valid_and_has_its_gpus() -> None:
    assert {name: len(load_machine(name).slots) for name in machine_names()} == EXPECTED_GPUS


@pytest.mark.parametrize("name", machine_names())
def test_identities_follow_from_the_node_id_and_are_unique(name: str) -> None:
    machine = load_machine(name)

    def identities(node_id: str) -> list[str]:
        gpus = [gpu_uuid(node_id, slot) for slot in machine.slots]
        return gpus + [hca_guid(node_id, hca) for hca in machine.hcas]

    assert identities("a") == identities("a")
    together = identities("a") + identities("b")
    assert len(set(together)) == len(together)
    assert all(len(guid) == 16 for guid in identities("a") if not guid.startswith("GPU-"))


def test_new_silicon_in_an_old_slot_has_a_new_uuid() -> None:
    slot = load_machine("dgx-h100").slots[0]
    assert gpu_uuid("n", slot, 0) != gpu_uuid("n", slot, 1)


def test_a_machine_that_is_not_described_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(MachineError, match=r"'dgx-z100'.*dgx-a100, dgx-h100"):
        load_machine("dgx-z100")


VALID = """
name = "m"
driver_version = "1"
cuda_driver_version = 12000
cpu_milli = 1000
host_memory_mib = 1024
[gpu]
name = "G"
memory_total_mib = 1000
[[slot]]
pci_address = "0000:01:00.0"
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cpu_milli = 1000", "cpu_milli = -1", r"cpu_milli is -1; accepted are 0 to"),
        ("cpu_milli = 1000", 'cpu_milli = "x"', r"machine\.cpu_milli is 'x'; accepted is a whole"),
        ("cpu_milli = 1000", "cpu_milli = true", r"accepted is a whole number"),
        ("cpu_milli = 1000", "", r"machine\.cpu_milli is missing"),
        ('name = "G"', 'name = "G"\ncolour = 1', r"gpu\.colour is no key"),
        ("= 1000\n[[", "= 0\n[[", r"memory_total_mib is 0; accepted are 1 to"),
        ("[[slot]]", '[fabric]\nstate = "odd"\n[[slot]]', r"fabric\.state 'odd' is not one of"),
        ("[[slot]]", '[[slot]]\npci_address = "0000:01:00.0"\n[[slot]]', r"the same address"),
        ('name = "m"', "name = ", r"not TOML"),
    ],
)
def test_a_bad_description_is_refused_by_its_key(old: str, new: str, message: str) -> None:
    parse_machine(VALID)
    with pytest.raises(MachineError, match=message):
        parse_machine(VALID.replace(old, new, 1))


def test_a_host_of_a_trace_may_have_gpus_of_unknown_memory() -> None:
    machine = custom_machine(
        model="G2", gpus=2, memory_mib=None, cpu_milli=96000, host_memory_mib=786432
    )
    assert machine.name == "custom"
    assert len(machine.slots) == 2
    assert machine.gpu.memory_total_mib is None
