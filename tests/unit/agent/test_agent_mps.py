"""Slices in the agent's core and its steps: what they really get, and trouble with MPS."""

import dataclasses
from collections.abc import Collection
from pathlib import Path

import pytest
from tests.agent_bench import (
    Bench,
    assignment,
    gpu,
    inventory,
    key,
    last_report,
    part,
    whole,
)

from gpupool.model.assignment import AssignmentState, DeviceReport
from gpupool.model.ids import DeviceUuid
from gpupool.model.lease import ShareGiven
from gpupool_agent.checkpoint import StateDirectory
from gpupool_agent.core.assignments import AssignmentName
from gpupool_agent.core.events import InventoryRead, MpsChanged, Prepare, StepDone
from gpupool_agent.core.shares import shares_given
from gpupool_agent.devices.interfaces import MpsError, MpsStatus, SliceLimits
from gpupool_agent.devices.mps import InProcessMps
from gpupool_agent.devices.mps_daemons import foreign as foreign_module
from gpupool_agent.devices.mps_daemons.foreign import (
    MpsProcess,
    MpsScan,
    foreign_on,
    mps_processes,
)
from gpupool_agent.steps import StepFailedError, Steps

SM_COUNT = 132


def with_sms(bench: Bench) -> None:
    """Have the driver say how many multiprocessors a GPU has."""
    plain = inventory(*bench.numbers)
    devices = tuple(dataclasses.replace(each, sm_count=SM_COUNT) for each in plain.devices)
    bench.send(InventoryRead(inventory=dataclasses.replace(plain, devices=devices)))


def device(bench: Bench, number: int) -> DeviceReport:
    (found,) = [each for each in bench.node.devices() if each.uuid == gpu(number)]
    return found


def test_a_slice_reports_whole_multiprocessors_rounded_down() -> None:
    bench = Bench(0)
    with_sms(bench)
    bench.desire(1, assignment("a", 1, part(0, 10)))
    assert last_report(bench, "a").given == (
        ShareGiven(device_uuid=gpu(0), sm_count=13, share_milli_pct=9848),
    )


def test_what_the_probe_saw_counts_before_what_the_percentage_comes_to() -> None:
    bench = Bench(0)
    with_sms(bench)
    bench.answers = False
    bench.desire(1, assignment("a", 1, part(0, 10)))
    bench.send(StepDone(key=key("a"), token=1, sm_counts={gpu(0): 12}))
    assert [share.sm_count for share in last_report(bench, "a").given] == [12]


@pytest.mark.parametrize("total", [1, 7, 108, 132, 148, 152])
@pytest.mark.parametrize("shares", [(10,) * 10, (33, 33, 34), (1,) * 48 + (52,), (7,) * 14])
def test_shares_that_are_given_never_pass_100_percent(total: int, shares: tuple[int, ...]) -> None:
    device_of = dataclasses.replace(inventory(0).devices[0], sm_count=total)
    given = [
        share
        for asked in shares
        for share in shares_given(assignment("a", 1, part(0, asked)), [device_of], {})
    ]
    assert sum(each.sm_count for each in given) <= total
    assert sum(each.share_milli_pct for each in given) <= 100_000


def test_whole_gpus_and_gpus_that_tell_no_multiprocessors_tell_no_share() -> None:
    bench = Bench(0, 1)
    bench.desire(1, assignment("a", 1, part(0, 10)), assignment("b", 2, whole(1)))
    assert last_report(bench, "a").given == last_report(bench, "b").given == ()


def test_given_shares_outlive_a_restart(tmp_path: Path) -> None:
    bench = Bench(0)
    with_sms(bench)
    bench.desire(1, assignment("a", 1, part(0, 10)))
    assert bench.checkpoint is not None
    state = StateDirectory(tmp_path)
    state.save(bench.checkpoint)
    after = Bench(0, checkpoint=state.load())
    state.close()
    assert [share.sm_count for share in after.node.assignments()[0].given] == [13]


def test_trouble_degrades_the_slices_of_its_gpu_and_nothing_else() -> None:
    bench = Bench(0, 1)
    bench.desire(
        1,
        assignment("a", 1, part(0, 10)),
        assignment("b", 2, part(0, 10)),
        assignment("c", 3, part(1, 10)),
    )
    bench.send(MpsChanged(uuid=gpu(0), reason="its MPS daemon is gone"))
    for lease in ("a", "b"):
        report = last_report(bench, lease)
        assert report.state is AssignmentState.PREPARED
        assert report.degraded == "GPU-0: its MPS daemon is gone"
    assert last_report(bench, "c").degraded == ""
    assert (device(bench, 0).clean, device(bench, 0).reason) == (False, "its MPS daemon is gone")
    assert device(bench, 1).clean
    bench.send(MpsChanged(uuid=gpu(0), reason=""))
    assert last_report(bench, "a").degraded == ""
    assert device(bench, 0).clean


