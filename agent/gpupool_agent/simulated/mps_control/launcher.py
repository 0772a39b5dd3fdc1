"""Writes the program file that starts the stand-in: a Python start without its site."""

import sys
from pathlib import Path

from gpupool_agent.simulated.mps_control.host import NODE_DIRECTORY

PROGRAM = "nvidia-cuda-mps-control"
PROBE = "gpupool-mps-probe"

_TEXT = """\
#!{python} -SE
import os, sys
sys.path.insert(0, {path!r})
os.environ.update({environment!r})
from gpupool_agent.simulated.mps_control.{module} import main
sys.exit(main({arguments}))
"""


def write_launcher(
    directory: Path, *, node: Path | None = None, python: str = sys.executable
) -> Path:
    """Write the program into a directory and give its path.

    ``node`` is the directory of the simulated node whose GPUs its servers find; without
    one they find no driver, as the real ones on a host without GPUs. ``python`` runs it.
    """
    program = directory / PROGRAM
    return _write(program, node, python, module="__main__", arguments="sys.argv[1:]")


def write_probe(directory: Path, *, node: Path, python: str = sys.executable) -> Path:
    """Write the probe program of a simulated node into a directory and give its path."""
    return _write(directory / PROBE, node, python, module="probe", arguments="")


def _write(program: Path, node: Path | None, python: str, *, module: str, arguments: str) -> Path:
    program.parent.mkdir(parents=True, exist_ok=True)
    text = _TEXT.format(
        python=python,
        path=str(Path(__file__).resolve().parents[3]),
        environment={} if node is None else {NODE_DIRECTORY: str(node)},
        module=module,
        arguments=arguments,
    )
    beside = program.with_suffix(".new")
    beside.write_text(text)
    beside.chmod(0o755)
    beside.replace(program)
    return program
