"""The shell: commands from standard input, one a line, to the daemon of the directory."""

import os

from gpupool_agent.simulated.mps_control import host
from gpupool_agent.simulated.mps_control.packets import Packets, connect

EXIT_NO_DAEMON = 1


def run() -> int:
    """Give every line to the daemon and print what it answers; gives the exit code."""
    host.become_user(int(os.environ.get(host.BECOME_UID) or 0))
    daemon = connect(f"{host.pipe_directory()}/control")
    if daemon is None:
        _print("Cannot find MPS control daemon process")
        return EXIT_NO_DAEMON
    daemon.send("ui")
    rest = b""
    while True:
        data = os.read(0, 65536)
        rest += data
        *lines, rest = rest.split(b"\n") if data else (*filter(None, [rest]), b"")
        for line in lines:
            code = _carry_out(daemon, line.decode(errors="replace"))
            if code is not None:
                return code
        if not data:
            return 0


def _carry_out(daemon: Packets, line: str) -> int | None:
    daemon.send("." + line)
    reply = daemon.receive()
    if reply is None:
        _print("Cannot send command to MPS control daemon process")
        return EXIT_NO_DAEMON
    if reply.startswith("!"):
        return int(reply[1:])
    if len(reply) > 1:
        _print(reply[1:])
    return None


def _print(text: str) -> None:
    os.write(1, text.encode() + b"\n")