def test_trouble_is_a_fault_that_readings_of_the_driver_do_not_close() -> None:
    bench = Bench(0)
    bench.send(MpsChanged(uuid=gpu(0), reason="a foreign MPS daemon"))
    bench.read()
    assert bench.node.summary().faults == ("mps_trouble",)
    bench.send(MpsChanged(uuid=gpu(0), reason=""))
    assert bench.node.summary().faults == ()


def test_nothing_new_is_prepared_on_a_gpu_with_trouble() -> None:
    bench = Bench(0)
    bench.send(MpsChanged(uuid=gpu(0), reason="its MPS daemon is gone"))
    bench.take()
    bench.desire(1, assignment("a", 1, part(0, 10)))
    assert not [each for each in bench.take() if isinstance(each, Prepare)]
    assert "its MPS daemon is gone" in bench.node.assignments()[0].reason
    bench.send(MpsChanged(uuid=gpu(0), reason=""))
    assert last_report(bench, "a").state is AssignmentState.PREPARED


async def test_c20_a_member_with_two_slices_is_refused_before_anything_is_done(
    tmp_path: Path,
) -> None:
    mps = InProcessMps(tmp_path)
    steps = Steps(mps, lambda _: 0, lambda _: frozenset())
    for shares in ((part(0, 50), part(1, 50)), (part(0, 50), whole(1))):
        with pytest.raises(StepFailedError, match="a process can use one MPS daemon"):
            await steps.prepare(assignment("a", 1, *shares), adopted=False)
    assert (await mps.status(gpu(0))).uid is None


class UnprobedMps(InProcessMps):
    """Through whose daemons no client gets."""

    async def probe(self, gpu: DeviceUuid, limits: SliceLimits) -> int:
        raise MpsError(f"{gpu}: the probe got no client through to {limits.key}")


async def test_a_slice_whose_probe_fails_is_rolled_back_and_not_handed_over(
    tmp_path: Path,
) -> None:
    mps = UnprobedMps(tmp_path)
    steps = Steps(mps, lambda _: 0, lambda _: frozenset())
    wanted = assignment("a", 1, part(0, 10))
    with pytest.raises(StepFailedError, match="the probe got no client through"):
        await steps.prepare(wanted, adopted=False)
    assert (await mps.status(gpu(0))).uid is None
    # One that runs already is not disturbed by a probe.
    assert (await steps.prepare(wanted, adopted=True)).environment


async def test_what_nobody_keeps_is_swept_once_and_before_a_gpu_is_used(tmp_path: Path) -> None:
    mps = InProcessMps(tmp_path)
    kept: set[AssignmentName] = set()
    steps = Steps(mps, lambda _: 0, lambda _: frozenset(kept))
    old, new = assignment("a", 1, part(0, 60)), assignment("b", 2, part(0, 60))
    former = Steps(mps, lambda _: 0, lambda _: frozenset({(old.key, 1)}))
    await former.prepare(old, adopted=False)
    kept.add((new.key, 2))
    # Without a sweep the two would be over 100 %.
    await steps.prepare(new, adopted=False)
    assert [limits.key for limits in (await mps.status(gpu(0))).slices] == [new.key]
    kept.clear()
    assert await steps.sweep([gpu(0)]) == {}
    assert (await mps.status(gpu(0))).uid is not None, "what this agent began it ends itself"
    assert await Steps(mps, lambda _: 0, lambda _: frozenset()).sweep([gpu(0)]) == {}
    assert (await mps.status(gpu(0))).uid is None


class UnsweptMps(InProcessMps):
    """Whose sweep fails; ``runs``: a daemon is known to be there."""

    runs = True

    async def sweep(self, gpu: DeviceUuid, kept: Collection[AssignmentName]) -> None:
        raise MpsError(f"{gpu}: of {len(kept)} it cannot be swept")

    async def status(self, gpu: DeviceUuid) -> MpsStatus:
        return MpsStatus(uid=0 if self.runs else None, healthy=True, reason=gpu)


