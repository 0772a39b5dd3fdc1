"""Runs everything that a change must pass; scripts/test sets up and starts it.

Every step runs even when one before it failed. The tests come last, so the last
line printed is pytest's own summary. Exit status: 0 when everything passed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from system_parts import ensure_system_parts

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

CHECKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("proto lint", ("buf", "lint")),
    ("proto format", ("buf", "format", "--diff", "--exit-code")),
    ("stubs match protos", ("python", "scripts/generate", "--check")),
    ("ruff", ("ruff", "check", "--quiet")),
    ("ruff format", ("ruff", "format", "--check", "--quiet")),
    ("mypy", ("mypy",)),
    ("pyright", ("pyright",)),
    ("import rules", ("lint-imports", "--no-logo")),
)

FAST_TESTS = ("tests/unit", "tests/property")
# One file stays in one worker: its fixtures start daemons that its tests share.
PARALLEL = ("-n", "2", "--dist", "loadfile")

STOP_SIGNALS = (
    # pytest ends its fixtures, and so every daemon they started, on SIGINT.
    (signal.SIGINT, 20.0),
    (signal.SIGTERM, 5.0),
    (signal.SIGKILL, 5.0),
)


def main() -> int:
    """Parses the command line and runs the steps."""
    parser = argparse.ArgumentParser(
        prog="scripts/test",
        description="Runs lint, types, import rules and all tests.",
        epilog="Other arguments go to pytest: scripts/test -k 'slice and not gang'",
        allow_abbrev=False,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--fast", action="store_true", help="checks, unit and property tests only")
    which.add_argument("--slow", action="store_true", help="also the tests marked slow")
    which.add_argument(
        "--planted",
        action="store_true",
        help="break one promise at a time and see a named test turn red",
    )
    which.add_argument(
        "--gpu",
        action="store_true",
        help="only the tests on this machine's real GPUs: as root, driver and MPS installed",
    )
    options, pytest_arguments = parser.parse_known_args()
    # Ended by a CI runner or a terminal's hang-up: stop the children as for Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        if options.planted:
            return run("planted bugs", ["python", "tests/planted/run.py", *pytest_arguments])
        if options.gpu:
            # One after the other: they share the machine's GPUs.
            command = ["python", "-m", "pytest", "-m", "gpu", "tests/gpu", *pytest_arguments]
            return run("tests on real GPUs", command, tell_time=False)
        ensure_system_parts()
        failed = [name for name, command in CHECKS if run(name, command) != 0]
        if failed:
            headline(f"failed so far: {', '.join(failed)}")
        return max(run_tests(options, pytest_arguments), 1 if failed else 0)
    except KeyboardInterrupt:
        print("\ninterrupted", flush=True)
        return 130


def run_tests(options: argparse.Namespace, pytest_arguments: Sequence[str]) -> int:
    """Runs pytest; its summary is the last that is printed."""
    marks = "not gpu" if options.slow else "not gpu and not slow"
    where = [path for path in FAST_TESTS if options.fast and (ROOT / path).is_dir()]
    command = ["python", "-m", "pytest", *PARALLEL, "-m", marks, *where, *pytest_arguments]
    return run("tests", command, tell_time=False)


def run(name: str, command: Sequence[str], *, tell_time: bool = True) -> int:
    """Runs one step in its own process group; returns its exit status."""
    headline(name)
    started = time.monotonic()
    process = subprocess.Popen(
        [str(BIN / command[0]), *command[1:]],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        process_group=0,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"},
    )
    try:
        status = process.wait()
    except KeyboardInterrupt:
        stop(process)
        raise
    if tell_time:
        verdict = "ok" if status == 0 else f"FAILED ({status})"
        print(f"{name}: {verdict} in {time.monotonic() - started:.1f} s", flush=True)
    return status


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a step and all in its process group, asking before forcing."""
    for number, patience_s in STOP_SIGNALS:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return


def headline(text: str) -> None:
    """Prints a line that the eye finds."""
    print(f"\n== {text} " + "=" * max(0, 76 - len(text)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
