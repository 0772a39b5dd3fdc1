"""What the root helper says of another user's process."""

from pathlib import Path

import pytest

from gpupool_agent.helper import processes
from gpupool_agent.helper.refusal import FailedError


def test_an_environment_that_was_written_over_is_not_one_without_a_lease(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "PROC", tmp_path)
    (tmp_path / "77").mkdir()
    environ = tmp_path / "77" / "environ"
    for over in (b"", b"\0" * 300, b"train: step 17" + b"\0" * 300, b"n.py --lr=0.1\0HOME=/\0"):
        environ.write_bytes(over)
        with pytest.raises(FailedError, match="written over"):
            processes.lease_of(77)
    environ.write_bytes(b"HOME=/root\0")
    assert processes.lease_of(77) == ""
    environ.write_bytes(b"\0\0GPUPOOL_LEASE_ID=l-1\0")
    assert processes.lease_of(77) == "l-1"