async def test_a_whole_gpu_is_given_where_no_daemon_is_known_to_be_left(tmp_path: Path) -> None:
    mps = UnsweptMps(tmp_path)
    steps = Steps(mps, lambda _: 0, lambda _: frozenset())
    wanted = assignment("a", 1, whole(0))
    with pytest.raises(StepFailedError, match="it cannot be swept"):
        await steps.prepare(wanted, adopted=False)
    assert await steps.sweep([gpu(0)]) == {gpu(0): "GPU-0: of 0 it cannot be swept"}
    # An agent without a root helper cannot ask, and still has whole GPUs to give.
    mps.runs = False
    assert (await steps.prepare(wanted, adopted=False)).environment == {}


def played(pid: int, parent: int = 1, **environment: str) -> MpsProcess:
    return MpsProcess(pid=pid, parent=parent, uid=0, environment=environment)


def foreign(*processes: MpsProcess) -> dict[DeviceUuid, str]:
    gpus = (gpu(0), gpu(1))
    return foreign_on(gpus, list(processes), own_pids={10}, own_pipes={"/run/m/0/pipe"})


def test_a_daemon_without_a_device_list_manages_every_gpu() -> None:
    assert set(foreign(played(50))) == {gpu(0), gpu(1)}
    assert set(foreign(played(50, CUDA_VISIBLE_DEVICES="1"))) == {gpu(1)}
    assert set(foreign(played(50, CUDA_VISIBLE_DEVICES="GPU-0,GPU-9"))) == {gpu(0)}
    assert foreign(played(50, CUDA_VISIBLE_DEVICES="")) == {}


def test_a_daemon_whose_environment_is_closed_may_manage_any_gpu() -> None:
    closed = MpsProcess(pid=50, parent=1, uid=7, environment=None)
    assert "whose GPUs cannot be read" in foreign(closed)[gpu(0)]


def test_our_daemon_its_servers_and_what_it_left_behind_are_ours() -> None:
    assert foreign(played(10), played(11, 10), played(12, 11)) == {}
    orphan = played(60, CUDA_MPS_PIPE_DIRECTORY="/run/m/0/pipe")
    assert foreign(orphan) == {}


def process_in(proc: Path, pid: int, comm: str, command: bytes, state: str = "S") -> None:
    directory = proc / str(pid)
    directory.mkdir(exist_ok=True)
    (directory / "comm").write_text(f"{comm}\n")
    (directory / "cmdline").write_bytes(command)
    (directory / "stat").write_text(f"{pid} ({comm}) {state} 1 " + "0 " * 20)
    (directory / "environ").write_bytes(b"A=b\0")


def test_daemons_and_servers_are_told_from_the_shell_and_from_the_dead(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    for pid, comm, command, state in (
        (1, "nvidia-cuda-mps", b"/usr/bin/nvidia-cuda-mps-control\0-d\0", "S"),
        (2, "nvidia-cuda-mps", b"nvidia-cuda-mps-server\0", "S"),
        (3, "nvidia-cuda-mps", b"nvidia-cuda-mps-control\0", "S"),
        (4, "nvidia-cuda-mps", b"nvidia-cuda-mps-control\0-d\0", "Z"),
        (5, "nvidia-cuda-mps", b"", "R"),
        (6, "python", b"python\0-d\0", "S"),
    ):
        process_in(tmp_path, pid, comm, command, state)
    assert [each.pid for each in mps_processes(tmp_path)] == [1, 2]


def test_of_thousands_of_processes_only_new_ones_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = foreign_module.read_file

    def counting(path: str) -> str:
        read.append(path)
        return original(path)

    monkeypatch.setattr(foreign_module, "read_file", counting)
    daemon = (b"nvidia-cuda-mps-control\0-f\0",)
    for pid in range(100, 200):
        process_in(tmp_path, pid, "kworker/0:1", b"")
    process_in(tmp_path, 300, "nvidia-cuda-mps", *daemon)
    scan = MpsScan(tmp_path)
    assert [each.pid for each in scan.look(whole=True)] == [300]
    read.clear()
    process_in(tmp_path, 301, "nvidia-cuda-mps", *daemon)
    # A pid that goes and comes again is a new one.
    (tmp_path / "100").rename(tmp_path / "gone")
    assert [each.pid for each in scan.look(whole=False)] == [300, 301]
    (tmp_path / "gone").rename(tmp_path / "100")
    process_in(tmp_path, 100, "nvidia-cuda-mps", *daemon)
    assert [each.pid for each in scan.look(whole=False)] == [100, 300, 301]
    assert len(read) == 2 * 5
    # What became a daemon by exec is seen by a look at the whole.
    process_in(tmp_path, 101, "nvidia-cuda-mps", *daemon)
    assert [each.pid for each in scan.look(whole=False)] == [100, 300, 301]
    assert [each.pid for each in scan.look(whole=True)] == [100, 101, 300, 301]
