"""Taking an own process into an own lease: who may, what, and for how long."""

import pytest
from tests.agent_bench import Bench, assignment, gpu, part, process, whole

from gpupool.model.assignment import ProcessNote, ProcessNoteKind
from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.ids import LeaseId
from gpupool.model.inventory import StrayCause
from gpupool_agent.core import adopting
from gpupool_agent.core.events import (
    AdoptedEnded,
    AdoptionAnswered,
    AdoptionAsked,
    SaveCheckpoint,
    StopProcess,
    UnwatchAdopted,
    WatchAdopted,
)
from gpupool_agent.core.readings import DeviceProcess
from gpupool_agent.core.stopping import StopPolicy

UID = 1000
ROOT = 0
STOP = StopPolicy(leftovers=True, strays=True)


def put(bench: Bench, *processes: DeviceProcess, number: int = 0) -> None:
    bench.processes[gpu(number)] = list(processes)
    bench.read()


def ask(
    bench: Bench,
    pid: int = 77,
    lease: str = "a",
    *,
    asker_uid: int = UID,
    process_uid: int | None = UID,
    start_ticks: int = 1,
) -> Refused | AdoptionAnswered:
    """What is answered; a refusal as itself."""
    effects = bench.send(
        AdoptionAsked(
            number=5,
            lease_id=LeaseId(lease),
            pid=pid,
            start_ticks=start_ticks,
            process_uid=process_uid,
            asker_uid=asker_uid,
            asker="ada",
        )
    )
    (answer,) = [each for each in effects if isinstance(each, AdoptionAnswered)]
    assert answer.number == 5
    return answer.refused or answer


def with_lease(*numbers: int, policy: StopPolicy = STOP) -> Bench:
    """A lease on GPU 0 and a process of nobody on it."""
    bench = Bench(*(numbers or (0,)), stops=policy)
    bench.desire(1, assignment("a", 1, whole(0)))
    put(bench, process(77))
    return bench


def strays(bench: Bench, number: int = 0) -> dict[int, str]:
    report = {each.uuid: each for each in bench.node.devices()}[gpu(number)]
    return {each.pid: each.cause for each in report.strays}


def notes(bench: Bench) -> list[ProcessNote]:
    return [note for effect in bench.reports() for note in effect.report.process_notes]


def signals(bench: Bench) -> list[int]:
    return [each.pid for each in bench.effects if isinstance(each, StopProcess)]


def test_an_adopted_process_counts_to_its_lease_and_is_told_once_with_who_took_it() -> None:
    bench = with_lease()
    assert strays(bench) == {77: StrayCause.NO_LEASE}
    answer = ask(bench)
    assert isinstance(answer, AdoptionAnswered)
    assert answer.device_uuids == (gpu(0),)
    assert answer.command == "python train.py"
    assert strays(bench) == {}
    assert all(device.clean for device in bench.node.devices())
    (note,) = notes(bench)
    assert (note.kind, note.actor) == (ProcessNoteKind.ADOPTED, "ada")
    assert (note.process.pid, note.process.lease_id) == (77, "a")
    bench.wait(60)
    bench.read()
    assert signals(bench) == []
    assert len(notes(bench)) == 1


def test_it_is_durable_before_it_is_answered() -> None:
    bench = with_lease()
    bench.take()
    ask(bench)
    kinds = [type(each) for each in bench.effects]
    assert kinds.index(SaveCheckpoint) < kinds.index(WatchAdopted) < kinds.index(AdoptionAnswered)


def test_its_children_count_to_the_lease_too() -> None:
    bench = with_lease()
    ask(bench)
    put(bench, process(77), process(78, ancestors=(77, 1)))
    assert strays(bench) == {}


def test_it_is_ended_with_its_lease_and_so_are_its_children() -> None:
    bench = with_lease()
    ask(bench)
    put(bench, process(77), process(78, ancestors=(77, 1)))
    bench.desire(2)
    assert signals(bench) == [77, 78]
    put(bench)
    assert bench.states() == {}
    assert any(isinstance(each, UnwatchAdopted) for each in bench.effects)
    assert bench.node.summary().adopted == 0


def test_an_adoption_outlives_the_agent_and_not_the_boot() -> None:
    bench = with_lease()
    ask(bench)
    again = Bench(0, checkpoint=bench.checkpoint, connect=False, stops=STOP)
    assert [each.adoption.pid for each in again.effects if isinstance(each, WatchAdopted)] == [77]
    put(again, process(77))
    assert strays(again) == {}
    rebooted = Bench(0, checkpoint=bench.checkpoint, boot="boot-2", connect=False, stops=STOP)
    assert not any(isinstance(each, WatchAdopted) for each in rebooted.effects)
    put(rebooted, process(77))
    assert strays(rebooted) == {77: StrayCause.NO_LEASE}


