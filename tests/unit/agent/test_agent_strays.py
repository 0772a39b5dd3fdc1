"""Which processes should not be on a GPU, and what is said of each."""

import pytest
from tests.agent_bench import Bench, assignment, gpu, holder, part, process, whole

from gpupool.model.assignment import DeviceReport
from gpupool.model.inventory import StrayCause
from gpupool_agent.core.membership import CONTEXT_MIB_MAX
from gpupool_agent.core.readings import DeviceProcess

BIG_MIB = 8000 + CONTEXT_MIB_MAX


def shown(bench: Bench, number: int = 0) -> DeviceReport:
    """What was last told about a GPU."""
    found = [
        each
        for effect in bench.reports()
        for each in effect.report.devices
        if each.uuid == gpu(number)
    ]
    return found[-1]


def causes(bench: Bench, number: int = 0) -> dict[int, str]:
    return {each.pid: each.cause for each in shown(bench, number).strays}


def put(bench: Bench, *processes: DeviceProcess, number: int = 0) -> None:
    bench.processes[gpu(number)] = list(processes)
    bench.read()


def test_a_process_of_no_lease_is_named_with_user_pid_and_command_at_its_first_reading() -> None:
    bench = Bench(0)
    put(bench, process(77))
    report = shown(bench)
    assert not report.clean
    assert causes(bench) == {77: StrayCause.NO_LEASE}
    assert report.reason == (
        "process 77 of ada (python train.py, 500 MiB) is on it and belongs to no lease"
    )
    (stray,) = report.strays
    assert (stray.user, stray.uid, stray.command) == ("ada", 1000, "python train.py")


def test_more_than_one_is_counted_and_each_is_listed() -> None:
    bench = Bench(0)
    put(bench, process(77), process(78), process(79))
    assert "; 2 more should not be there" in shown(bench).reason
    assert sorted(causes(bench)) == [77, 78, 79]


def test_a_process_that_names_a_lease_nobody_has_heard_of_belongs_to_none() -> None:
    bench = Bench(0)
    put(bench, process(77, lease="made-up"))
    assert causes(bench) == {77: StrayCause.NO_LEASE}
    assert "names lease made-up, which has nothing here" in shown(bench).reason
    assert shown(bench).strays[0].lease_id == "made-up"


def test_a_process_outlives_its_lease_while_that_ends_and_ever_after() -> None:
    bench = Bench(0, 1)
    bench.desire(1, assignment("a", 1, whole(0)))
    put(bench, process(50, lease="a"))
    assert causes(bench) == {}
    bench.desire(2)
    assert causes(bench) == {50: StrayCause.OUTLIVED}
    assert "although its lease a has ended" in shown(bench).reason
    put(bench)
    assert bench.states() == {}
    # It comes back to where it was, or somewhere else.
    put(bench, process(50, lease="a"), number=1)
    assert causes(bench, 1) == {50: StrayCause.OUTLIVED}


def test_a_process_on_another_gpu_than_its_leases_is_elsewhere_and_not_on_its_own() -> None:
    bench = Bench(0, 1)
    bench.desire(1, assignment("a", 1, whole(0)), holders=(holder("a", 60),))
    put(bench, process(50, lease="a"), process(61, ancestors=(60, 1)))
    put(bench, process(50, lease="a"), process(61, ancestors=(60, 1)), number=1)
    assert causes(bench, 0) == {}
    assert causes(bench, 1) == {50: StrayCause.ELSEWHERE, 61: StrayCause.ELSEWHERE}
    assert "although its lease a has other GPUs" in shown(bench, 1).reason
    assert shown(bench, 0).clean
    assert not shown(bench, 1).clean


