"""The wire of this tree can still be spoken with by the last release."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPAT = ROOT / "tests" / "compat"
BUF = Path(sys.executable).parent / "buf"


def releases() -> list[dict[str, str]]:
    return list(tomllib.loads((COMPAT / "releases.toml").read_text()).get("release", []))


def breaking(against: Path, tree: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BUF, "breaking", "--against", against],
        cwd=tree,
        check=False,
        capture_output=True,
        text=True,
    )


def last_descriptors() -> Path:
    recorded = releases()
    assert recorded, "no release is recorded in tests/compat/releases.toml"
    return COMPAT / recorded[-1]["version"] / "descriptors.binpb"


def test_the_wire_breaks_nothing_that_the_last_release_uses() -> None:
    done = breaking(last_descriptors())
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_field_type_would_be_noticed(tmp_path: Path) -> None:
    """Shows that the comparison above is a real one."""
    protos = tmp_path / "protos" / "gpupool" / "v1"
    protos.mkdir(parents=True)
    for proto in (ROOT / "protos" / "gpupool" / "v1").glob("*.proto"):
        text = proto.read_text()
        if proto.name == "lease.proto":
            assert "string request_id = 1;" in text
            text = text.replace("string request_id = 1;", "int32 request_id = 1;")
        (protos / proto.name).write_text(text)
    (tmp_path / "buf.yaml").write_text((ROOT / "buf.yaml").read_text())
    done = breaking(last_descriptors(), tree=tmp_path)
    assert done.returncode == 100, done.stdout + done.stderr


def test_every_recorded_release_names_its_commit_and_has_its_descriptors() -> None:
    for release in releases():
        assert len(release["commit"]) == 40
        assert (COMPAT / release["version"] / "descriptors.binpb").is_file()
