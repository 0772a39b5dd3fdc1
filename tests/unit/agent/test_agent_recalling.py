"""A process that ends is listed for a while without a name: it is who it was."""

from dataclasses import replace

from tests.agent_bench import gpu, process

from gpupool_agent.core.readings import DeviceProcess, DeviceState
from gpupool_agent.recalling import Recall


def reading(*processes: DeviceProcess) -> tuple[DeviceState, ...]:
    return (DeviceState(uuid=gpu(0), processes=processes, memory_used_mib=1),)


def read(recall: Recall, *processes: DeviceProcess) -> list[DeviceProcess]:
    return list(recall.complete(reading(*processes))[0].processes or ())


ALIVE = process(50, lease="a", ancestors=(40, 1))


def test_a_process_that_has_given_up_its_environment_is_of_its_lease_still() -> None:
    recall = Recall()
    assert read(recall, ALIVE) == [ALIVE]
    for lease in ("", None):
        ending = replace(ALIVE, lease_id=lease, command="", ancestors=(), memory_mib=7)
        assert read(recall, ending) == [replace(ALIVE, memory_mib=7)]


def test_a_process_that_the_kernel_has_forgotten_is_who_it_was() -> None:
    recall = Recall()
    read(recall, ALIVE)
    gone = DeviceProcess(pid=50, memory_mib=300)
    for _ in range(2):
        assert read(recall, gone) == [replace(ALIVE, memory_mib=300)]


def test_another_process_with_the_number_is_itself() -> None:
    recall = Recall()
    read(recall, ALIVE)
    other = process(50, start_ticks=9)
    assert read(recall, other) == [other]


def test_who_was_never_seen_is_not_made_up_and_who_is_gone_is_forgotten() -> None:
    recall = Recall()
    gone = DeviceProcess(pid=50, memory_mib=300)
    assert read(recall, gone) == [gone]
    read(recall, ALIVE)
    read(recall)
    assert read(recall, gone) == [gone]


def test_what_cannot_be_told_at_first_and_then_can_is_taken_over() -> None:
    recall = Recall()
    unknown = replace(ALIVE, lease_id=None)
    assert read(recall, unknown) == [unknown]
    assert read(recall, ALIVE) == [ALIVE]
    assert read(recall, replace(ALIVE, lease_id="")) == [ALIVE]


def test_a_driver_that_lists_no_processes_is_left_as_it_is() -> None:
    state = DeviceState(uuid=gpu(0), processes=None, memory_used_mib=None)
    assert Recall().complete((state,)) == (state,)
