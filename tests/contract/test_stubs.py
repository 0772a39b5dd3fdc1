"""The committed stubs work on every protobuf that users pin (docs/decisions/0002)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gpupool" / "stubs"

# Runs inside the other environment, which has protobuf and grpcio and nothing else.
ROUND_TRIP = """
import google.protobuf
from google.protobuf.json_format import MessageToDict
from gpupool.v1 import lease_pb2, lease_pb2_grpc, node_pb2, node_pb2_grpc
from gpupool.v1 import pool_pb2, pool_pb2_grpc, resources_pb2

request = lease_pb2.AcquireRequest(request_id="r-1", follow=True)
request.ttl.FromSeconds(60)
group = request.spec.groups.add(name="decode", replicas=2)
group.slice.share_pct = 10
again = lease_pb2.AcquireRequest.FromString(request.SerializeToString())
assert again == request, again
assert MessageToDict(again)["ttl"] == "60s"
assert hasattr(lease_pb2_grpc, "LeaseServiceStub")
assert hasattr(node_pb2_grpc, "NodeServiceStub")
assert hasattr(pool_pb2_grpc, "PoolServiceStub")
print(google.protobuf.__version__)
"""


def environment_with(protobuf: str, name: str) -> Path:
    """Python of a virtual environment with that protobuf; made once and kept."""
    home = CACHE / f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
    python = home / "bin" / "python"
    complete = home / "complete"
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True, timeout=120)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, "--timeout", "20", "--retries", "1", protobuf, "grpcio>=1.67"],
            check=False,
            capture_output=True,
            text=True,
            timeout=150,
        )
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            pytest.skip(f"pip cannot install {protobuf}: {reason}")
        complete.touch()
    return python


@pytest.mark.parametrize(
    ("requirement", "name", "expected"),
    [("protobuf==5.29.*", "oldest", "5.29."), ("protobuf", "newest", "")],
    ids=["oldest", "newest"],
)
def test_stubs_load_and_round_trip_on_protobuf(requirement: str, name: str, expected: str) -> None:
    python = environment_with(requirement, name)
    done = subprocess.run(
        [python, "-W", "error", "-c", ROUND_TRIP],
        env={"PYTHONPATH": str(ROOT / "client"), "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(expected)


def test_committed_stubs_are_what_the_protos_say() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate", "--check"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
