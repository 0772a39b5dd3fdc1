"""A described driver that several processes meet."""

import multiprocessing
import os
import threading
import time
from pathlib import Path

from gpupool_agent.simulated.machine import load_machine
from gpupool_agent.simulated.node import TRUTH, FalseReadings
from gpupool_agent.simulated.shared_node import SharedNode


def made(directory: Path) -> SharedNode:
    return SharedNode(node_id="n1", machine=load_machine("dgx-h100"), directory=directory)


def test_what_one_process_changes_the_others_meet(tmp_path: Path) -> None:
    here, there = made(tmp_path), made(tmp_path)
    here.set_compute_mode(here.gpus[0], 3)
    here.set_hidden(here.gpus[1], hidden=True)
    here.set_lost(here.gpus[2], lost=True)
    here.set_false(here.gpus[3], FalseReadings(used_bytes=2**64 - 1))
    there.answer()
    assert [gpu.compute_mode for gpu in there.gpus[:2]] == [3, 0]
    assert (there.gpus[1].hidden, there.gpus[2].lost) == (True, True)
    assert there.gpus[3].false.used_bytes == 2**64 - 1
    there.set_false(there.gpus[3], TRUTH)
    here.answer()
    assert here.gpus[3].false == TRUTH
    # Whoever comes later finds it as it is, and tells CUDA clients nothing else.
    before = (tmp_path / "gpus.json").read_text()
    assert made(tmp_path).gpus[0].compute_mode == 3
    assert (tmp_path / "gpus.json").read_text() == before


def test_without_its_devices_a_session_that_is_open_is_empty(tmp_path: Path) -> None:
    here, there = made(tmp_path), made(tmp_path)
    there.open_session()
    here.unload_driver()
    there.answer()
    assert there.session is not None
    assert there.session.gpus == ()
    here.load_driver()
    there.answer()
    there.close_session()
    there.open_session()
    assert len(there.session.gpus) == 8


def test_a_call_that_hangs_goes_on_when_another_process_says_so(tmp_path: Path) -> None:
    here, there = made(tmp_path), made(tmp_path)
    here.hang()
    call = threading.Thread(target=there.answer)
    call.start()
    call.join(0.1)
    assert call.is_alive()
    other = multiprocessing.get_context("spawn").Process(target=resume, args=(str(tmp_path),))
    other.start()
    other.join(30)
    call.join(30)
    assert not call.is_alive()
    assert other.exitcode == 0


def resume(directory: str) -> None:
    made(Path(directory)).resume()


def test_who_opens_the_driver_and_when_is_noted_where_a_test_wants_it(tmp_path: Path) -> None:
    node = made(tmp_path)
    node.open_session()
    (tmp_path / "driver-inits").touch()
    begun_s = time.monotonic()
    node.open_session()
    (when_s,) = node.inits_s(os.getpid())
    assert begun_s - 0.01 <= when_s <= time.monotonic()
