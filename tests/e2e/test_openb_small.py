"""The benchmark on the published trace, small: all its checks, in the ordinary run."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
HOSTS = 30
PODS = 300
MODELS = {"T4": (2, 64_000, 262_144), "P100": (2, 64_000, 262_144), "G2": (8, 96_000, 393_216)}


def write_trace(folder: Path) -> tuple[Path, Path]:
    """Hosts and pods as in the published files, and about twice as much asked for as is there."""
    draw = random.Random(1)
    nodes, pods = folder / "nodes.csv", folder / "pods.csv"
    with nodes.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["sn", "cpu_milli", "memory_mib", "gpu", "model"])
        for number in range(HOSTS):
            model = sorted(MODELS)[number % len(MODELS)]
            gpus, cpu_milli, memory_mib = MODELS[model]
            rows.writerow([f"node-{number:02d}", cpu_milli, memory_mib, gpus, model])
    with pods.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec"])
        for number in range(PODS):
            gpus, gpu_milli = draw.choice(
                [(0, 0), (1, 1000), (1, 1000), (1, 470), (1, 810), (1, 55), (2, 1000), (8, 1000)]
            )
            spec = draw.choice(["", "", "T4|P100"]) if gpus < 8 else ""
            rows.writerow([f"pod-{number:03d}", 2_000, 8_192, gpus, gpu_milli, spec])
    return nodes, pods


def command(folder: Path, *flags: str) -> list[str]:
    nodes, pods = write_trace(folder)
    return [
        *(sys.executable, "-u", "-m", "tests.benchmarks.openb_replay"),
        *("--nodes", str(nodes), "--pods", str(pods), "--clients", "2", *flags),
    ]


@pytest.mark.timeout(150)
def test_the_trace_is_granted_kept_and_given_back_with_every_check_passed(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        command(tmp_path, "--json", str(figures)),
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads(figures.read_text())["runs"]
    assert run["granted"] + run["refused"] == run["pods"] == PODS
    assert run["granted"] > 0 < run["refused"]
    assert 80 < run["allocated_pct"] <= 100 < run["arrived_pct"]
    assert "the books agree" in done.stdout
    assert "empty again, 0 leases" in done.stdout


@pytest.mark.timeout(150)
def test_ctrl_c_ends_everything_that_the_benchmark_started(tmp_path: Path) -> None:
    # Its own folder, and a short one: paths of sockets are.
    with tempfile.TemporaryDirectory(prefix="gp-") as short:
        _interrupt(tmp_path, Path(short))


def _interrupt(trace: Path, folder: Path) -> None:
    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(
        command(trace), cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        assert any("nodes connected after" in line for line in process.stdout)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
        assert psutil.wait_procs(children, timeout=10)[1] == []
        assert list(folder.glob("gpupool-openb-*")) == []
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
