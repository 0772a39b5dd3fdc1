"""The units as systemd-analyze reads them: no unknown key, and how much they may do."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)

# Exposure as systemd-analyze counts it, at most, times ten.
UNITS = {
    "gpupool-agent.service": 35,
    "gpupool-allocator.service": 35,
    "gpupool-helper.service": 35,
    "gpupool-mps@.service": 40,
}


def analyze(*arguments: str | Path) -> str:
    done = subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_has_no_unknown_key_and_no_wrong_value(
    unit: str, root: Path, tmp_path: Path
) -> None:
    text = (root / "systemd" / unit).read_text()
    # Our programs need not be installed here.
    installed = re.sub(r"(?m)^(Exec\w+)=/usr/bin/gpupool-\w+", r"\1=/bin/true", text)
    file = tmp_path / unit
    file.write_text(installed)
    analyze("verify", "--man=no", "--recursive-errors=yes", file)


@pytest.mark.parametrize(("unit", "most"), UNITS.items())
def test_a_unit_may_do_no_more_than_it_needs(unit: str, most: int, root: Path) -> None:
    analyze("security", "--offline=yes", f"--threshold={most}", root / "systemd" / unit)


@pytest.mark.parametrize("unit", ["gpupool-helper.service", "gpupool-mps@.service"])
def test_each_capability_of_root_is_explained(unit: str, root: Path) -> None:
    text = (root / "systemd" / unit).read_text()
    assert "User=root" in text
    kept = re.findall(r"^CapabilityBoundingSet=(.*)$", text, re.MULTILINE)[0].split()
    assert kept
    if unit == "gpupool-helper.service":
        told = " ".join(line for line in text.splitlines() if line.startswith("#"))
        assert [name for name in kept if name.removeprefix("CAP_") not in told] == []


def test_the_agent_does_not_depend_on_its_helper(root: Path) -> None:
    """It wants it and starts after it, but goes on without it."""
    text = (root / "systemd" / "gpupool-agent.service").read_text()
    assert re.search(r"^Wants=.*gpupool-helper\.service", text, re.MULTILINE)
    assert re.search(r"^After=.*gpupool-helper\.service", text, re.MULTILINE)
    assert not re.search(r"^(Requires|BindsTo|PartOf)=", text, re.MULTILINE)
