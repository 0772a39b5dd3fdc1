"""docs/install.md, followed on a machine with a real systemd, from install to uninstall.

The tests build on one another, in the page's order: each leaves the machine as the next one
finds it on a host.
"""

import json
import re
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.systemd.machine import CannotBootError, Machine, until
from tests.e2e.systemd.simulate import HOME

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
UNITS = ("gpupool-allocator", "gpupool-helper", "gpupool-agent")
INSTALL_S = 150.0
SLOT = "0123abcd"
WATCHDOG = "[Service]\nWatchdogSec=2\n"

# What of the page is run, each once and in its order.
PAGE = (ROOT / "docs" / "install.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    try:
        booted = Machine()
    except CannotBootError as error:
        pytest.skip(str(error))
    try:
        yield booted
    finally:
        booted.close()


@pytest.fixture(scope="module")
def found_before(machine: Machine) -> set[str]:
    """Every file of the machine outside of what is thrown away, before anything was done."""
    return files(machine)


@pytest.fixture(scope="module")
def installed(machine: Machine, found_before: set[str]) -> Machine:
    assert found_before
    for part in ("allocator", "agent"):
        assert f"scripts/install {part}" in COMMANDS
    done = machine.run(
        str(ROOT / "scripts" / "install"),
        "allocator",
        "agent",
        network=True,
        check=False,
        deadline_s=INSTALL_S,
    )
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip(f"pip has no packages here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr
    give_it_gpus(machine)
    return machine


def files(machine: Machine) -> set[str]:
    where = ("/etc", "/opt", "/usr/bin", "/usr/local", "/var/lib", "/run")
    told = machine.run("find", *where, "-xdev", check=False).stdout
    # What systemd itself makes while it runs.
    own = re.compile(r"/run/(systemd|udev|log|credentials|user|dbus|lock|utmp)|/var/lib/systemd")
    return {line for line in told.splitlines() if not own.match(line)}


def give_it_gpus(machine: Machine) -> None:
    """Simulated ones, with the stand-in for MPS's control program."""
    packages = machine.say("/opt/gpupool/bin/python", "-c", "import pynvml; print(pynvml.__file__)")
    folder = machine.root / Path(packages).parent.relative_to("/")
    (folder / "simulate_gpus.py").write_text((HERE / "simulate.py").read_text())
    (folder / "simulate_gpus.pth").write_text("import simulate_gpus; simulate_gpus.simulate()\n")
    make = "import simulate_gpus; simulate_gpus.lay_out('/opt/gpupool/bin')"
    machine.run("/opt/gpupool/bin/python", "-c", make)
    link = machine.root / "usr/bin/nvidia-cuda-mps-control"
    link.symlink_to("/opt/gpupool/bin/nvidia-cuda-mps-control")
    settings = machine.root / "etc/gpupool"
    probe = "GPUPOOL_HELPER_PROBE_PROGRAM=/opt/gpupool/bin/gpupool-mps-probe\n"
    (settings / "helper.env").write_text(probe)
    (settings / "agent.env").write_text("GPUPOOL_AGENT_USAGE_PERIOD_S=0.5\n")


def pid_of(machine: Machine, unit: str) -> int:
    return int(machine.state(unit, "MainPID"))


def kill(machine: Machine, unit: str) -> None:
    """As a crash would; returns when systemd has started it anew."""
    killed = pid_of(machine, unit)
    machine.run("kill", "-KILL", str(killed))
    until(lambda: is_started_anew(machine, unit, killed), f"{unit} again")


def is_started_anew(machine: Machine, unit: str, before: int) -> bool:
    return pid_of(machine, unit) not in (0, before) and machine.state(unit) == "active"


@contextmanager
def drop_in(machine: Machine, unit: str, text: str) -> Generator[None]:
    """Change a unit for the block, as systemctl edit does."""
    folder = machine.root / f"etc/systemd/system/{unit}.service.d"
    folder.mkdir(parents=True)
    (folder / "test.conf").write_text(text)
    machine.run("systemctl", "daemon-reload")
    try:
        yield
    finally:
        (folder / "test.conf").unlink()
        folder.rmdir()
        machine.run("systemctl", "daemon-reload")


def gpus(machine: Machine) -> list[dict[str, Any]]:
    rows = json.loads(machine.say("gpupool", "gpus", "-o", "json"))
    found = rows if isinstance(rows, list) else next(iter(rows.values()))
    return list(found)


def leases(machine: Machine) -> list[dict[str, Any]]:
    rows = json.loads(machine.say("gpupool", "lease", "list", "-o", "json"))
    found = rows if isinstance(rows, list) else rows.get("leases", [])
    return list(found)


def ask_helper(machine: Machine, user: str, work: str) -> str:
    """Something of the helper's client, as a user of the machine."""
    code = (
        "import asyncio\n"
        "from pathlib import Path\n"
        "from gpupool_agent.devices.helper_client import HelperClient\n"
        "from gpupool_agent.devices.privileged import *\n"
        "async def main():\n"
        "    helper = HelperClient(Path('/run/gpupool-helper/helper.sock'))\n"
        f"    print({work})\n"
        "    await helper.close()\n"
        "asyncio.run(main())\n"
    )
    return machine.say("runuser", "-u", user, "--", "/opt/gpupool/bin/python", "-c", code)


def connected(machine: Machine) -> bool:
    return machine.run("gpupool", "nodes", check=False).stdout.count("connected") == 1


def test_settings_are_checked_as_the_page_says(installed: Machine) -> None:
    check = "gpupool-allocator --config /etc/gpupool/allocator.toml --check"
    assert check in COMMANDS
    assert "grain_pct = 10" in installed.say(*check.split())


def test_services_start_and_the_pool_has_the_host(installed: Machine) -> None:
    for line in COMMANDS:
        if line.startswith("systemctl enable"):
            installed.run(*line.split())
    for unit in UNITS:
        assert installed.state(unit) == "active", installed.journal(unit)
    until(lambda: connected(installed), "the agent")
    until(lambda: len(gpus(installed)) == 8, "the GPUs")


def test_who_runs_as_whom(installed: Machine) -> None:
    users = {
        unit: installed.say("ps", "-o", "user=", "-p", str(pid_of(installed, unit)))
        for unit in UNITS
    }
    assert users == {
        "gpupool-allocator": "gpupool",
        "gpupool-helper": "root",
        "gpupool-agent": "gpupool",
    }


def test_the_helper_is_up_before_the_agent_and_is_found(installed: Machine) -> None:
    began = [
        int(installed.state(unit, "ExecMainStartTimestampMonotonic"))
        for unit in ("gpupool-helper", "gpupool-agent")
    ]
    assert began == sorted(began)
    assert "agent.read_only" not in installed.journal("gpupool-agent")


def test_an_agent_without_its_helper_reads_on_and_says_so(installed: Machine) -> None:
    # The agent wants its helper, so it would be started with it.
    with drop_in(installed, "gpupool-helper", "[Unit]\nConditionPathExists=/nowhere\n"):
        installed.run("systemctl", "stop", "gpupool-helper")
        installed.run("systemctl", "restart", "gpupool-agent")
        assert installed.state("gpupool-helper") == "inactive"
        until(
            lambda: "read only" in installed.state("gpupool-agent", "StatusText"),
            "the agent's status",
        )
        until(lambda: len(gpus(installed)) == 8, "the GPUs")
        assert "agent.read_only" in installed.journal("gpupool-agent")
        assert "no_root_helper" in installed.say("gpupool", "events", "-o", "json")
    installed.run("systemctl", "restart", "gpupool-agent")
    assert installed.state("gpupool-helper") == "active"
    until(lambda: connected(installed), "the agent")


def test_a_daemon_is_a_unit_of_its_own_that_outlives_helper_and_agent(installed: Machine) -> None:
    uuid = gpus(installed)[0]["device"]["uuid"]
    unit = f"gpupool-mps@{SLOT}"
    start = f"await helper.start_mps(MpsSlot(name='{SLOT}', gpu='{uuid}', uid=65534))"
    told = ask_helper(installed, "gpupool", start)
    assert f"pipe_directory='/run/gpupool-mps/{SLOT}/pipe'" in told
    assert installed.state(unit) == "active"
    pid = pid_of(installed, unit)
    for other in ("gpupool-helper", "gpupool-agent"):
        installed.run("systemctl", "restart", other)
    kill(installed, "gpupool-helper")
    assert pid_of(installed, unit) == pid
    daemon = ask_helper(installed, "gpupool", f"(await helper.mps_daemon('{SLOT}')).pid")
    assert int(daemon) == pid
    ps = "get_default_active_thread_percentage"
    assert "100.0" in ask_helper(
        installed, "gpupool", f"await helper.mps_commands('{SLOT}', ('{ps}',))"
    )
    ask_helper(installed, "gpupool", f"await helper.stop_mps('{SLOT}')")
    assert installed.state(unit) == "inactive"
    assert installed.run("ls", "/run/gpupool-mps").stdout == ""


def test_only_the_agents_user_is_answered_and_each_action_is_written_down(
    installed: Machine,
) -> None:
    done = installed.run(
        "runuser",
        "-u",
        "nobody",
        "--",
        "test",
        "-w",
        "/run/gpupool-helper/helper.sock",
        check=False,
    )
    assert done.returncode != 0
    lines = [
        json.loads(line)
        for line in installed.journal("gpupool-helper").splitlines()
        if line.startswith("{")
    ]
    (line,) = [line for line in lines if line.get("action") == "stop_mps"]
    uid = int(installed.say("id", "-u", "gpupool"))
    assert (line["peer_uid"], line["arguments"], line["outcome"]) == (uid, {"slot": SLOT}, "done")


def test_a_lease_lives_through_restarts_and_crashes_of_everything(installed: Machine) -> None:
    until(lambda: connected(installed), "the agent")
    installed.run(
        "systemd-run",
        "--unit=holder",
        "--property=User=nobody",
        "gpupool",
        "run",
        "--gpus",
        "1",
        "--",
        "sleep",
        "600",
    )

    def state() -> str:
        return str(leases(installed)[0]["state"]) if leases(installed) else ""

    until(lambda: "ACTIVE" in state().upper(), "the lease")
    (before,) = leases(installed)
    for unit in ("gpupool-agent", "gpupool-helper"):
        installed.run("systemctl", "restart", unit)
    for unit in UNITS:
        kill(installed, unit)
    until(lambda: connected(installed), "the agent")
    assert installed.state("holder") == "active", installed.journal("holder")
    (after,) = leases(installed)
    assert after["lease_id"] == before["lease_id"]
    assert "ACTIVE" in state().upper()
    installed.run("systemctl", "stop", "holder")
    until(
        lambda: not any("ACTIVE" in str(each["state"]).upper() for each in leases(installed)),
        "its end",
    )


def hold_a_slice(machine: Machine) -> None:
    """A CUDA client of nobody's on a tenth of a GPU, in a unit of its own."""
    client = ("/opt/gpupool/bin/python", "-m", "gpupool_agent.simulated.cuda_client")
    machine.run(
        "systemd-run",
        *("--unit=slice", "--collect"),
        "--property=User=nobody",
        f"--setenv=GPUPOOL_SIMULATED_NODE={HOME}",
        *("gpupool", "run", "--gpus", "0.1", "--", *client),
    )
    until(lambda: "ACTIVE" in state_of_only_lease(machine), "the slice")
    until(lambda: len(on_gpus(machine)) == 2, "its client")


def state_of_only_lease(machine: Machine) -> str:
    found = [str(each["state"]).upper() for each in leases(machine)]
    return found[0] if len(found) == 1 else ""


def on_gpus(machine: Machine) -> list[int]:
    """Processes that the driver lists: of a slice, its MPS server and its client."""
    listed = f"{HOME}/gpu-processes/[0-9]*"
    script = f"for each in {listed}; do [ -d /proc/${{each##*/}} ] && echo $each; done"
    told = machine.run("sh", "-c", script, check=False).stdout
    return sorted(int(line.rpartition("/")[2]) for line in told.splitlines())


def mps_units(machine: Machine) -> list[str]:
    told = machine.say(
        *("systemctl", "list-units", "--all", "--plain", "--no-legend", "gpupool-mps@*")
    )
    return [line.split()[0] for line in told.splitlines()]


def test_a_slice_its_daemon_and_its_clients_live_through_all_of_it(installed: Machine) -> None:
    """Restarts, daemon-reload, reloads, crashes and the watchdog: the same processes after."""
    until(lambda: connected(installed), "the agent")
    hold_a_slice(installed)
    (unit,) = mps_units(installed)
    (before,) = leases(installed)
    daemon, clients = pid_of(installed, unit), on_gpus(installed)

    def is_as_before(what: str) -> None:
        until(lambda: connected(installed), f"the agent after {what}")
        assert pid_of(installed, unit) == daemon, what
        assert on_gpus(installed) == clients, what
        assert installed.state("slice") == "active", installed.journal("slice")

    for verb in ("restart", "reload", "daemon-reload", "restart"):
        words = (verb,) if verb == "daemon-reload" else (verb, "gpupool-agent")
        installed.run("systemctl", *words)
        is_as_before(verb)
    for other in UNITS:
        kill(installed, other)
        is_as_before(f"the crash of {other}")
    for other in ("gpupool-agent", "gpupool-helper"):
        with drop_in(installed, other, WATCHDOG):
            installed.run("systemctl", "restart", other)
            stopped = pid_of(installed, other)
            installed.run("kill", f"-{signal.SIGSTOP.value}", str(stopped))
            until(lambda u=other, p=stopped: is_started_anew(installed, u, p), "a new process")
            is_as_before(f"the watchdog of {other}")
        installed.run("systemctl", "restart", other)
    is_as_before("all of it")
    (after,) = leases(installed)
    assert {key: after[key] for key in ("lease_id", "state", "members")} == {
        key: before[key] for key in ("lease_id", "state", "members")
    }
    installed.run("systemctl", "stop", "slice")
    until(lambda: not mps_units(installed), "the end of the daemon")
    until(lambda: leases(installed) == [], "the end of the lease")
    assert on_gpus(installed) == []
    for where in ("/run/gpupool-mps", "/run/gpupool/mps", "/run/cdi"):
        assert installed.run("ls", where, check=False).stdout == "", where
    assert "mps-" not in installed.run("ls", "/run/gpupool-helper").stdout
    told = json.loads((installed.run("cat", f"{HOME}/driver.json")).stdout)
    assert {gpu.get("compute_mode", 0) for gpu in told["gpus"].values()} == {0}


@pytest.mark.parametrize("unit", UNITS)
def test_a_reload_is_taken_and_nothing_ends(installed: Machine, unit: str) -> None:
    if unit == "gpupool-helper":
        assert installed.state(unit, "CanReload") == "no"
        return
    before = pid_of(installed, unit)
    installed.run("systemctl", "reload", unit)
    name = unit.removeprefix("gpupool-")
    until(lambda: f"{name}.reloaded" in installed.journal(unit), "the reload")
    until(lambda: installed.state(unit) == "active", "the end of the reload")
    assert pid_of(installed, unit) == before


@pytest.mark.parametrize("unit", UNITS)
def test_a_program_that_does_not_get_on_is_started_anew_by_the_watchdog(
    installed: Machine, unit: str
) -> None:
    with drop_in(installed, unit, WATCHDOG):
        installed.run("systemctl", "restart", unit)
        stopped = pid_of(installed, unit)
        # The process that gives signs of life; the allocator's is its keeper's child.
        children = installed.run("pgrep", "-P", str(stopped), check=False).stdout.split()
        installed.run("kill", f"-{signal.SIGSTOP.value}", *(children or [str(stopped)]))
        until(lambda: is_started_anew(installed, unit, stopped), "a new process")
        assert "Watchdog timeout" in installed.say("journalctl", "--no-pager", "-u", unit)
    installed.run("systemctl", "restart", unit)


def test_installing_again_keeps_the_settings_and_upgrades(installed: Machine) -> None:
    file = installed.root / "etc/gpupool/agent.toml"
    file.write_text(file.read_text() + "\n# mine\n")
    installed.run(str(ROOT / "scripts" / "install"), "agent", network=True, deadline_s=INSTALL_S)
    assert file.read_text().endswith("# mine\n")
    assert installed.run("/opt/gpupool/bin/python", "-c", "import aiohttp").returncode == 0


def test_uninstalling_leaves_settings_and_state_and_nothing_runs(installed: Machine) -> None:
    assert "scripts/uninstall" in COMMANDS
    until(lambda: connected(installed), "the agent")
    hold_a_slice(installed)
    (daemon,) = mps_units(installed)
    installed.run(str(ROOT / "scripts" / "uninstall"))
    installed.run("systemctl", "stop", "slice")
    for unit in (*UNITS, daemon):
        assert installed.state(unit) == "inactive"
        assert installed.state(unit, "LoadState") == "not-found"
    assert installed.run("pgrep", "-f", "gpupool|mps-control", check=False).stdout == ""
    assert (installed.root / "etc/gpupool/agent.toml").exists()
    assert (installed.root / "var/lib/gpupool/allocator.db").exists()


def test_a_purge_leaves_nothing(installed: Machine, found_before: set[str]) -> None:
    (installed.root / "usr/bin/nvidia-cuda-mps-control").unlink()
    installed.run(str(ROOT / "scripts" / "uninstall"), "--purge")
    assert installed.run("getent", "passwd", "gpupool", check=False).stdout == ""
    assert installed.run("getent", "group", "gpupool", check=False).stdout == ""
    # Copies that useradd makes of the files it changes, on any system.
    copies = {
        f"/etc/{name}-" for name in ("passwd", "group", "shadow", "gshadow", "subuid", "subgid")
    }
    left = files(installed) - found_before - copies
    assert {each for each in left if not each.startswith("/run/cdi")} == set()
