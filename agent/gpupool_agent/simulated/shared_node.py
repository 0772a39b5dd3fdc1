"""One described driver for several processes: an agent, its root helper, whoever tests them.

A ``SimulatedNode`` keeps in its own process what has happened to it. Here that lies in
``driver.json`` in the node's directory: who changes it replaces the file, and every
process reads it before each call of the driver.
"""

import fcntl
import json
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpupool_agent.simulated.node import (
    COMPUTE_MODE_DEFAULT,
    FalseReadings,
    SimulatedGpu,
    SimulatedNode,
)

_HANG_LOOK_S = 0.02
_STATE = "driver.json"
_INITS = "driver-inits"


@dataclass(slots=True, kw_only=True)
class SharedNode(SimulatedNode):
    """A node whose driver other processes meet too.

    Whoever may write into the directory lays the node out; others find it laid out.
    """

    _seen: tuple[int, int] = field(default=(0, 0), init=False)
    _hangs: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._lay_out()
        self._look()
        if os.access(self.directory, os.W_OK):
            self.processes.create()
            self.write_gpus()

    def answer(self) -> None:
        """Return once the driver answers a call, with all that others have changed."""
        self._look()
        while self._hangs:
            time.sleep(_HANG_LOOK_S)
            self._look()

    def open_session(self) -> None:
        """Open an NVML session, and note when: who asks again and again is found out."""
        SimulatedNode.open_session(self)
        if os.access(self._inits, os.W_OK):
            with self._inits.open("a") as file:
                file.write(f"{time.monotonic():.3f} {os.getpid()}\n")

    def inits_s(self, pid: int) -> list[float]:
        """When a process has opened the driver, in monotonic seconds."""
        rows = [line.split() for line in self._inits.read_text().splitlines()]
        return [float(when) for when, who in rows if int(who) == pid]

    def hang(self) -> None:
        """Have every call block, from now on."""
        self._change(hangs=True)

    def resume(self) -> None:
        """Have them go on."""
        self._change(hangs=False)

    def unload_driver(self) -> None:
        """Have no devices until ``load_driver``."""
        self._change(loaded=False)

    def load_driver(self) -> None:
        """Have the devices back, for new sessions."""
        self._change(loaded=True)

    def set_hidden(self, gpu: SimulatedGpu, *, hidden: bool) -> None:
        """Have the driver list a GPU no more, from the next session on, or list it again."""
        self._change_gpu(gpu, hidden=hidden)

    def set_lost(self, gpu: SimulatedGpu, *, lost: bool) -> None:
        """Have a GPU fall off the bus, or be back."""
        self._change_gpu(gpu, lost=lost)

    def set_compute_mode(self, gpu: SimulatedGpu, mode: int) -> None:
        """Say who may make contexts on a GPU; the number is NVML's."""
        self._change_gpu(gpu, compute_mode=mode)

    def set_false(self, gpu: SimulatedGpu, readings: FalseReadings) -> None:
        """Have the driver lie about a GPU, or tell the truth again."""
        self._change_gpu(gpu, false=asdict(readings))

    # -- the file ------------------------------------------------------------

    def _change(self, **values: Any) -> None:
        with self._locked():
            state = self._read()
            state.update(values)
            self._write(state)
        self._look()
        self.write_gpus()

    def _change_gpu(self, gpu: SimulatedGpu, **values: Any) -> None:
        with self._locked():
            state = self._read()
            state["gpus"].setdefault(gpu.uuid, {}).update(values)
            self._write(state)
        self._look()
        self.write_gpus()

    def _look(self) -> None:
        """Take over what the file says, if it is another one than last time."""
        try:
            found = os.stat(self._file)  # noqa: PTH116 half of Path.stat's cost
        except FileNotFoundError:
            return
        seen = (found.st_ino, found.st_mtime_ns)
        if seen == self._seen:
            return
        self._seen = seen
        state = self._read()
        self._hangs = state["hangs"]
        self.driver_loaded = state["loaded"]
        if not self.driver_loaded and self.session is not None:
            self.session.gpus = ()
        for gpu in self.gpus:
            told = state["gpus"].get(gpu.uuid, {})
            gpu.hidden = told.get("hidden", False)
            gpu.lost = told.get("lost", False)
            gpu.compute_mode = told.get("compute_mode", COMPUTE_MODE_DEFAULT)
            gpu.false = FalseReadings(**told.get("false", {}))

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._file.read_text())
        except FileNotFoundError:
            found = {"loaded": True, "hangs": False, "gpus": {}}
        return found

    def _write(self, state: dict[str, Any]) -> None:
        beside = self._file.with_suffix(".new")
        beside.write_text(json.dumps(state))
        # Whatever the umask of who writes it: everybody meets this driver.
        beside.chmod(0o644)
        beside.replace(self._file)

    @contextmanager
    def _locked(self) -> Generator[None]:
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @property
    def _file(self) -> Path:
        return self.directory / _STATE

    @property
    def _inits(self) -> Path:
        return self.directory / _INITS
