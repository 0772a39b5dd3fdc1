"""CDI specs: what is in one, and that they come and go with their leases."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.agent_bench import assignment, key, whole

from gpupool.model.ids import LeaseId
from gpupool_agent.containers import LeaseSpecs
from gpupool_agent.core.cdi import CdiMember, reference, spec_document
from gpupool_agent.core.environment import IMEX_CHANNEL, IMEX_CHANNELS
from gpupool_agent.devices.cdi import CdiDirectory
from gpupool_agent.devices.privileged import NotPermittedError, PrivilegedError
from gpupool_agent.helper.cdi import Mountable, checked_spec

SCHEMA = json.loads(Path(__file__).with_name("cdi.schema.json").read_text())
WHOLE = {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1", "GPUPOOL_LEASE_ID": "l-a"}
SLICE = {
    "CUDA_VISIBLE_DEVICES": "GPU-0",
    "CUDA_MPS_PIPE_DIRECTORY": "/run/gpupool-mps/1a2b3c4d/pipe",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10",
}


def member(environment: dict[str, str], *gpus: str, rank: int = 0) -> CdiMember:
    return CdiMember(key=key("l-a", rank), environment=environment, gpus=gpus)


def valid(document: dict[str, Any]) -> dict[str, Any]:
    jsonschema.validate(document, SCHEMA)
    return document


def test_the_spec_of_whole_gpus_brings_the_environment_and_names_the_gpus() -> None:
    document = valid(spec_document(LeaseId("l-a"), [member(WHOLE, "GPU-0", "GPU-1")]))
    assert document["kind"] == "gpupool.io/lease"
    [device] = document["devices"]
    assert device["name"] == "l-a"
    assert device["annotations"] == {
        "gpupool.io/devices": "nvidia.com/gpu=GPU-0,nvidia.com/gpu=GPU-1"
    }
    assert device["containerEdits"] == {
        "env": [
            "CUDA_VISIBLE_DEVICES=GPU-0,GPU-1",
            "GPUPOOL_LEASE_ID=l-a",
            "NVIDIA_VISIBLE_DEVICES=void",
        ]
    }


def test_the_spec_of_a_slice_brings_its_mps_daemon_and_the_shared_memory() -> None:
    document = valid(spec_document(LeaseId("l-a"), [member(SLICE, "GPU-0")]))
    mounts = document["devices"][0]["containerEdits"]["mounts"]
    assert [(each["hostPath"], each["containerPath"]) for each in mounts] == [
        ("/run/gpupool-mps/1a2b3c4d/pipe",) * 2,
        ("/dev/shm",) * 2,
    ]
    assert all("bind" in each["options"] for each in mounts)


def test_the_spec_of_gpus_in_an_nvlink_domain_brings_the_imex_channel() -> None:
    channel = f"{IMEX_CHANNELS}/channel0"
    document = valid(spec_document(LeaseId("l-a"), [member({**WHOLE, IMEX_CHANNEL: channel}, "G")]))
    edits = document["devices"][0]["containerEdits"]
    assert edits["deviceNodes"] == [{"path": channel}]
    assert f"{IMEX_CHANNEL}={channel}" in edits["env"]


@pytest.mark.parametrize(
    "environment", [WHOLE, SLICE, {**WHOLE, IMEX_CHANNEL: f"{IMEX_CHANNELS}/channel2047"}]
)
def test_the_root_helper_lets_through_what_the_agent_writes(environment: dict[str, str]) -> None:
    document = spec_document(LeaseId("l-a"), [member(environment, "GPU-0", rank=1)])
    mountable = Mountable(mps_dir=Path("/run/gpupool-mps"), paths=(Path("/dev/shm"),))
    assert json.loads(checked_spec(json.dumps(document), mountable)) == document


def test_members_on_one_node_have_devices_of_their_own() -> None:
    members = [member(WHOLE, "GPU-1", rank=3), member(WHOLE, "GPU-0")]
    document = valid(spec_document(LeaseId("l-a"), members))
    assert [device["name"] for device in document["devices"]] == ["l-a", "l-a.3"]
    assert reference(key("l-a", 3)) == "gpupool.io/lease=l-a.3"


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("kind"),
        lambda document: document.update(colour="green"),
        lambda document: document.update(cdiVersion="0.5.0"),
        lambda document: document["devices"].clear(),
        lambda document: document["devices"][0].update(name="-l"),
        lambda document: document["devices"][0]["containerEdits"]["env"].append("1=2"),
        lambda document: document["devices"][0]["containerEdits"].update(mounts=[{}]),
    ],
)
def test_the_schema_tells_wrong_specs_apart(change: Callable[[dict[str, Any]], object]) -> None:
    document = spec_document(LeaseId("l-a"), [member(SLICE, "GPU-0")])
    change(document)
    with pytest.raises(jsonschema.ValidationError):
        valid(document)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# -- where they are kept --------------------------------------------------------


class Kept:
    """Specs in a directory, and what went wrong with them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.troubles: list[str] = []
        self.specs = LeaseSpecs(CdiDirectory(directory), self.troubles.append)

    async def write(self, lease: str, rank: int = 0) -> dict[str, str]:
        made = assignment(lease, 1, whole(0), rank=rank)
        return await self.specs.write(made, lambda more: {"CUDA_VISIBLE_DEVICES": "GPU-0", **more})

    async def remove(self, lease: str, rank: int = 0) -> None:
        await self.specs.remove(assignment(lease, 1, whole(0), rank=rank))

    def files(self) -> dict[str, list[str]]:
        return {
            path.name: [each["name"] for each in valid(json.loads(path.read_text()))["devices"]]
            for path in sorted(self.directory.iterdir())
        }


