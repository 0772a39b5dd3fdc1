"""Ending processes: whom, when, by which signal; and whom never."""

import itertools

from tests.agent_bench import (
    BOOT,
    Bench,
    assignment,
    gpu,
    holder,
    key,
    part,
    process,
    welcome,
    whole,
)

from gpupool.model.assignment import ProcessNote, ProcessNoteKind
from gpupool.model.ids import LeaseId
from gpupool.model.inventory import StrayCause
from gpupool_agent.core.events import (
    AdoptionAnswered,
    AdoptionAsked,
    AdoptionComes,
    Checkpoint,
    Disconnected,
    DriverSilent,
    HolderEnded,
    StopFailed,
    StopProcess,
    UnwatchHolder,
)
from gpupool_agent.core.readings import DeviceProcess
from gpupool_agent.core.stopping import STOP_GRACE_S, StopPolicy

REPORT = StopPolicy(leftovers=True)
STOP = StopPolicy(leftovers=True, strays=True)


def stopping(policy: StopPolicy = STOP, *numbers: int) -> Bench:
    """A node that has heard what it shall run."""
    bench = Bench(*(numbers or (0,)), stops=policy)
    bench.desire(1)
    bench.take()
    return bench


def put(bench: Bench, *processes: DeviceProcess, number: int = 0) -> None:
    bench.processes[gpu(number)] = list(processes)
    bench.read()


def signals(bench: Bench) -> list[tuple[int, bool]]:
    return [(each.pid, each.force) for each in bench.effects if isinstance(each, StopProcess)]


def notes(bench: Bench) -> list[ProcessNote]:
    return [note for effect in bench.reports() for note in effect.report.process_notes]


def test_a_stray_is_named_first_then_asked_then_killed_until_it_is_gone() -> None:
    bench = stopping()
    put(bench, process(77))
    assert signals(bench) == []
    bench.now += 5
    bench.read()
    assert signals(bench) == [(77, False)]
    bench.wait(STOP_GRACE_S - 1)
    assert signals(bench) == [(77, False)]
    bench.wait(STOP_GRACE_S * 2)
    assert signals(bench) == [(77, False), (77, True), (77, True)]
    put(bench)
    (note,) = notes(bench)
    assert (note.kind, note.process.pid, note.reason) == (ProcessNoteKind.STOPPED, 77, "SIGKILL")
    assert note.process.cause == StrayCause.NO_LEASE
    assert bench.node.summary().stopped == 1
    bench.take()
    bench.wait(60)
    assert signals(bench) == []


def test_what_is_told_about_a_stopped_process_names_it_and_says_why() -> None:
    bench = stopping()
    put(bench, process(77))
    bench.read()
    (stop,) = [each for each in bench.effects if isinstance(each, StopProcess)]
    assert (stop.gpu, stop.user, stop.command) == (gpu(0), "ada", "python train.py")
    assert stop.reason.endswith("is on it and belongs to no lease")


def test_a_process_that_is_seen_at_one_reading_only_is_left_alone() -> None:
    bench = stopping()
    put(bench, process(77))
    put(bench)
    put(bench, process(77))
    assert signals(bench) == []


def test_where_strays_are_only_reported_none_is_stopped() -> None:
    bench = stopping(REPORT)
    put(bench, process(77), process(78, lease="gone"))
    bench.wait(60)
    bench.read()
    assert signals(bench) == []


def test_every_kind_of_stray_is_stopped_and_no_process_inside_its_limits() -> None:
    bench = Bench(0, 1, 2, stops=STOP)
    bench.desire(
        1,
        assignment("a", 1, whole(0)),
        assignment("b", 2, part(1, 10)),
        assignment("c", 3, part(1, 50)),
        holders=(holder("a", 20),),
    )
    inside = [
        process(20, lease="a", memory_mib=70_000),
        process(21, ancestors=(20, 1)),
        process(22, lease=None),
    ]
    slices = [
        process(30, lease="b", memory_mib=7000, through_mps=True),
        process(31, lease="c", memory_mib=39_000, through_mps=True),
    ]
    bad = [
        process(40, lease="b", memory_mib=9000, through_mps=True, start_ticks=9),
        process(41, lease="c", memory_mib=500, through_mps=False),
    ]
    for _ in range(2):
        put(bench, *inside, process(50))
        put(bench, *slices, *bad, number=1)
        put(bench, process(60, lease="a"), process(61, lease="ended"), number=2)
    bench.wait(STOP_GRACE_S * 3)
    assert {pid for pid, _ in signals(bench)} == {40, 41, 50, 60, 61}


