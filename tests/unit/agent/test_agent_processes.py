"""What /proc says of a process, whatever its owner has written there."""

from pathlib import Path

import pytest

from gpupool_agent.devices.processes import ProcProcessTable

PID = 77
STAT = f"{PID} (python) S 0 " + " ".join(["0"] * 17) + " 4711 0 0"


def lease_id(proc: Path, environment: bytes, cgroup: str = "0::/user.slice\n") -> str | None:
    """The lease that a process with this environment names."""
    directory = proc / str(PID)
    directory.mkdir(exist_ok=True)
    (directory / "stat").write_text(STAT)
    (directory / "cmdline").write_bytes(b"python\0train.py\0")
    (directory / "cgroup").write_text(cgroup)
    (directory / "environ").write_bytes(environment)
    facts = ProcProcessTable(proc).describe(PID)
    assert facts is not None
    assert facts.start_ticks == 4711
    return facts.lease_id


@pytest.mark.parametrize("named", ["a", "l-2f_9", "x" * 128])
def test_a_lease_is_named_by_the_environment(tmp_path: Path, named: str) -> None:
    environment = b"A=1\0GPUPOOL_LEASE_ID=" + named.encode() + b"\0B=2\0"
    assert lease_id(tmp_path, environment) == named


@pytest.mark.parametrize(
    "named", [b"", b"x" * 129, b"x" * 100_000, b"a b", b"a\n", b"\xff", "\u00e4".encode(), b"-a"]
)
def test_what_cannot_be_a_lease_id_names_no_lease(tmp_path: Path, named: bytes) -> None:
    environment = b"A=1\0GPUPOOL_LEASE_ID=" + named + b"\0B=2\0"
    assert lease_id(tmp_path, environment) == ""
    scope = "0::/user.slice/gpupool-lease-c1.scope\n"
    assert lease_id(tmp_path, environment, scope) == "c1"


@pytest.mark.parametrize(
    "left",
    [
        b"",
        b"\0" * 300,
        b"train: step 17" + b"\0" * 300,
        b"n.py --lr=0.1\0\0\0",
        b"train: step 17   \0/bin\0HOME=/root\0",
    ],
)
def test_an_environment_that_was_written_over_does_not_tell(tmp_path: Path, left: bytes) -> None:
    assert lease_id(tmp_path, left) is None
    assert lease_id(tmp_path, left, "0::/gpupool-lease-c1.scope\n") == "c1"
    # What is left of it still counts.
    assert lease_id(tmp_path, left + b"\0GPUPOOL_LEASE_ID=a\0") == "a"


def test_an_environment_without_a_lease_names_none(tmp_path: Path) -> None:
    assert lease_id(tmp_path, b"BASH_FUNC_which%%=() { :; }\0HOME=/root\0") == ""
