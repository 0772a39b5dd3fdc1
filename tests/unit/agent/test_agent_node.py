"""The agent's core: desired state against what is, step by step on a virtual clock."""

import dataclasses

import pytest
from tests.agent_bench import (
    Bench,
    assignment,
    gpu,
    holder,
    inventory,
    key,
    last_report,
    part,
    process,
    welcome,
    whole,
)

from gpupool.model.assignment import AssignmentState
from gpupool.model.inventory import Hca, HcaPort
from gpupool_agent.core import fence
from gpupool_agent.core.events import (
    CleanUp,
    CloseConnection,
    Disconnected,
    HcasRead,
    HolderEnded,
    InventoryRead,
    Log,
    Prepare,
    SaveCheckpoint,
    StepDone,
    StepFailed,
    UnwatchHolder,
    UsageRead,
    WatchHolder,
)
from gpupool_agent.core.readings import DeviceState


def test_a_wanted_assignment_is_prepared_and_reported_with_its_environment() -> None:
    bench = Bench(0, 1)
    bench.desire(1, assignment("a", 1, whole(0), whole(1)))
    report = last_report(bench, "a")
    assert report.state is AssignmentState.PREPARED
    assert report.environment["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert report.environment["GPUPOOL_LEASE_ID"] == "a"
    assert report.environment["GPUPOOL_TOKEN"] == "1"
    assert report.environment["GPUPOOL_WORLD_SIZE"] == "1"


def test_the_checkpoint_comes_before_the_step_that_it_remembers() -> None:
    bench = Bench(0)
    bench.answers = False
    bench.take()
    bench.desire(1, assignment("a", 1, whole(0)))
    kinds = [type(effect) for effect in bench.take()]
    assert kinds.index(SaveCheckpoint) < kinds.index(Prepare)


def test_what_is_no_longer_wanted_ends_only_after_a_reading_that_shows_it_gone() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)))
    bench.processes[gpu(0)] = [process(50, lease="a")]
    bench.read()
    bench.desire(2)
    assert bench.states() == {("a", 1): "ending"}
    assert "process 50 of ada" in last_report(bench, "a").reason
    bench.processes[gpu(0)] = []
    bench.wait(5)
    assert bench.states() == {}
    assert last_report(bench, "a").state is AssignmentState.ENDED


def test_an_orphan_of_an_ending_lease_is_named_and_keeps_the_device_unclean() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)))
    bench.processes[gpu(0)] = [process(50, lease="a")]
    bench.desire(2)
    bench.wait(5)
    (device,) = bench.node.devices()
    assert not device.clean
    assert [each.pid for each in device.strays] == [50]


def test_memory_that_no_visible_process_holds_keeps_an_assignment_from_ending() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)))
    bench.used_mib[gpu(0)] = 9000
    bench.desire(2)
    bench.wait(5)
    assert bench.states() == {("a", 1): "ending"}
    assert "9000 MiB are in use, 4 MiB when idle" in last_report(bench, "a").reason
    del bench.used_mib[gpu(0)]
    bench.wait(5)
    assert bench.states() == {}


def test_a_reading_that_began_before_the_cleaning_confirms_nothing() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)))
    bench.answers = False
    bench.now += 1
    bench.desire(2)
    bench.now += 1
    bench.send(StepDone(key=key("a"), token=1))
    empty = DeviceState(uuid=gpu(0), processes=(), memory_used_mib=4)
    bench.send(UsageRead(started_s=bench.now - 0.5, devices=(empty,)))
    assert bench.states() == {("a", 1): "ending"}
    bench.send(UsageRead(started_s=bench.now, devices=(empty,)))
    assert bench.states() == {}


def test_a_late_desired_state_of_an_older_revision_or_epoch_is_not_obeyed() -> None:
    bench = Bench(0)
    bench.desire(5, assignment("a", 1, whole(0)))
    bench.desire(6)
    assert bench.states() == {}
    bench.desire(5, assignment("a", 1, whole(0)))
    assert bench.states() == {}
    bench.send(welcome(epoch=2))
    bench.desire(9, assignment("a", 1, whole(0)), epoch=1)
    assert bench.states() == {}
    refused = [each.details["reason"] for each in bench.effects if isinstance(each, Log)]
    assert refused == ["revision 5 is older than 6", "epoch 1 is over: epoch 2 was heard"]