def test_a_process_that_is_gone_is_forgotten_with_all_that_it_bound() -> None:
    bench = with_lease()
    ask(bench)
    (watch,) = [each for each in bench.effects if isinstance(each, WatchAdopted)]
    bench.send(AdoptedEnded(adoption=watch.adoption))
    assert bench.checkpoint is not None
    assert bench.checkpoint.adoptions == ()
    # The same number, given out again.
    put(bench, process(77, start_ticks=9), process(80, ancestors=(77, 1)))
    assert set(strays(bench)) == {77, 80}


def test_another_process_with_the_number_is_not_the_adopted_one() -> None:
    bench = with_lease()
    ask(bench)
    put(bench, process(77, start_ticks=9))
    assert strays(bench) == {77: StrayCause.NO_LEASE}


def test_an_adopted_process_on_a_gpu_that_its_lease_has_not_is_outside() -> None:
    bench = with_lease(0, 1)
    ask(bench)
    put(bench, process(77), number=1)
    assert strays(bench, 0) == {}
    assert strays(bench, 1) == {77: StrayCause.ELSEWHERE}


def test_adopted_twice_is_adopted_once() -> None:
    bench = with_lease()
    assert isinstance(ask(bench), AdoptionAnswered)
    assert isinstance(ask(bench), AdoptionAnswered)
    assert bench.node.summary().adopted == 1


def test_root_may_do_it_for_anybody() -> None:
    bench = with_lease()
    assert isinstance(ask(bench, asker_uid=ROOT, process_uid=4000), AdoptionAnswered)


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [
        ({"lease": "b"}, ErrorKind.NOT_FOUND, "lease b is not on this node"),
        ({"asker_uid": 1001}, ErrorKind.FORBIDDEN, "lease a is of uid 1000, not yours"),
        ({"process_uid": 1001}, ErrorKind.FORBIDDEN, "process 77 is not yours"),
        ({"process_uid": None}, ErrorKind.FORBIDDEN, "process 77 is not yours"),
        ({"pid": 78}, ErrorKind.WRONG_STATE, "process 78 is on no GPU of lease a"),
        ({"start_ticks": 2}, ErrorKind.WRONG_STATE, "process 77 is on no GPU of lease a"),
    ],
)
def test_what_may_not_be_adopted_is_refused_and_changes_nothing(
    asked: dict[str, int | str | None], kind: ErrorKind, said: str
) -> None:
    bench = with_lease()
    before = bench.checkpoint
    refused = ask(bench, **asked)  # type: ignore[arg-type]
    assert isinstance(refused, Refused)
    assert (refused.kind, refused.message) == (kind, said)
    assert bench.checkpoint == before
    assert strays(bench) == {77: StrayCause.NO_LEASE}
    assert notes(bench) == []


def test_a_lease_that_ends_takes_nobody_in() -> None:
    bench = with_lease(policy=StopPolicy())
    put(bench, process(50, lease="a"), process(77))
    bench.desire(2)
    refused = ask(bench)
    assert isinstance(refused, Refused)
    assert refused.message == "lease a is ending here, not prepared"


def test_a_part_of_a_gpu_takes_in_no_process_that_runs_without_its_limits() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, part(0, 10)))
    put(bench, process(77, through_mps=False))
    refused = ask(bench)
    assert isinstance(refused, Refused)
    assert "without MPS" in refused.message
    put(bench, process(77, through_mps=True))
    assert isinstance(ask(bench), AdoptionAnswered)


def test_a_process_of_another_lease_is_not_taken_out_of_it() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, part(0, 10)), assignment("b", 2, part(0, 10)))
    put(bench, process(77, lease="b", through_mps=True))
    refused = ask(bench)
    assert isinstance(refused, Refused)
    assert refused.message == "process 77 belongs to lease b"


def test_there_are_not_more_than_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopting, "ADOPTIONS_MAX", 1)
    bench = with_lease(policy=StopPolicy())
    put(bench, process(77), process(78))
    assert isinstance(ask(bench), AdoptionAnswered)
    refused = ask(bench, pid=78)
    assert isinstance(refused, Refused)
    assert refused.kind is ErrorKind.NO_CAPACITY
    assert isinstance(ask(bench), AdoptionAnswered)
