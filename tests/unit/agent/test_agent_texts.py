"""Whatever a tenant's process says of itself, the allocator accepts what its node tells."""

from dataclasses import replace

import pytest
from tests.agent_bench import Bench, assignment, gpu, process, welcome, whole

from gpupool.wire.node import hello_from_proto, hello_to_proto, report_from_proto, report_to_proto
from gpupool_agent.core.events import Disconnected, MpsChanged, NodeFault
from gpupool_agent.core.stopping import StopPolicy
from gpupool_agent.core.texts import TEXT_CHARS_MAX, sendable

LONG = 100_000
ODD = {"long": "x" * LONG, "nul": "a\0b", "half": "a\udcffb", "wide": "\u00e4" * LONG}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_no_text_of_a_process_or_driver_makes_a_report_unacceptable(odd: str) -> None:
    bench = Bench(0, 1, stops=StopPolicy(leftovers=True, strays=True))
    stray = replace(process(77, lease=odd), user=odd, command=odd)
    bench.processes[gpu(0)] = [stray, replace(stray, pid=78)]
    bench.read()
    # Waits for the stray, and says so in its own words.
    bench.desire(1, assignment("a", 1, whole(0)))
    bench.read()
    bench.send(NodeFault(code="odd", evidence=odd, open=True, unix_s=1.0))
    bench.send(MpsChanged(uuid=gpu(1), reason=odd, unix_s=1.0))
    hello = bench.node.hello(agent_version="1", agent_instance_id="i")
    heard = hello_from_proto(hello_to_proto(hello))
    assert heard.assignments[0].reason.startswith("GPU-0: process 77 of ")
    bench.send(Disconnected())
    bench.send(welcome())
    bench.processes[gpu(0)] = []
    bench.read()
    heard_reports = [report_from_proto(report_to_proto(each.report)) for each in bench.reports()]
    assert {fault.code for each in heard_reports for fault in each.faults} == {"odd", "mps_trouble"}
    assert {note.process.pid for each in heard_reports for note in each.process_notes} == {77, 78}
    assert not all(device.clean for each in heard_reports for device in each.devices)


def test_a_text_is_cut_where_it_is_too_long_and_else_left_as_it_is() -> None:
    fits = "\u00e4" * TEXT_CHARS_MAX
    assert sendable(fits) == fits
    assert sendable(fits + "b") == fits[:-3] + "..."
    assert sendable("a\0b\udcff") == "a b?"