def test_a_tombstone_refuses_an_ended_assignment_in_a_newer_desired_state() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)))
    bench.desire(2)
    bench.take()
    bench.desire(3, assignment("a", 1, whole(0)))
    assert bench.states() == {}
    assert last_report(bench, "a").state is AssignmentState.ENDED
    bench.desire(4, assignment("a", 2, whole(0)))
    assert bench.states() == {("a", 2): "prepared"}


def test_a_token_below_one_seen_on_the_device_is_refused() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("b", 7, whole(0)))
    bench.desire(2)
    bench.desire(3, assignment("a", 6, whole(0)))
    report = last_report(bench, "a")
    assert report.state is AssignmentState.FAILED
    assert report.reason == "token 6 is lower than 7 seen on GPU-0"


def test_tombstones_are_bounded_and_the_floor_refuses_beyond_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fence, "TOMBSTONES_MAX", 8)
    bench = Bench(0)
    for number in range(1, 20):
        bench.desire(2 * number, assignment(f"l{number}", number, whole(0)))
        bench.desire(2 * number + 1)
    assert bench.checkpoint is not None
    assert len(bench.checkpoint.tombstones) == 8
    bench.desire(10**6, assignment("l1", 1, whole(0)))
    assert last_report(bench, "l1").state is AssignmentState.FAILED


def test_a_lower_epoch_is_refused_and_its_stream_closed() -> None:
    bench = Bench(0)
    bench.send(welcome(epoch=3))
    bench.take()
    effects = bench.send(welcome(epoch=2))
    assert [type(each) for each in effects] == [Log, CloseConnection]


def test_a_new_token_of_the_same_member_waits_until_the_old_one_has_ended() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)))
    bench.processes[gpu(0)] = [process(50, lease="a")]
    bench.read()
    bench.desire(2, assignment("a", 2, whole(0)))
    assert bench.states() == {("a", 1): "ending", ("a", 2): "preparing"}
    bench.processes[gpu(0)] = []
    bench.wait(5)
    assert bench.states() == {("a", 2): "prepared"}


def test_a_device_with_a_stray_fails_the_preparation_with_its_name_after_a_while() -> None:
    bench = Bench(0)
    bench.processes[gpu(0)] = [process(77)]
    bench.read()
    bench.desire(1, assignment("a", 1, whole(0)))
    assert bench.states() == {("a", 1): "preparing"}
    bench.wait(31)
    report = last_report(bench, "a")
    assert report.state is AssignmentState.FAILED
    assert "process 77 of ada (python train.py, 500 MiB) is on it" in report.reason


def test_slices_share_a_device_up_to_its_whole() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, part(0, 70)), assignment("b", 2, part(0, 30)))
    assert set(bench.states().values()) == {"prepared"}
    bench.desire(
        2,
        assignment("a", 1, part(0, 70)),
        assignment("b", 2, part(0, 30)),
        assignment("c", 3, part(0, 10)),
    )
    assert bench.states()["c", 3] == "preparing"
    bench.desire(3, assignment("a", 1, part(0, 70)), assignment("c", 3, part(0, 10)))
    assert bench.states() == {("a", 1): "prepared", ("c", 3): "prepared"}


def test_an_assignment_that_was_never_begun_ends_at_once() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)))
    bench.desire(2, assignment("a", 1, whole(0)), assignment("b", 2, part(0, 10)))
    assert bench.states()["b", 2] == "preparing"
    bench.desire(3, assignment("a", 1, whole(0)))
    assert bench.states() == {("a", 1): "prepared"}
    assert last_report(bench, "b").state is AssignmentState.ENDED


def test_a_failed_step_is_reported_and_its_end_still_cleans_up() -> None:
    bench = Bench(0)
    bench.answers = False
    bench.desire(1, assignment("a", 1, part(0, 10)))
    bench.send(StepFailed(key=key("a"), token=1, reason="no MPS"))
    assert last_report(bench, "a").state is AssignmentState.FAILED
    assert last_report(bench, "a").reason == "no MPS"
    bench.answers = True
    bench.take()
    bench.desire(2)
    assert any(isinstance(each, CleanUp) for each in bench.effects)
    assert bench.states() == {}


def test_an_end_during_preparation_waits_for_the_step_and_then_cleans_up() -> None:
    bench = Bench(0)
    bench.answers = False
    bench.desire(1, assignment("a", 1, whole(0)))
    bench.take()
    bench.desire(2)
    assert not any(isinstance(each, CleanUp) for each in bench.take())
    bench.send(StepDone(key=key("a"), token=1))
    assert any(isinstance(each, CleanUp) for each in bench.take())


