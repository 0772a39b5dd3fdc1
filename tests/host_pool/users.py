"""Who runs what on a host under test: an agent without rights, and slices of another user.

An interpreter often lives where only its owner may go, as in root's home. Processes are then
started in a mount namespace of their own in which that one directory is open; nothing outside
of it changes.
"""

import os
import pwd
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.host_pool.machines import ROOT

AGENT_UID = 40961
SLICE_USER = "nobody"
OPEN_DIRECTORY = """set -e
mount -t tmpfs tmpfs "$1"
mkdir -m 755 "$1/up" "$1/work"
mount -t overlay overlay -o "lowerdir=$2,upperdir=$1/up,workdir=$1/work" "$2"
shift 2
exec "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """Uids of the agent and of who has slices; how a command is run as one of them."""

    agent: int
    slices: int
    view: tuple[str, ...]

    @classmethod
    def found(cls, folder: Path) -> "Users":
        """Two users without rights; root where they cannot be had. ``folder``: for mounts."""
        slices = pwd.getpwnam(SLICE_USER).pw_uid
        wanted = cls(agent=AGENT_UID, slices=slices, view=_view(folder))
        asked = subprocess.run(
            wanted.command(
                [sys.executable, "-c", "import gpupool_agent.agent, tests.host_pool.holder"], slices
            ),
            cwd=ROOT,
            capture_output=True,
            check=False,
        )
        return wanted if asked.returncode == 0 else cls(agent=0, slices=0, view=())

    def command(
        self, command: list[str], uid: int, capabilities: tuple[str, ...] = ()
    ) -> list[str]:
        """The command, as a user; its process is the one that is started."""
        become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        if capabilities:
            added = ",".join(f"+{each}" for each in capabilities)
            become += [f"--inh-caps={added}", f"--ambient-caps={added}"]
        return [*self.view, *(become if uid else []), *command]


def _view(folder: Path) -> tuple[str, ...]:
    """How to start a process that sees an open directory where a closed one is in its way."""
    needed = [Path(sys.executable).resolve(), Path(sys.base_prefix), Path(sys.prefix), ROOT]
    ways = {parent for path in needed for parent in path.parents}
    closed = [path for path in sorted(ways) if not path.stat().st_mode & 0o001]
    if not closed or os.geteuid() != 0:
        return ()
    at = folder / "view"
    at.mkdir()
    unshare = ("unshare", "--mount", "--propagation", "private")
    return (*unshare, "sh", "-c", OPEN_DIRECTORY, "sh", str(at), str(closed[0]))
