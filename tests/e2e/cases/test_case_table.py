"""docs/cases.md names every case's tests, and only tests that exist."""

import re
from pathlib import Path

CASES = Path(__file__).parent
_NAMED = re.compile(r"`(tests/\S+\.py)::(test_\w+)`").findall
_DEFINED = re.compile(r"^(?:async )?def (test_c\d+_\w+)", re.MULTILINE).findall


def test_every_named_test_exists_and_every_case_is_in_the_table(root: Path) -> None:
    named = _NAMED((root / "docs/cases.md").read_text())
    assert named
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (root / path).read_text(), re.MULTILINE), name
    defined = {name for file in CASES.glob("test_*.py") for name in _DEFINED(file.read_text())}
    ordinary = {"test_c05_a_well_made_request_by_hand_is_none_of_these"}
    assert defined - ordinary <= {name for _, name in named}