async def test_a_spec_comes_with_its_lease_and_goes_with_its_last_member(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "cdi")
    assert await kept.write("l-a") == {"GPUPOOL_CDI_DEVICE": "gpupool.io/lease=l-a"}
    await kept.write("l-a", rank=1)
    await kept.write("l-b")
    assert kept.files() == {
        "gpupool-lease-l-a.json": ["l-a", "l-a.1"],
        "gpupool-lease-l-b.json": ["l-b"],
    }
    await kept.remove("l-a")
    assert kept.files()["gpupool-lease-l-a.json"] == ["l-a.1"]
    await kept.remove("l-a", rank=1)
    await kept.remove("l-b")
    await kept.remove("l-b")
    assert kept.files() == {}
    assert set(kept.troubles) == {""}


async def test_what_a_dead_agent_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    before = Kept(tmp_path)
    for lease in ("l-gone", "l-kept"):
        await before.write(lease)
    (tmp_path / "nvidia.yaml").write_text("of the driver\n")
    after = Kept(tmp_path)
    await after.specs.sweep(lambda: {LeaseId("l-kept")})
    assert names_in(tmp_path) == ["gpupool-lease-l-kept.json", "nvidia.yaml"]


async def test_a_spec_that_cannot_be_written_is_told_and_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    kept = Kept(tmp_path / "file")
    assert await kept.write("l-a") == {}
    assert "Not a directory" in kept.troubles[-1] or "File exists" in kept.troubles[-1]
    (tmp_path / "file").unlink()
    assert await kept.write("l-a")
    assert kept.troubles[-1] == ""


async def test_a_lease_id_cannot_leave_the_directory(tmp_path: Path) -> None:
    store = CdiDirectory(tmp_path / "cdi")
    for lease_id in ("../evil", "a/b", "", ".hidden"):
        with pytest.raises(PrivilegedError):
            await store.write_cdi(LeaseId(lease_id), b"{}")
    assert names_in(tmp_path) == []


class Refusing:
    """A store whose helper is away."""

    async def write_cdi(self, lease_id: LeaseId, spec: bytes) -> None:  # noqa: ARG002
        raise NotPermittedError("no helper")

    async def remove_cdi(self, lease_id: LeaseId) -> None:  # noqa: ARG002
        raise NotPermittedError("no helper")

    async def cdi_leases(self) -> tuple[LeaseId, ...]:
        raise NotPermittedError("no helper")


async def test_without_a_helper_leases_begin_and_end_all_the_same() -> None:
    troubles: list[str] = []
    specs = LeaseSpecs(Refusing(), troubles.append)
    made = assignment("l-a", 1, whole(0))
    await specs.sweep(set)
    assert await specs.write(made, lambda more: more) == {}
    await specs.remove(made)
    assert troubles == ["no helper"] * 3


async def test_a_node_that_writes_none_adds_nothing() -> None:
    specs = LeaseSpecs(None, lambda _: None)
    made = assignment("l-a", 1, whole(0))
    assert await specs.write(made, lambda more: more) == {}
    await specs.remove(made)
    await specs.sweep(set)
