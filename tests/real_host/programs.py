"""The agent's and the root helper's real programs over one described driver.

    python -m tests.real_host.programs agent|helper DIRECTORY [flags of the program]

DIRECTORY is a ``SharedNode``'s. The helper looks, at each action, for a crash that a test
has asked for in
``crash.json``: {"point": "ACTION" or "mps_commands:FIRST WORD", "before": true or false,
"pid": of whom, 0: its own}. It kills that process right before or after the action, and
removes the file.
"""

import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gpupool_agent.__main__ import main as agent
from gpupool_agent.devices import host
from gpupool_agent.devices.mps_daemons import daemons
from gpupool_agent.devices.mps_daemons.foreign import MpsProcess
from gpupool_agent.helper.__main__ import main as helper
from gpupool_agent.helper.actions import Actions
from gpupool_agent.helper.checks import ACTIONS, MpsCommands
from gpupool_agent.simulated.machine import load_machine
from gpupool_agent.simulated.node import CURRENT_NODE
from gpupool_agent.simulated.nvml_library import install
from gpupool_agent.simulated.shared_node import SharedNode

CRASH = "crash.json"
NAMES = {kind: name for name, kind in ACTIONS.items()}


def shared_node(directory: Path) -> SharedNode:
    """The described machine; each host has GPUs of its own, by its directory's name."""
    machine = load_machine((directory / "machine").read_text())
    return SharedNode(node_id=directory.parent.name, machine=machine, directory=directory)


def run_agent(folder: Path, flags: list[str]) -> int:
    class OfThisHost(daemons.MpsScan):
        # The agent cannot read what others on this machine manage, and there are other tests.
        def __init__(self, proc: Path) -> None:
            super().__init__(proc)
            self._proc_of_all = proc

        def look(self, *, whole: bool) -> list[MpsProcess]:
            return [
                each
                for each in super().look(whole=whole)
                if str(folder) in command_of(self._proc_of_all, each.pid)
            ]

    setattr(daemons, "MpsScan", OfThisHost)  # noqa: B010 - the name that the module looks up
    return agent(flags)


def command_of(proc: Path, pid: int) -> str:
    try:
        return (proc / str(pid) / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def run_helper(directory: Path, flags: list[str]) -> int:
    perform = Actions.perform

    async def crashing(actions: Actions, action: Any) -> Any:
        return await with_crash(directory / CRASH, action, lambda: perform(actions, action))

    setattr(Actions, perform.__name__, crashing)
    return helper(flags)


async def with_crash(file: Path, action: Any, work: Callable[[], Awaitable[Any]]) -> Any:
    strike(file, action, before=True)
    done = await work()
    strike(file, action, before=False)
    return done


def point_of(action: Any) -> str:
    name = NAMES[type(action)]
    return f"{name}:{action.lines[0].split()[0]}" if isinstance(action, MpsCommands) else name


def strike(file: Path, action: Any, *, before: bool) -> None:
    """Crash as it was asked for, if this is the moment."""
    if not file.exists():
        return
    crash = json.loads(file.read_text())
    if (crash["point"], crash["before"]) == (point_of(action), before):
        file.unlink()
        os.kill(crash["pid"] or os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    program, where, *rest = sys.argv[1:]
    found = Path(where)
    # A reboot is a new text in a file.
    host.BOOT_ID = found / "boot-id"
    CURRENT_NODE.set(shared_node(found))
    install()
    sys.exit(run_agent(found.parent, rest) if program == "agent" else run_helper(found, rest))