def test_what_an_ended_lease_leaves_behind_is_ended_at_once_where_there_is_a_helper() -> None:
    bench = stopping(REPORT)
    bench.desire(2, assignment("a", 1, whole(0)))
    put(bench, process(50, lease="a"))
    assert signals(bench) == []
    bench.desire(3)
    assert signals(bench) == [(50, False)]
    bench.wait(STOP_GRACE_S + 1)
    assert signals(bench) == [(50, False), (50, True)]
    assert bench.states() == {("a", 1): "ending"}
    put(bench)
    assert bench.states() == {}
    assert [(note.process.lease_id, note.reason) for note in notes(bench)] == [("a", "SIGKILL")]
    assert all(device.clean for device in bench.node.devices())


def test_a_process_that_goes_when_asked_is_noted_with_the_gentle_signal() -> None:
    bench = stopping(REPORT)
    bench.desire(2, assignment("a", 1, whole(0)))
    put(bench, process(50, lease="a"))
    bench.desire(3)
    put(bench)
    assert [note.reason for note in notes(bench)] == ["SIGTERM"]


def test_without_a_helper_what_a_lease_leaves_behind_is_only_named() -> None:
    bench = stopping(StopPolicy())
    bench.desire(2, assignment("a", 1, whole(0)))
    put(bench, process(50, lease="a"))
    bench.desire(3)
    bench.wait(60)
    assert signals(bench) == []
    assert bench.states() == {("a", 1): "ending"}


def test_a_process_whose_lease_cannot_be_read_is_not_ended_beside_other_leases() -> None:
    bench = stopping()
    bench.desire(2, assignment("a", 1, whole(0)))
    for _ in range(3):
        put(bench, process(77, lease=None, uid=1001))
    assert [each.pid for each in bench.node.devices()[0].strays] == [77]
    assert signals(bench) == []
    # On a GPU that nobody has it can only be a stray.
    bench.desire(3)
    put(bench, process(77, lease=None, uid=1001))
    assert signals(bench) == [(77, False)]


def test_a_leftover_that_is_only_guessed_is_not_ended() -> None:
    bench = stopping(REPORT)
    bench.desire(2, assignment("a", 1, whole(0)))
    put(bench, process(50, lease=None))
    bench.desire(3)
    bench.wait(60)
    assert signals(bench) == []


def test_a_signal_that_was_not_sent_is_sent_again_and_not_a_harder_one() -> None:
    bench = stopping()
    put(bench, process(77))
    bench.read()
    bench.send(StopFailed(pid=77, start_ticks=1))
    bench.wait(STOP_GRACE_S + 1)
    assert signals(bench) == [(77, False), (77, False)]
    bench.wait(STOP_GRACE_S)
    assert signals(bench)[2:] == [(77, True)]


def test_signals_that_are_never_sent_are_tried_ever_more_seldom() -> None:
    bench = stopping()
    put(bench, process(77))
    bench.read()
    tries_s = [bench.now]
    while len(tries_s) < 6:
        sent = len(signals(bench))
        bench.send(StopFailed(pid=77, start_ticks=1))
        while len(signals(bench)) == sent:
            bench.wait(1)
        tries_s.append(bench.now)
    pauses_s = [round(after - before) for before, after in itertools.pairwise(tries_s)]
    assert pauses_s == [10, 20, 40, 70, 70]
    assert {force for _, force in signals(bench)} == {False}


def test_a_stray_that_went_unasked_is_not_claimed() -> None:
    bench = stopping()
    put(bench, process(77))
    bench.read()
    bench.send(StopFailed(pid=77, start_ticks=1))
    put(bench)
    assert notes(bench) == []
    assert bench.node.summary().stopped == 0


def test_an_agent_that_has_forgotten_everything_stops_nobody_before_it_is_told() -> None:
    bench = Bench(0, connect=False, stops=STOP)
    put(bench, process(50, lease="a"))
    bench.wait(60)
    bench.read()
    assert signals(bench) == []
    bench.send(welcome())
    bench.read()
    assert signals(bench) == []
    bench.desire(1)
    bench.read()
    assert signals(bench) == [(50, False)]


def test_an_agent_that_knows_its_books_needs_no_allocator_for_it() -> None:
    bench = Bench(0, checkpoint=Checkpoint(boot_id=BOOT), connect=False, stops=STOP)
    put(bench, process(77))
    bench.read()
    assert signals(bench) == [(77, False)]


def test_the_checkpoint_of_another_boot_is_no_knowledge() -> None:
    bench = Bench(0, checkpoint=Checkpoint(boot_id="other"), connect=False, stops=STOP)
    put(bench, process(77))
    bench.read()
    assert signals(bench) == []


