"""What the control program does without a GPU: the stand-in as the real one.

The real one is Debian's, fetched into a folder of the test; where it cannot be had its
half is skipped with the reason.
"""

import itertools
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.contract.mps_control.programs import (
    Control,
    UnavailableError,
    fetch_real,
    until,
)

from gpupool_agent.simulated.mps_control.launcher import write_launcher

NOBODY_UID = 65534
UNKNOWN_GPU = "GPU-5c1b9f5e-1111-2222-3333-444455556666"
Make = Callable[..., Control]

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="daemons of root are what is compared")


@pytest.fixture(scope="module", params=["stand-in", "real"])
def program(request: pytest.FixtureRequest) -> Iterator[Path]:
    with open_folder() as folder:
        if request.param == "stand-in":
            yield write_launcher(folder)
            return
        try:
            found = fetch_real(folder)
        except UnavailableError as error:
            pytest.skip(f"the real program cannot be had: {error}")
        yield found


@contextmanager
def open_folder() -> Iterator[Path]:
    """Pytest's own folders are closed to other users."""
    with tempfile.TemporaryDirectory(prefix="gpupool-mps-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def make(program: Path) -> Iterator[Make]:
    made: list[Control] = []
    numbers = itertools.count()

    def new() -> Control:
        directory = folder / str(next(numbers))
        control = Control(
            program=program,
            directory=directory,
            simulated="root" not in program.parts[-4:],
        )
        control.pipe.mkdir(parents=True)
        control.logs.mkdir()
        directory.chmod(0o755)
        made.append(control)
        return control

    with open_folder() as folder:
        yield new
        for control in made:
            control.run(lines="quit -t 0\n")


@pytest.fixture
def control(make: Make) -> Control:
    """A program whose daemon runs."""
    control = make()
    assert control.run("-d").code == 0
    return control


def test_without_a_daemon_commands_fail_and_say_so(make: Make) -> None:
    result = make().run(lines="get_server_list\n")
    assert result.code == 1
    assert result.text == "Cannot find MPS control daemon process\n"


def test_a_started_daemon_listens_at_once(control: Control) -> None:
    assert stat.S_ISSOCK((control.pipe / "control").stat().st_mode)
    assert control.ask("get_server_list") == []
    control.logged("Starting control daemon using socket")


def test_one_daemon_for_one_pipe_directory(control: Control) -> None:
    second = control.run("-d")
    assert second.code == 1
    assert "An instance of this daemon is already running" in second.text
    assert control.ask("get_default_active_thread_percentage") == ["100.0"]


def test_daemons_on_other_directories_are_others(make: Make) -> None:
    first, second = make(), make()
    assert first.run("-d").code == second.run("-d").code == 0
    first.ask("set_default_active_thread_percentage 30")
    assert second.ask("get_default_active_thread_percentage") == ["100.0"]


def test_unknown_flags_are_refused_and_help_is_not(make: Make) -> None:
    assert make().run("--nonsense").code == 1
    assert make().run("-h").code == 0


def test_an_unknown_command_is_named_and_the_next_is_carried_out(control: Control) -> None:
    said = control.ask("get_server_list", "nonsense", "get_default_client_priority")
    assert said == ['Unknown command "nonsense"', "0"]


@pytest.mark.parametrize(
    ("asked", "kept"), [("33", "33.0"), ("33.7", "33.7"), ("12.345", "12.3"), ("100", "100.0")]
)
def test_a_percentage_is_echoed_and_read_back(control: Control, asked: str, kept: str) -> None:
    said = control.ask(
        f"set_default_active_thread_percentage {asked}", "get_default_active_thread_percentage"
    )
    assert said == [kept, kept]


@pytest.mark.parametrize("asked", ["0", "150", "100.01", "abc", ""])
def test_a_percentage_out_of_range_changes_nothing(control: Control, asked: str) -> None:
    control.ask("set_default_active_thread_percentage 40")
    assert control.ask(f"set_default_active_thread_percentage {asked}") == ["40.0"]
    assert control.ask("get_default_active_thread_percentage") == ["40.0"]
    control.logged("Invalid percentage, expected between (0.0, 100.0]")


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ("2G", "2G"),
        ("300M", "300M"),
        ("1024M", "1G"),
        ("300MB", "300M"),
        ("12", "12M"),
        ("2X", "2M"),
        ("1.5G", "1M"),
    ],
)
def test_a_memory_limit_is_read_back_in_its_plainest_form(
    control: Control, asked: str, kept: str
) -> None:
    assert control.ask(f"set_default_device_pinned_mem_limit 0 {asked}") == []
    assert control.ask("get_default_device_pinned_mem_limit 0") == [kept]


def test_no_memory_limit_is_no_output(control: Control) -> None:
    assert control.ask("get_default_device_pinned_mem_limit 0") == []
    control.ask("set_default_device_pinned_mem_limit 3 5G")
    assert control.ask("get_default_device_pinned_mem_limit 4") == []
    control.ask("set_default_device_pinned_mem_limit 3 0M")
    assert control.ask("get_default_device_pinned_mem_limit 3") == []


def test_an_unknown_device_is_passed_over_in_silence(control: Control) -> None:
    for name in (UNKNOWN_GPU, "GPU-abc", "200"):
        assert control.ask(f"set_default_device_pinned_mem_limit {name} 300M") == []
        assert control.ask(f"get_default_device_pinned_mem_limit {name}") == []


