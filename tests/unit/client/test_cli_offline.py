"""What the command line says without any pool."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpupool.cli.help import exit_codes
from gpupool.cli.output import Column, printable, table
from gpupool.cli.reference import reference
from gpupool.model.errors import ErrorKind


def run(*words: str | bytes) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpupool.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_committed_reference_is_what_the_commands_say(root: Path) -> None:
    """Else: python -m gpupool.cli.reference > docs/cli.md."""
    assert (root / "docs/cli.md").read_text() == reference()


def test_every_exit_code_of_the_error_table_is_explained() -> None:
    explained = dict(exit_codes())
    assert {kind.value.exit_code for kind in ErrorKind} <= set(explained)
    printed = run("help", "exit-codes").stdout
    assert all(f"{code}  {meaning}" in printed for code, meaning in explained.items())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_each_shell(shell: str) -> None:
    printed = run("completion", shell)
    assert printed.returncode == 0
    assert "_GPUPOOL_COMPLETE" in printed.stdout


def test_help_of_a_command_and_of_one_that_is_not_there() -> None:
    assert "Examples:" in run("help", "lease", "create").stdout
    missing = run("help", "lease", "steal")
    assert missing.returncode == 64
    assert "no such command: lease steal" in missing.stderr


def test_an_address_that_is_none_is_named() -> None:
    refused = run("--address", "here", "nodes")
    assert refused.returncode == 64
    assert "address: 'here'" in refused.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--address", b"\xff", "nodes"), "--address"),
        (("lease", "show", b"\xff"), "LEASE"),
        (("lease", "release", "l-1", b"l-\xff"), "LEASE..."),
        (("lease", "list", "--tenant", b"a\xff"), "--tenant"),
        (("explain", "--gpus", "1", "--name", b"\xff"), "--name"),
        (("explain", "--gpus", "1", "--model", "H100", "--model", b"\xff"), "--model"),
        (("explain", "--gpus", "1", "--label", b"a=\xed\xa0\x80"), "--label"),
        (("hold", "add", b"\xff"), "TARGET"),
        (("gpus", "--node", b"\xff"), "--node"),
        (("events", "--subject", b"\xff"), "--subject"),
    ],
)
def test_an_argument_that_is_no_utf8_is_told_by_its_name(
    words: tuple[str | bytes, ...], named: str
) -> None:
    refused = run(*words)
    assert refused.returncode == 64
    assert f"Error: Invalid value for '{named}': '" in refused.stderr
    assert "is not in text of UTF-8" in refused.stderr


def test_a_command_and_a_path_may_be_any_bytes() -> None:
    ran = run("--address", "127.0.0.1:1", "run", "--gpus", "2.5", "--", "ls", b"\xff")
    assert (ran.returncode, "UTF-8" in ran.stderr) == (64, False)
    assert "gpus: 2.5 is not in" in ran.stderr
    missing = run("explain", "--spec", b"/none/\xff")
    assert missing.returncode == 64
    assert "No such file" in missing.stderr


def test_cells_cannot_move_a_terminals_cursor() -> None:
    assert printable("a\x1b[2Jb\nc") == "a?[2Jb?c"
    columns: tuple[Column[str], ...] = (
        Column("NAME", lambda text: text),
        Column("SIZE", len, right=True),
    )
    assert table(columns, ["ab", ""]) == "NAME  SIZE\nab       2\n-        0"


def test_the_command_starts_without_rich_yaml_or_grpc() -> None:
    code = (
        "import sys, gpupool.cli.main; "
        "print([m for m in ('rich', 'yaml', 'grpc', 'google.protobuf') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
