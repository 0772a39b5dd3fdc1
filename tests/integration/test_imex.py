"""Hosts of an NVLink domain: the IMEX channel is in a lease's environment and in its CDI spec."""

import json
from pathlib import Path

import jsonschema
from tests.e2e.pool_fixture import Pool, running_pool, whole

from gpupool.v1 import resources_pb2

SCHEMA = json.loads((Path(__file__).parents[1] / "unit" / "agent" / "cdi.schema.json").read_text())
CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"


def spec_of(pool: Pool, node: str, lease: resources_pb2.Lease) -> dict[str, object]:
    """What a container of the lease gets on a node."""
    directory = pool.fleet.folder / "control" / "nodes" / node / "cdi"
    document = json.loads((directory / f"gpupool-lease-{lease.lease_id}.json").read_text())
    jsonschema.validate(document, SCHEMA)
    [device] = document["devices"]
    edits: dict[str, object] = device["containerEdits"]
    return edits


def test_a_lease_in_an_nvlink_domain_has_the_channel_and_others_have_none(tmp_path: Path) -> None:
    with running_pool(tmp_path) as pool:
        pool.add_fleet("gb200-tray:g1,domain=rack", "dgx-h100:h1", flags=("--cdi",))
        joined = pool.calls.acquire("a", whole(2, models=("NVIDIA GB200",)))
        assert joined.members[0].environment["GPUPOOL_IMEX_CHANNEL"] == CHANNEL
        assert spec_of(pool, "g1", joined)["deviceNodes"] == [{"path": CHANNEL}]
        alone = pool.calls.acquire("b", whole(2, models=("NVIDIA H100 80GB HBM3",)))
        assert "GPUPOOL_IMEX_CHANNEL" not in alone.members[0].environment
        assert "deviceNodes" not in spec_of(pool, "h1", alone)
        for lease in (joined, alone):
            pool.calls.release(lease.lease_id)
        pool.drain()
