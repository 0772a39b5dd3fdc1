"""Plants one bug at a time and expects a named test to turn red.

usage: scripts/test --planted [PATCH ...]

A test suite is only worth the bugs it catches. Each patch in this folder breaks one
promise; planted.toml says which promise and which test guards it. Every patch is
applied to its own copy of the tree, so the checkout is never touched. Exit status
1 when a test stayed green, a patch no longer applies, or a test did not run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
ROOMS = ("client", "agent", "allocator")
TEST_LIMIT_S = 300.0
WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One bug: its patch, the promise it breaks, the test that must see it."""

    patch: str
    promise: str
    test: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How one planted bug went; ``output`` is shown when it was not caught."""

    planted: Planted
    caught: bool
    summary: str
    seconds: float
    output: str = ""


def main() -> int:
    """Runs all planted bugs, or those named."""
    parser = argparse.ArgumentParser(prog="scripts/test --planted")
    parser.add_argument("patches", nargs="*", metavar="PATCH", help="only these, as wrong-sum")
    wanted: list[str] = parser.parse_args().patches
    chosen = [bug for bug in load() if not wanted or bug.patch.removesuffix(".patch") in wanted]
    if not chosen:
        print(f"no planted bug is called {', '.join(wanted)}")
        return 64
    with tempfile.TemporaryDirectory(prefix="gpupool-planted-") as scratch:
        clean = Path(scratch) / "clean"
        copy_tree(clean)
        if not passes_unpatched(clean, sorted({bug.test for bug in chosen})):
            return 1
        with ThreadPoolExecutor(WORKERS) as workers:
            verdicts = list(workers.map(lambda bug: plant(bug, Path(scratch)), chosen))
    return report(verdicts)


def load() -> list[Planted]:
    """Reads planted.toml; every patch of the folder must be listed, and listed once."""
    table = tomllib.loads((HERE / "planted.toml").read_text())
    bugs = [Planted(**row) for row in table.get("planted", [])]
    listed = sorted(bug.patch for bug in bugs)
    present = sorted(path.name for path in HERE.glob("*.patch"))
    if listed != present:
        sys.exit(f"planted.toml lists {listed}, the folder holds {present}")
    return bugs


def copy_tree(to: Path) -> None:
    """Copies the tree as it is now: tracked and new files, without what git ignores."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        source, target = ROOT / name, to / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def passes_unpatched(tree: Path, tests: Sequence[str]) -> bool:
    """Whether every named test passes, none skipped, on the tree as it is."""
    imported = run_python(tree, ["-c", "import gpupool; print(gpupool.__file__)"])
    if str(tree) not in imported.stdout:
        print(f"the copy is not what would be tested: {imported.stdout or imported.stderr}")
        return False
    done = run_tests(tree, tests)
    if done.returncode == 0 and " skipped" not in last_line(done.stdout):
        print(f"without a planted bug: {last_line(done.stdout)}")
        return True
    print(done.stdout, done.stderr)
    print("the named tests must pass, none skipped, before a bug is planted")
    return False


def plant(bug: Planted, scratch: Path) -> Verdict:
    """Applies one patch to a copy of its own and runs its test there."""
    started = time.monotonic()
    tree = scratch / bug.patch.removesuffix(".patch")
    shutil.copytree(scratch / "clean", tree)
    applied = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", str(HERE / bug.patch)],
        cwd=tree,
        check=False,
        capture_output=True,
        text=True,
    )
    if applied.returncode != 0:
        return verdict(bug, started, "the patch no longer applies", output=applied.stderr)
    try:
        done = run_tests(tree, [bug.test])
    except subprocess.TimeoutExpired:
        return verdict(bug, started, f"no verdict within {TEST_LIMIT_S:.0f} s")
    # pytest: 0 all passed, 1 a test failed, anything else it did not get to run.
    if done.returncode == 1 and " error" not in last_line(done.stdout):
        return verdict(bug, started, "red, as it must be", caught=True)
    if done.returncode == 0:
        return verdict(bug, started, "STAYED GREEN", output=done.stdout)
    return verdict(bug, started, "the test did not run", output=done.stdout + done.stderr)


def verdict(
    bug: Planted, started: float, summary: str, *, caught: bool = False, output: str = ""
) -> Verdict:
    """A verdict with the time it took."""
    return Verdict(
        planted=bug,
        caught=caught,
        summary=summary,
        seconds=time.monotonic() - started,
        output=output,
    )


def run_tests(tree: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs tests in a copy, the same way every time; TEST_LIMIT_S for each of them."""
    # A fixed seed: whether a property test finds the bug must not depend on luck.
    fixed = ["--hypothesis-seed=0", "-p", "no:cacheprovider"]
    command = ["-m", "pytest", "-q", "--no-header", "--tb=short", *fixed, *tests]
    return run_python(tree, command, limit_s=TEST_LIMIT_S * len(tests))


def run_python(
    tree: Path, arguments: Sequence[str], *, limit_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Runs our interpreter on a copy's code, which wins over the editable install."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(tree / room) for room in ROOMS),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        check=False,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def last_line(text: str) -> str:
    """The summary that pytest ends with."""
    return (text.strip().splitlines() or [""])[-1]


def report(verdicts: Sequence[Verdict]) -> int:
    """Prints the table; returns the exit status."""
    for missed in verdicts:
        if not missed.caught and missed.output:
            print(f"\n--- {missed.planted.patch}: {missed.summary}\n{missed.output}")
    width = max(len(bug.planted.patch) for bug in verdicts)
    print()
    for one in verdicts:
        print(
            f"{one.planted.patch:{width}}  {one.summary:26}  {one.seconds:5.1f} s  "
            f"{one.planted.promise}"
        )
    caught = sum(one.caught for one in verdicts)
    print(f"{caught} of {len(verdicts)} planted bugs were caught")
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