@pytest.mark.parametrize(
    ("through_mps", "found"),
    [(True, {}), (None, {}), (False, {50: StrayCause.BESIDE_MPS})],
)
def test_a_member_of_a_slice_has_to_go_through_its_mps_server(
    through_mps: bool | None, found: dict[int, str]
) -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, part(0, 10)), assignment("b", 2, part(0, 10)))
    put(
        bench,
        process(50, lease="a", through_mps=through_mps),
        process(51, lease="b", through_mps=True),
    )
    assert causes(bench) == found
    assert shown(bench).clean is (not found)
    assert set(bench.states().values()) == {"prepared"}


def test_whoever_has_the_whole_gpu_needs_no_mps_server() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)))
    put(bench, process(50, lease="a", through_mps=False, memory_mib=79_000))
    assert causes(bench) == {}


@pytest.mark.parametrize(
    ("memory_mib", "found"), [(BIG_MIB, {}), (BIG_MIB + 1, {50: StrayCause.OVER_MEMORY})]
)
def test_a_member_of_a_slice_has_its_memory_and_room_for_its_context(
    memory_mib: int, found: dict[int, str]
) -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, part(0, 10)), assignment("b", 2, part(0, 50)))
    put(
        bench,
        process(50, lease="a", memory_mib=memory_mib),
        process(51, lease="b", memory_mib=20_000),
    )
    assert causes(bench) == found
    if found:
        assert f"its lease a holds {memory_mib} MiB, but was given 8000" in shown(bench).reason


def test_of_many_members_with_too_much_together_the_youngest_are_outside() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, part(0, 10)))
    put(
        bench,
        *(process(50 + n, lease="a", memory_mib=6000, start_ticks=10 - n) for n in range(3)),
    )
    # Two have 12000 MiB where 8000 and two contexts are allowed, one fits.
    assert causes(bench) == {50: StrayCause.OVER_MEMORY, 51: StrayCause.OVER_MEMORY}


def test_two_members_of_a_lease_on_one_gpu_have_both_their_memories() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, part(0, 10)), assignment("a", 2, part(0, 10), rank=1))
    put(bench, process(50, lease="a"), process(51, lease="a"))
    both_mib = 16_000 + 2 * CONTEXT_MIB_MAX
    for memory_mib, found in ((both_mib // 2, {}), (both_mib // 2 + 1, {51: "over_memory"})):
        put(
            bench,
            process(50, lease="a", memory_mib=memory_mib),
            process(51, lease="a", memory_mib=memory_mib, start_ticks=2),
        )
        assert causes(bench) == found


def test_members_that_are_only_guessed_by_their_user_are_not_measured() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, part(0, 10)), assignment("b", 2, part(0, 80)))
    put(bench, process(50, lease=None, memory_mib=60_000, through_mps=False))
    assert causes(bench) == {}


def test_a_slice_without_a_memory_size_has_no_limit_to_pass() -> None:
    bench = Bench(0)
    share = part(0, 10)
    unlimited = type(share)(device_uuid=share.device_uuid, share_pct=10, memory_mib=0, whole=False)
    bench.desire(1, assignment("a", 1, unlimited))
    put(bench, process(50, lease="a", memory_mib=70_000))
    assert causes(bench) == {}


def test_a_stray_keeps_neighbours_running_and_new_work_away() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, part(0, 10)))
    put(bench, process(50, lease="a"), process(77))
    assert bench.states() == {("a", 1): "prepared"}
    bench.desire(2, assignment("a", 1, part(0, 10)), assignment("b", 2, part(0, 10)))
    bench.wait(5)
    assert bench.states() == {("a", 1): "prepared", ("b", 2): "preparing"}
    put(bench, process(50, lease="a"))
    assert bench.states() == {("a", 1): "prepared", ("b", 2): "prepared"}


def test_strays_are_counted_by_cause() -> None:
    bench = Bench(0, 1)
    bench.desire(1, assignment("a", 1, whole(0)))
    put(bench, process(77), process(50, lease="a"), process(78), number=1)
    found = bench.node.summary().strays
    assert found == {StrayCause.NO_LEASE: 2, StrayCause.ELSEWHERE: 1}