@pytest.mark.parametrize("amount", ["", "abc", "0"])
def test_what_is_no_amount_takes_the_limit_away(control: Control, amount: str) -> None:
    control.ask("set_default_device_pinned_mem_limit 1 2G")
    assert control.ask(f"set_default_device_pinned_mem_limit 1 {amount}") == []
    assert control.ask("get_default_device_pinned_mem_limit 1") == []


def test_an_unknown_name_takes_the_limit_of_the_first_device_away(control: Control) -> None:
    control.ask("set_default_device_pinned_mem_limit 0 2G")
    control.ask("set_default_device_pinned_mem_limit 1 3G")
    control.ask("set_default_device_pinned_mem_limit 40 3G")
    assert control.ask("get_default_device_pinned_mem_limit 0") == ["2G"]
    control.ask(f"set_default_device_pinned_mem_limit {UNKNOWN_GPU} 300M")
    assert control.ask("get_default_device_pinned_mem_limit 0") == []
    assert control.ask("get_default_device_pinned_mem_limit 1") == ["3G"]


def test_the_client_priority_is_0_or_1(control: Control) -> None:
    assert control.ask("set_default_client_priority 1", "get_default_client_priority") == ["1"]
    assert control.ask("set_default_client_priority 2") == [
        "Invalid priority value - must be 0 or 1!"
    ]
    assert control.ask("get_default_client_priority") == ["1"]


@pytest.mark.parametrize(
    "command",
    [
        "get_active_thread_percentage 99",
        "set_active_thread_percentage 99 20",
        "get_device_pinned_mem_limit 99 0",
        "set_device_pinned_mem_limit 99 0 1G",
        "get_client_list 99",
        "get_device_client_list 99",
        "shutdown_server 99",
        "shutdown_server 99 -f",
    ],
)
def test_a_server_that_is_not_there_is_named(control: Control, command: str) -> None:
    assert control.ask(command) == ["Server 99 not found"]


def test_other_ways_of_saying_that_a_server_is_not_there(control: Control) -> None:
    assert control.ask("ps") == ["Server not found"]
    assert control.ask("get_device_client_list") == []
    assert control.ask("terminate_client 99 98")[-1] == "1"
    assert "Server 99 not found" in control.ask("ps -p 99")


def test_the_status_of_a_server_is_known_or_the_command_is_not(control: Control) -> None:
    (said,) = control.ask("get_server_status 99")
    assert said in {"Server 99 not found", 'Unknown command "get_server_status"'}


def test_a_server_needs_a_user(control: Control) -> None:
    assert control.ask("start_server") == ["A user id (UID) is required to start a new server"]


def test_a_server_without_a_driver_ends_and_the_daemon_goes_on(control: Control) -> None:
    assert control.ask("start_server -uid 0") == []
    control.logged("for user 0")
    number = re.search(r"Starting new server (\d+) for user 0", control.log())
    assert number is not None
    control.logged(f"Server {number[1]} exited with status 1")
    until(lambda: control.ask("get_server_list") == [], "no server is listed")


def test_any_user_may_change_settings_and_only_the_own_may_quit(control: Control) -> None:
    said = control.run(lines="set_default_active_thread_percentage 50\nquit\n", uid=NOBODY_UID)
    assert said.text.splitlines() == ["50.0", "Not enough privilege to execute quit command"]
    assert control.ask("get_default_active_thread_percentage") == ["50.0"]


def test_quit_ends_the_daemon_and_its_settings(control: Control) -> None:
    control.ask("set_default_active_thread_percentage 50")
    assert control.ask("quit") == []
    until(lambda: control.run(lines="get_server_list\n").code == 1, "it is gone")
    assert control.run("-d").code == 0
    assert control.ask("get_default_active_thread_percentage") == ["100.0"]


def test_quit_with_a_time(control: Control) -> None:
    assert control.ask("quit -t 1") == []
    control.logged("quit command issued with timeout of 1")
    control.logged("Exit with status 0")


def test_quit_tells_when_a_server_had_failed(control: Control) -> None:
    control.ask("start_server -uid 0")
    control.logged("exited with status 1")
    until(lambda: control.ask("get_server_list") == [], "no server is listed")
    code = control.run(lines="quit\n").code
    # The real one's shell misses it now and then, on a busy machine; its log does not.
    assert code in ({1} if control.simulated else {0, 1})
    control.logged("Exit with status 1")


def test_the_log_has_every_command(control: Control) -> None:
    control.ask("get_default_active_thread_percentage")
    control.logged("UI closed")
    assert re.search(
        r"(?m)^\[[-0-9]{10} [:.0-9]{12} Control +\d+\] Cmd:get_default_active_thread_percentage$",
        control.log(),
    )


def test_a_killed_daemon_leaves_its_files_and_the_next_takes_them(control: Control) -> None:
    for pid in daemons_of(control):
        os.kill(pid, 9)
    until(lambda: control.run(lines="get_server_list\n").code == 1, "the daemon is gone")
    assert (control.pipe / "control").exists()
    assert control.run("-d").code == 0
    assert control.ask("get_server_list") == []


def daemons_of(control: Control) -> list[int]:
    """Processes whose environment has the pipe directory."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"CUDA_MPS_PIPE_DIRECTORY={control.pipe}".encode() in words:
            found.append(int(path.parent.name))
    return found


def test_the_kernel_shows_the_names_that_a_foreign_daemon_is_found_by(control: Control) -> None:
    (pid,) = daemons_of(control)
    assert Path(f"/proc/{pid}/comm").read_text() == "nvidia-cuda-mps\n"
