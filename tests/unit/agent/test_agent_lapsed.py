"""Readings are judged by the bonds of their time: the end of a holder makes no strays."""

from tests.agent_bench import Bench, assignment, gpu, holder, process, whole
from tests.unit.agent.test_agent_adoption import ask, strays, with_lease

from gpupool.model.inventory import StrayCause
from gpupool_agent.core.events import AdoptedEnded, HolderEnded, TimePassed, WatchAdopted
from gpupool_agent.core.readings import DeviceProcess


def put(bench: Bench, *processes: DeviceProcess) -> None:
    bench.processes[gpu(0)] = list(processes)
    bench.read()


def test_the_work_of_a_holder_that_ends_is_a_stray_only_if_it_is_there_afterwards() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)), holders=(holder("a", 50),))
    put(bench, process(77, ancestors=(50,)))
    assert strays(bench) == {}
    bench.send(HolderEnded(watch=holder("a", 50), reason="exited"))
    assert strays(bench) == {}, "the reading is from before"
    put(bench, process(77))
    assert strays(bench) == {77: StrayCause.NO_LEASE}


def test_an_adopted_process_that_has_ended_was_no_stray() -> None:
    bench = with_lease()
    ask(bench)
    (watch,) = [each for each in bench.effects if isinstance(each, WatchAdopted)]
    put(bench, process(77))
    assert strays(bench) == {}
    bench.send(AdoptedEnded(adoption=watch.adoption))
    assert strays(bench) == {}
    put(bench)
    assert strays(bench) == {}


def test_a_bond_that_has_ended_is_forgotten_where_a_gpu_is_not_read_any_more() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)), holders=(holder("a", 50),))
    put(bench, process(77, ancestors=(50,)))
    bench.send(HolderEnded(watch=holder("a", 50), reason="exited"))
    bench.now += 59
    bench.send(TimePassed())
    assert strays(bench) == {}
    bench.now += 2
    bench.send(TimePassed())
    assert strays(bench) == {77: StrayCause.NO_LEASE}
