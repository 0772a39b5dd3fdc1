"""The agent's full accounts: when they come, and what is in them."""

from dataclasses import replace

import pytest
from tests.agent_bench import (
    Bench,
    assignment,
    gpu,
    holder,
    inventory,
    key,
    process,
    welcome,
    whole,
)

from gpupool.model.assignment import AssignmentState, Hello, Report
from gpupool_agent.core.events import (
    Connected,
    Disconnected,
    DriverSilent,
    HolderEnded,
    InventoryRead,
    SendReport,
)
from gpupool_agent.core.reporting import ACCOUNT_S_MAX, ACCOUNT_S_MIN

MINUTE_S = 60.0
"""Twelve of the bench's report intervals."""


def hello(bench: Bench) -> Hello:
    return bench.node.hello(agent_version="1", agent_instance_id="x")


def accounts(bench: Bench) -> list[Report]:
    """Full reports since the last look."""
    return [
        each.report for each in bench.take() if isinstance(each, SendReport) and each.report.full
    ]


def report_every(interval_s: float) -> Connected:
    return Connected(welcome=replace(welcome().welcome, report_interval_s=interval_s))


def test_a_full_account_comes_every_minute_though_nothing_changes() -> None:
    bench = Bench(0, 1)
    bench.desire(7, assignment("a", 1, whole(0)), holders=(holder("a", 50),))
    assert len(accounts(bench)) == 1
    bench.wait(10.5 * MINUTE_S)
    found = accounts(bench)
    assert len(found) == 10
    assert found[0] == found[9]
    (ran,) = found[0].assignments
    assert (ran.key, ran.token, ran.state) == (key("a"), 1, AssignmentState.PREPARED)
    assert ran.environment == bench.node.assignments()[0].environment
    assert [each.uuid for each in found[0].devices] == [gpu(0), gpu(1)]
    assert found[0].alive_holders == ("a",)
    assert found[0].accepted_revision == 7
    assert found[0].inventory is None


def test_an_account_names_places_so_that_a_book_can_take_in_what_it_has_lost() -> None:
    bench = Bench(0)
    wanted = assignment("a", 1, whole(0))
    bench.desire(1, wanted)
    bench.take()
    bench.wait(MINUTE_S)
    (told,) = accounts(bench)[0].assignments
    assert (told.place, told.uid) == (wanted.place, wanted.uid)


def test_changes_in_between_are_still_told_at_once_and_alone() -> None:
    bench = Bench(0, 1)
    bench.take()
    bench.wait(MINUTE_S / 2)
    bench.desire(1, assignment("a", 1, whole(0)))
    told = [each.report for each in bench.take() if isinstance(each, SendReport)]
    assert told
    assert not any(report.full for report in told)
    assert all(report.devices == () for report in told)


@pytest.mark.parametrize(
    ("interval_s", "every_s"),
    [(5.0, 60.0), (1.0, 12.0), (0.01, ACCOUNT_S_MIN), (600.0, ACCOUNT_S_MAX)],
)
def test_the_time_between_accounts_follows_the_report_interval_within_bounds(
    interval_s: float, every_s: float
) -> None:
    bench = Bench(0, connect=False)
    bench.send(report_every(interval_s))
    assert len(accounts(bench)) == 1
    bench.wait(10.5 * every_s)
    assert len(accounts(bench)) == 10


def test_nothing_is_due_while_there_is_no_connection() -> None:
    bench = Bench(0)
    bench.send(Disconnected())
    bench.take()
    assert bench.node.next_deadline() is None
    bench.wait(10 * MINUTE_S)
    assert bench.reports() == []


def test_the_first_account_leaves_out_the_inventory_that_hello_has_said() -> None:
    bench = Bench(0, 1, connect=False)
    assert hello(bench).inventory.devices == inventory(0, 1).devices
    bench.send(welcome())
    (first,) = accounts(bench)
    assert first.inventory is None
    assert [each.uuid for each in first.devices] == [gpu(0), gpu(1)]


def test_an_inventory_that_changed_since_hello_is_in_the_first_account() -> None:
    bench = Bench(0, 1, connect=False)
    hello(bench)
    bench.send(InventoryRead(inventory=inventory(0, 1, 2)))
    bench.send(welcome())
    (first,) = accounts(bench)
    assert first.inventory is not None
    assert first.inventory.devices == inventory(0, 1, 2).devices
    bench.wait(MINUTE_S)
    assert [report.inventory for report in accounts(bench)] == [None]


def test_what_another_connection_has_heard_counts_for_nothing_on_the_next() -> None:
    bench = Bench(0)
    assert accounts(bench)[0].inventory is not None
    bench.send(Disconnected())
    bench.send(welcome())
    assert accounts(bench)[0].inventory is not None
    bench.send(Disconnected())
    hello(bench)
    bench.send(InventoryRead(inventory=inventory(0, 1)))
    # That attempt failed; the next Hello says what is now.
    assert len(hello(bench).inventory.devices) == 2
    bench.send(welcome())
    assert accounts(bench)[0].inventory is None


def test_an_end_that_was_told_is_told_again_until_it_is_no_longer_asked_for() -> None:
    bench = Bench(0)
    bench.desire(1, assignment("a", 1, whole(0)), holders=(holder("a", 50),))
    bench.desire(2, holders=(holder("a", 50),))
    bench.send(HolderEnded(watch=holder("a", 50), reason="exited"))
    bench.take()
    for _ in range(2):
        bench.wait(MINUTE_S)
        (account,) = accounts(bench)
        assert [each.state for each in account.assignments] == [AssignmentState.ENDED]
        assert [end.lease_id for end in account.ended_holders] == ["a"]
    bench.desire(3)
    bench.take()
    bench.wait(MINUTE_S)
    (account,) = accounts(bench)
    assert (account.assignments, account.ended_holders) == ((), ())


def test_an_account_names_open_faults_and_loses_no_closing() -> None:
    bench = Bench(0)
    bench.send(DriverSilent(code="nvml_hang", reason="no answer"))
    bench.take()
    bench.wait(MINUTE_S)
    assert [(each.code, each.open) for each in accounts(bench)[0].faults] == [("nvml_hang", True)]
    due = bench.node.next_deadline()
    assert due is not None
    # The reading that closes it comes in the very moment that an account is due.
    bench.now = due
    bench.read()
    (account,) = accounts(bench)
    assert [(each.code, each.open) for each in account.faults] == [("nvml_hang", False)]
    bench.wait(MINUTE_S)
    assert accounts(bench)[0].faults == ()


def test_faults_that_come_and_go_while_nobody_listens_are_not_kept() -> None:
    bench = Bench(0, connect=False)
    for _ in range(100):
        bench.send(DriverSilent(code="nvml_hang", reason="no answer"))
        bench.read()
    bench.send(welcome())
    assert accounts(bench)[0].faults == ()


def test_an_account_waits_for_the_checkpoint_like_every_report_before_it() -> None:
    """It goes through the core's effects, so it can overtake nothing that was said before."""
    bench = Bench(0)
    bench.processes[gpu(0)] = [process(60)]
    bench.take()
    due = bench.node.next_deadline()
    assert due is not None
    bench.now = due
    bench.desire(1, assignment("a", 1, whole(0)))
    kinds = [type(each).__name__ for each in bench.take()]
    assert kinds.index("SaveCheckpoint") < kinds.index("SendReport")
