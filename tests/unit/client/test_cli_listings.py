"""What listings say of names that are not there, of GPUs that are lost, of leases that expire."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.client.conftest import PoolThread
from tests.unit.client.small_pool import device

from gpupool import Client
from gpupool.cli.gpus import DEVICES
from gpupool.cli.main import run_with
from gpupool.cli.output import table
from gpupool.model.errors import ErrorKind
from gpupool.model.ids import NodeId
from gpupool.model.views import DeviceState, DeviceView

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(pool_thread: PoolThread, capsys: pytest.CaptureFixture[str]) -> Call:
    def called(*words: str) -> tuple[int, str, str]:
        code = run_with([*words, "--address", pool_thread.pool.address])
        return code, *capsys.readouterr()

    return called


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("gpus", "--node"), "node"),
        (("gpus", "--matrix", "--node"), "node"),
        (("lease", "list", "--node"), "node"),
        (("events", "--subject"), "subject"),
    ],
)
@pytest.mark.parametrize("output", ["table", "json"])
def test_a_name_that_the_pool_does_not_know_is_an_error(
    call: Call, words: tuple[str, ...], field: str, output: str
) -> None:
    code, printed, errors = call(*words, "node-2", "-o", output)
    assert (code, printed) == (ErrorKind.NOT_FOUND.value.exit_code, "")
    assert errors == f"gpupool: {field}: 'node-2' is not known to the pool; near it: node-1\n"
    code, _, errors = call(*words, "qqqq", "-o", output)
    assert code == ErrorKind.NOT_FOUND.value.exit_code
    assert errors == f"gpupool: {field}: 'qqqq' is not known to the pool\n"


def test_a_known_name_with_nothing_to_list_is_an_empty_listing(call: Call) -> None:
    for words in (("lease", "list", "--node"), ("events", "--subject")):
        code, printed, errors = call(*words, "node-1", "-o", "json")
        assert (code, json.loads(printed), errors) == (0, [], "")


def test_a_subject_of_history_alone_is_known(call: Call, pool_thread: PoolThread) -> None:
    pool_thread.pool.note("node.connected", "a-node-of-old")
    assert call("events", "--subject", "a-node-of-old")[0] == 0
    # There is nothing after it: still no wrong name.
    assert call("events", "--subject", "a-node-of-old", "--after", "1")[0] == 0


def test_of_a_gpu_that_is_lost_nothing_is_free() -> None:
    there = DeviceView(
        device=device(0),
        node_id=NodeId("node-1"),
        state=DeviceState.FREE,
        reasons=(),
        free_share_pct=100,
        free_memory_mib=81559,
        lease_ids=(),
        uid=None,
        strays=(),
    )
    gone = replace(there, state=DeviceState.UNAVAILABLE, reasons=("missing from its node",))
    leased = replace(there, state=DeviceState.SLICED, free_share_pct=70, last_seen_unix_s=1.7e9)
    rows = [line.split() for line in table(DEVICES.columns, [there, gone, leased]).splitlines()]
    assert [row[6:8] for row in rows[1:]] == [["100%", "81559"], ["-", "-"], ["-", "-"]]


def test_a_lease_with_a_ttl_shows_when_it_expires(call: Call, pool_thread: PoolThread) -> None:
    with Client(pool_thread.pool.address) as client:
        lease = client.acquire(gpus=1, ttl="10m")
        held = pool_thread.pool.leases[lease.id]
        pool_thread.pool.leases[lease.id] = replace(held, expire_unix_s=1_800_000_000.0)
        printed = call("lease", "show", lease.id)[1]
        assert "expires:     2027-01-15 08:00:00Z unless it is renewed\n" in printed
        assert json.loads(call("lease", "show", lease.id, "-o", "json")[1])["expire_time"] == (
            "2027-01-15T08:00:00Z"
        )
        lease.release()
        ended = replace(pool_thread.pool.leases[lease.id], expire_unix_s=None, end_unix_s=1.8e9)
        pool_thread.pool.leases[lease.id] = ended
        assert "ended:       2027-01-15 08:00:00Z\n" in call("lease", "show", lease.id)[1]
