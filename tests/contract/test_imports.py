"""The import rules of the rooms hold, and the linter that holds them is not asleep."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PURE = ("client/gpupool/model", "agent/gpupool_agent/core", "allocator/gpupool_allocator/core")
FORBIDDEN_IN_CORES = {
    "grpc", "google", "sqlite3", "asyncio", "socket", "aiohttp", "threading", "subprocess", "os",
    "structlog", "logging", "uuid", "secrets", "time", "random", "gpupool.v1",
}  # fmt: skip


def contracts() -> dict[str, dict[str, object]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {c["name"]: c for c in settings["tool"]["importlinter"]["contracts"]}


def test_the_cores_may_not_import_anything_that_does_io() -> None:
    rule = contracts()["the words and the cores do no I/O and know no wire"]
    forbidden = rule["forbidden_modules"]
    assert isinstance(forbidden, list)
    assert set(forbidden) >= FORBIDDEN_IN_CORES


def test_importing_the_cores_alone_loads_no_wire_and_no_store() -> None:
    """A rule about direct imports would miss what comes in through a third module."""
    script = (
        "import sys, pkgutil, importlib\n"
        "for package in ('gpupool.model', 'gpupool_allocator.core', 'gpupool_agent.core'):\n"
        "    try: root = importlib.import_module(package)\n"
        "    except ModuleNotFoundError: continue\n"
        "    for found in pkgutil.walk_packages(root.__path__, package + '.'):\n"
        "        importlib.import_module(found.name)\n"
        "bad = {'grpc', 'google.protobuf', 'sqlite3', 'aiohttp', 'structlog', 'gpupool.v1'}\n"
        "print(*sorted(bad & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.split() == []


def test_importing_the_client_loads_no_program_and_nothing_heavy() -> None:
    """The SDK lives inside other people's programs: its import must stay small."""
    script = (
        "import sys, gpupool\n"
        "heavy = {'rich', 'yaml', 'numpy', 'click', 'gpupool_agent', 'gpupool_allocator'}\n"
        "print(*sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.split() == []


def test_importing_the_helper_loads_no_wire_and_nothing_of_the_agents_core() -> None:
    """It runs as root: what is not there cannot be wrong there."""
    script = (
        "import sys, gpupool_agent.helper.__main__\n"
        "bad = ('grpc', 'google', 'prometheus_client', 'gpupool', 'gpupool_agent.core')\n"
        "print(*[name for name in sys.modules if name in bad])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.split() == []


def test_the_pure_rooms_are_where_the_rules_say() -> None:
    for room in PURE:
        assert (ROOT / room / "__init__.py").is_file(), room
