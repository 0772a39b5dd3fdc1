"""Stores that past releases left are read by this tree, and run on."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from tests.compat.recording import LEASES, STORE, STORE_BYTES_MAX, summary_of

from gpupool.model.lease import ENDED, Lease
from gpupool_allocator.core.pool import Pool
from gpupool_allocator.core.settings import PoolSettings
from gpupool_allocator.storage import records
from gpupool_allocator.storage.sqlite import SqliteStore

COMPAT = Path(__file__).resolve().parents[1] / "compat"
VERSIONS = [
    row["version"]
    for row in tomllib.loads((COMPAT / "releases.toml").read_text()).get("release", [])
]


@pytest.mark.parametrize("version", VERSIONS)
def test_an_upgraded_allocator_knows_everything_that_the_old_one_stored(
    version: str, tmp_path: Path
) -> None:
    shutil.copy(COMPAT / version / STORE, tmp_path / STORE)
    store = SqliteStore(tmp_path / STORE, max_bytes=STORE_BYTES_MAX, reserve_bytes=0)
    try:
        epoch = store.begin_term()
        loaded = [records.decode(value) for value in store.load()]
        _, last = store.bounds()
        events = store.read(after_sequence=0, limit=1000)
    finally:
        store.close()
    assert [event.sequence for event in events] == list(range(1, last + 1))
    expected = json.loads((COMPAT / version / LEASES).read_text())
    leases = {record.lease_id: record for record in loaded if isinstance(record, Lease)}
    assert {key: summary_of(lease) for key, lease in leases.items()} == expected

    pool = Pool(PoolSettings(), epoch=epoch, last_sequence=last)
    for record in loaded:
        pool.restore(record)
    pool.start(now=0.0, unix_s=1.8e9)
    pool.check()
    running = [lease for lease in leases.values() if lease.state not in ENDED]
    assert len(pool.leases(limit=1000)) == len(running)
    assert pool.summary().nodes == 3
    assert len(pool.holds()) == 1
