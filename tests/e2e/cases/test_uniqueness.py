"""C04: no GPU goes to two holders, whatever the placement code proposes."""

import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from tests.e2e.pool_fixture import (
    ACTIVE,
    Calls,
    Pool,
    custom,
    details_of,
    drawn,
    part,
    running_pool,
    whole,
)
from tests.integration.allocator_daemon import Daemon

from gpupool.model.request import LeaseSpec
from gpupool.v1 import pool_pb2

CLIENTS = 4
REQUESTS = 30
RESERVED = "reserved"
FORGETFUL = Path(__file__).with_name("forgetful_allocator.py")
ENDINGS = ("lease.released", "lease.expired", "lease.failed")


class ForgetfulDaemon(Daemon):
    """The daemon with a bug in its placement."""

    def launch(self) -> subprocess.Popen[bytes]:
        """Starts it in place of the real one, with the same settings."""
        self.ready.unlink(missing_ok=True)
        flags = [
            part
            for key, value in self._settings.items()
            for part in ("--" + key.replace("_", "-"), str(value))
        ]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, FORGETFUL, *flags, "--ready-file", self.ready], stderr=log
            )
        return self.process


def test_c04_a_place_that_is_proposed_twice_is_refused_with_an_alarm(tmp_path: Path) -> None:
    """C04: the check beside the placement code rejects the commit, raises an alarm, holds."""
    with running_pool(tmp_path, custom("n1", gpus=4), daemon=ForgetfulDaemon, alarms=1) as pool:
        first = pool.calls.acquire("first", whole(1))
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as refused:
                pool.calls.acquire("second", whole(1), wait_s=0)
            assert "internal: " in details_of(refused.value)
        assert pool.alarms() == ['gpupool_alarms_total{code="plan_rejected"} 3.0']
        assert "plan_rejected" in pool.daemon.log()
        assert pool.calls.get(first.lease_id).state == ACTIVE
        assert pool.summary().devices_used == 1
        assert [len(each) for each in pool.fleet.running().values()] == [1]


def _requests(seed: int) -> list[LeaseSpec]:
    """Typed, untyped and reserved requests; whole GPUs, slices and small gangs."""
    draw = drawn(seed)
    made: list[LeaseSpec] = []
    for _ in range(REQUESTS):
        models = draw.choice([(), (), ("h100",), ("l40s",), ("gpu", "l40s")])
        shape = draw.choice(
            [
                whole(1, models=models),
                whole(2, models=models),
                whole(1, replicas=3, models=models),
                part(draw.randrange(10, 101, 10), models=models),
                part(memory_mib=draw.randrange(1_000, 40_000), models=models),
            ]
        )
        tenant = draw.choice(["default", "default", RESERVED])
        made.append(LeaseSpec(groups=shape.groups, tenant=tenant))
    return made


def _keep_busy(calls: Calls, seed: int) -> int:
    """Takes what it can get and gives back about half of it meanwhile; how often it got some."""
    draw = drawn(seed)
    held: list[str] = []
    granted = 0
    for number, spec in enumerate(_requests(seed)):
        try:
            held.append(calls.acquire(f"{seed}-{number}", spec, wait_s=0).lease_id)
            granted += 1
        except grpc.RpcError as refused:
            if refused.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
        if held and draw.random() < 0.5:
            calls.release(held.pop(draw.randrange(len(held))))
    return granted


def test_c04_in_a_busy_pool_of_typed_and_untyped_gpus_each_has_one_holder(tmp_path: Path) -> None:
    """C04: the history of a busy pool shows no GPU granted while others have it."""
    nodes = (
        "dgx-h100:h1",
        custom("l1", gpus=4, model="NVIDIA L40S"),
        custom("u1", gpus=4, model="gpu"),
        custom("u2", gpus=4, model="gpu"),
    )
    with running_pool(tmp_path, *nodes) as pool:
        _reserve(pool, ["u2"])
        connections = [pool.connect() for _ in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as threads:
            granted = list(threads.map(_keep_busy, connections, range(CLIENTS)))
        assert sum(granted) > REQUESTS
        pool.check()
        _assert_unique(pool.events(), {each.device.uuid: each for each in pool.devices()})
        tenants = {lease.spec.tenant for lease in pool.leases(node_id="u2")}
        assert tenants <= {RESERVED}
        _end_reservations(pool)


def _reserve(pool: Pool, nodes: Sequence[str]) -> None:
    for node in nodes:
        hold = pool_pb2.Hold(
            scope=pool_pb2.HOLD_SCOPE_NODE,
            target=node,
            reason="bought by one group",
            allowed_tenants=[RESERVED],
        )
        pool.calls.pool.CreateHold(pool_pb2.CreateHoldRequest(request_id=node, hold=hold))


def _end_reservations(pool: Pool) -> None:
    for hold in pool.calls.pool.ListHolds(pool_pb2.ListHoldsRequest()).holds:
        pool.calls.pool.DeleteHold(pool_pb2.DeleteHoldRequest(hold_id=hold.hold_id))


def _assert_unique(
    events: Sequence[pool_pb2.Event], devices: dict[str, pool_pb2.DeviceStatus]
) -> None:
    """Replays grants and ends in their order, and adds up what each GPU had at every moment.

    A lease of one member has its GPUs until its end; members of a gang end one by one, so
    that theirs are only known to be held until the end begins.
    """
    holders: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    gangs: set[str] = set()
    grants = 0
    for event in events:
        if event.kind in ENDINGS or (event.kind == "lease.releasing" and event.subject in gangs):
            for each in holders.values():
                each.pop(event.subject, None)
        if event.kind != "lease.granted":
            continue
        grants += 1
        if len(event.details) > 1:
            gangs.add(event.subject)
        for name, place in event.details.items():
            assert name.startswith("member.")
            for granted in place.split()[-1].split(","):
                uuid, share, memory_mib = granted.rsplit(":", 2)
                pct = 100 if share == "whole" else int(share)
                if share == "whole":
                    assert not holders[uuid], f"{uuid} is held by {holders[uuid]}"
                before = holders[uuid].get(event.subject, (0, 0))
                taken = (before[0] + pct, before[1] + int(memory_mib))
                holders[uuid][event.subject] = taken
                assert sum(held[0] for held in holders[uuid].values()) <= 100
                mib = sum(held[1] for held in holders[uuid].values())
                assert mib <= devices[uuid].device.memory_mib
                whole_ones = [held for held in holders[uuid].values() if held[0] == 100]
                assert not whole_ones or len(holders[uuid]) == 1
    assert grants > REQUESTS
