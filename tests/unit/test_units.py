"""The units as systemd-analyze reads them: no unknown key, and how much they may do."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpupool_agent.helper.checks import ACTIONS

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


def test_every_line_against_the_helper_is_explained_and_no_other(root: Path) -> None:
    """The table in docs/agent.md has what systemd-analyze marks, line by line."""
    unit = root / "systemd" / "gpupool-helper.service"
    told = analyze("security", "--offline=yes", "--no-pager", unit)
    marked = {line.split()[1] for line in told.splitlines() if line.startswith("✗")}
    assert "PrivateDevices=" in marked
    page = (root / "docs" / "agent.md").read_text()
    table = page.partition("## What systemd-analyze says")[2].partition("## Enforced")[0]
    explained = {each.replace("\\|", "|") for each in re.findall(r"(?m)^\| `(.*?)` \|", table)}
    assert explained == marked
    score = re.search(r"exposure level for \S+: ([0-9.]+)", told)
    assert score is not None
    assert f"helper {score[1]}" in table


def test_the_page_has_each_action_of_the_closed_list(root: Path) -> None:
    page = (root / "docs" / "agent.md").read_text()
    listed = page.partition("## The helper's closed list")[2].partition("## What systemd")[0]
    assert re.findall(r"(?m)^\| `(\w+)` \|", listed) == list(ACTIONS)


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