def test_while_the_driver_says_nothing_no_stray_is_stopped() -> None:
    bench = stopping()
    put(bench, process(77))
    bench.send(DriverSilent(code="nvml_hang", reason="no answer"))
    bench.wait(60)
    assert signals(bench) == []
    assert notes(bench) == []


def test_a_stray_whose_adoption_is_being_asked_is_not_ended_by_the_reading_for_it() -> None:
    bench = stopping()
    put(bench, process(77))
    bench.send(AdoptionComes(pid=77))
    bench.now += 5
    bench.read()
    assert signals(bench) == []
    bench.send(AdoptionComes(pid=77, over=True))
    bench.now += 5
    bench.read()
    assert signals(bench) == [(77, False)]


def test_a_process_that_is_being_ended_is_adopted_no_more() -> None:
    bench = stopping()
    bench.desire(2, assignment("a", 5, whole(0)))
    put(bench, process(77))
    bench.read()
    assert signals(bench) == [(77, False)]
    asked = AdoptionAsked(
        number=1,
        lease_id=LeaseId("a"),
        pid=77,
        start_ticks=process(77).start_ticks,
        process_uid=1000,
        asker_uid=1000,
        asker="ada",
    )
    (answer,) = [each for each in bench.send(asked) if isinstance(each, AdoptionAnswered)]
    assert answer.refused is not None
    assert "is being ended already" in answer.refused.message


def test_a_stray_that_is_taken_into_a_lease_meanwhile_is_left_alone() -> None:
    bench = stopping()
    put(bench, process(77, lease="a"))
    bench.read()
    assert signals(bench) == [(77, False)]
    bench.processes[gpu(0)] = []
    bench.read()
    bench.desire(2, assignment("a", 1, whole(0)))
    put(bench, process(78, lease="a"))
    bench.wait(60)
    assert signals(bench) == [(77, False)]


def test_ends_are_told_at_the_next_connection_once() -> None:
    bench = stopping()
    put(bench, process(77))
    bench.send(Disconnected())
    bench.read()
    put(bench)
    assert notes(bench) == []
    bench.send(welcome())
    assert [note.process.pid for note in notes(bench)] == [77]
    bench.take()
    bench.wait(600)
    assert notes(bench) == []


def test_work_that_a_restored_store_does_not_know_keeps_its_processes_by_their_descent() -> None:
    bench = Bench(0, stops=STOP)
    bench.desire(5, assignment("a", 1, whole(0)), holders=(holder("a", 20),))
    put(bench, process(21, ancestors=(20, 1)))
    bench.desire(1, epoch=2, unclaimed=(key("a"),))
    assert not any(isinstance(each, UnwatchHolder) for each in bench.effects)
    for _ in range(3):
        bench.now += 5
        bench.read()
    assert signals(bench) == []
    assert bench.node.devices()[0].clean
    assert bench.checkpoint is not None
    assert bench.checkpoint.holders == (holder("a", 20),)
    # Once the operator has it ended, neither is kept.
    bench.desire(2, epoch=2)
    for _ in range(2):
        bench.now += 5
        bench.read()
    assert signals(bench) == [(21, False)]


def test_the_holder_of_unclaimed_work_is_watched_and_not_told_of() -> None:
    bench = Bench(0, stops=STOP)
    work = assignment("a", 1, whole(0))
    bench.desire(5, work, holders=(holder("a", 20),))
    bench.take()
    bench.desire(1, epoch=2, unclaimed=(key("a"),))
    assert bench.node.heartbeat().alive_holders == ()
    bench.send(HolderEnded(watch=holder("a", 20), reason="exited"))
    bench.send(Disconnected())
    bench.send(welcome(2))
    assert bench.reports()
    assert not any(each.report.ended_holders for each in bench.reports())


def test_a_holder_that_is_asked_for_again_is_told_of_again() -> None:
    bench = Bench(0, stops=STOP)
    work = assignment("a", 1, whole(0))
    bench.desire(5, work, holders=(holder("a", 20),))
    bench.desire(1, epoch=2, unclaimed=(key("a"),))
    bench.desire(2, work, epoch=2, holders=(holder("a", 20),))
    assert bench.node.heartbeat().alive_holders == ("a",)
    bench.send(HolderEnded(watch=holder("a", 20), reason="exited"))
    ends = [end for each in bench.reports() for end in each.report.ended_holders]
    assert [(end.lease_id, end.pid) for end in ends] == [("a", 20)]
