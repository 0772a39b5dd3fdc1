"""The machine that these tests run on: a simulated one always, the real one where there is one.

The same tests, programs and assertions for both. Figures that a test records are printed at
the end: ``scripts/test --gpu``.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.host_pool.machines import Machine, RealMachine, SimulatedMachine, missing_for_real
from tests.host_pool.pool import host_folder

REAL = pytest.param("real", marks=pytest.mark.gpu)
MAY_CHANGE = "--gpu-compute-mode"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        MAY_CHANGE,
        action="store_true",
        help="tests may set the compute mode of real GPUs (it is restored)",
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    with host_folder() as made:
        yield made


@pytest.fixture(params=["simulated", REAL])
def machine(request: pytest.FixtureRequest, folder: Path) -> Machine:
    if request.param == "simulated":
        return SimulatedMachine(folder)
    why = missing_for_real()
    if why:
        pytest.skip(why)
    return RealMachine()


@pytest.fixture
def exclusive_machine(request: pytest.FixtureRequest, machine: Machine) -> Machine:
    """A machine whose compute modes may be set."""
    if machine.name == "real" and not request.config.getoption(MAY_CHANGE, default=False):
        pytest.skip(f"the mode of real GPUs is left alone without {MAY_CHANGE}")
    return machine


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = [
        f"{report.nodeid.rpartition('::')[2]}: {name} {value}"
        for report in terminalreporter.getreports("passed")
        if "tests/gpu/" in report.nodeid
        for name, value in report.user_properties
    ]
    if lines:
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(line)