def test_a_clean_up_that_fails_is_tried_again_until_it_succeeds() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, part(0, 10)))
    bench.answers = False
    bench.desire(2)
    bench.send(StepFailed(key=key("a"), token=1, reason="MPS does not quit"))
    assert last_report(bench, "a").reason == "MPS does not quit"
    bench.answers = True
    bench.wait(5)
    assert bench.states() == {}


def test_a_holder_that_ends_is_told_until_the_allocator_lets_go_of_it() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)), holders=(holder("a", 50),))
    assert bench.node.heartbeat().alive_holders == ("a",)
    bench.take()
    bench.send(HolderEnded(watch=holder("a", 50), reason="exited"))
    told = bench.reports()[-1].report
    assert [(end.lease_id, end.reason) for end in told.ended_holders] == [("a", "exited")]
    assert told.alive_holders == ()
    bench.send(Disconnected())
    bench.send(welcome(epoch=2))
    assert bench.reports()[-1].report.ended_holders == told.ended_holders
    bench.take()
    bench.desire(1, assignment("a", 1, whole(0)), epoch=2, holders=(holder("a", 50),))
    assert not any(isinstance(each, WatchHolder) for each in bench.effects)
    assert bench.reports()[-1].report.ended_holders == told.ended_holders
    bench.desire(2, epoch=2)
    bench.send(welcome(epoch=2))
    assert bench.reports()[-1].report.ended_holders == ()


def test_another_process_as_holder_of_a_lease_is_watched_in_place_of_the_first() -> None:
    bench = Bench(0)
    bench.desire(1, holders=(holder("a", 50),))
    bench.take()
    bench.desire(2, holders=(holder("a", 50, start_ticks=9),))
    kinds = [type(each) for each in bench.take() if not isinstance(each, SaveCheckpoint)]
    assert kinds == [UnwatchHolder, WatchHolder]
    bench.send(HolderEnded(watch=holder("a", 50), reason="exited"))
    assert bench.node.heartbeat().alive_holders == ("a",)


@pytest.mark.parametrize(
    ("found", "belongs"),
    [
        (process(60, lease="a"), True),
        (dataclasses.replace(process(60), ancestors=(55, 50, 1)), True),
        (dataclasses.replace(process(60, lease=None), uid=1000), True),
        (dataclasses.replace(process(60, lease=None), uid=1001), False),
        (process(60, lease="b"), False),
        (process(60), False),
    ],
)
def test_a_process_belongs_by_lease_id_by_ancestor_or_by_user_where_unreadable(
    found, belongs: bool
) -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)), holders=(holder("a", 50),))
    bench.processes[gpu(0)] = [found]
    bench.read()
    (device,) = bench.node.devices()
    assert device.clean is belongs
    assert [each.pid for each in device.strays] == ([] if belongs else [60])


def test_nothing_is_reported_twice() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)))
    bench.take()
    bench.read()
    bench.desire(1, assignment("a", 1, whole(0)))
    bench.send(InventoryRead(inventory=inventory(0)))
    assert bench.take() == []


def hca(name: str, numa_node: int, *states: str, layer: str = "InfiniBand") -> Hca:
    return Hca(
        name=name,
        node_guid="0" * 16,
        numa_node=numa_node,
        ports=tuple(
            HcaPort(
                number=number, port_guid="0" * 16, state=state, link_layer=layer, lid=7, sm_lid=1
            )
            for number, state in enumerate(states, 1)
        ),
    )


def test_the_environment_names_the_active_fabric_ports_exactly() -> None:
    bench = Bench(0)
    bench.send(
        HcasRead(
            hcas=(
                hca("mlx5_0", 0, "ACTIVE"),
                hca("mlx5_1", 0, "DOWN"),
                hca("mlx5_2", 1, "ACTIVE", "DOWN"),
                hca("mlx5_3", 1, "ACTIVE", layer="Ethernet"),
            )
        )
    )
    bench.desire(1, assignment("a", 1, whole(0)))
    assert last_report(bench, "a").environment["NCCL_IB_HCA"] == "=mlx5_0,mlx5_2:1"


def test_a_member_without_gpus_sees_none_and_needs_no_device() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1))
    environment = last_report(bench, "a").environment
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "NCCL_IB_HCA" not in environment
    bench.desire(2)
    assert bench.states() == {}
