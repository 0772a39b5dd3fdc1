"""The last release in an environment of its own, made from its commit in this clone.

Its programs meet the libraries that are installed here and nothing of the present tree.
The environment lies in the system's temporary folder and is used again.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("client", "agent", "allocator")


@dataclass(frozen=True, kw_only=True)
class Release:
    """A version, and the interpreter that finds its programs."""

    version: str
    python: str


def last_release() -> Release:
    """Makes it, or skips where this clone does not reach back to it."""
    rows = tomllib.loads((ROOT / "tests/compat/releases.toml").read_text())["release"]
    version, commit = rows[-1]["version"], rows[-1]["commit"]
    known = subprocess.run(
        ["git", "cat-file", "-e", f"{commit}^{{commit}}"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if known.returncode != 0:
        pytest.skip(f"this clone does not have the commit of {version}: {commit}")
    python = sysconfig.get_python_version()
    # Its libraries are those of the environment that it was made from.
    base = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    name = f"gpupool-{version}-{commit[:12]}-python{python}-{base}"
    place = Path(tempfile.gettempdir()) / name
    if not (place / "made").exists():
        make(place, version, commit)
    return Release(version=version, python=str(place / "bin" / "python"))


def make(place: Path, version: str, commit: str) -> None:
    """The tree of the commit, and an environment that finds it; whole, or not there."""
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, with_pip=False, symlinks=True)
    packed = subprocess.run(
        ["git", "archive", commit, *ROOMS], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(place / "tree", filter="data")
    (packages,) = place.glob("lib/python*/site-packages")
    # Only what is named here is found: not what the libraries' own folder adds by its
    # .pth files, among which is the present tree.
    found = [*(place / "tree" / room for room in ROOMS), sysconfig.get_path("purelib")]
    (packages / "release.pth").write_text("".join(f"{each}\n" for each in found))
    about = packages / f"gpupool-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gpupool\nVersion: {version}\n")
    told = subprocess.run(
        [place / "bin" / "python", "-c", "import gpupool; print(gpupool.__file__)"],
        cwd="/",
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert told.startswith(str(place / "tree")), f"{sys.executable}: {told}"
    (place / "made").touch()
