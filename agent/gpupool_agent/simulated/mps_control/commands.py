"""The daemon's commands, as protocol 2 has them: one line up, its output down."""

import os

from gpupool_agent.simulated.mps_control import host
from gpupool_agent.simulated.mps_control.daemon import Daemon, ServerProcess
from gpupool_agent.simulated.mps_control.limits import (
    format_mib,
    parse_mib,
    parse_percentage,
)
from gpupool_agent.simulated.mps_control.packets import Packets

PERCENTAGE_RANGE = "Invalid percentage, expected between (0.0, 100.0]"
NO_LIMIT = "No default pinned memory limit set for the device!"


def answer(daemon: Daemon, shell: Packets) -> None:
    """Carry out the next command of a shell that has sent one."""
    line = shell.receive()
    if line is None:
        del daemon.shells[shell.fileno()]
        shell.close()
        daemon.log.write("UI closed")
        return
    line = line[1:]
    daemon.log.write(f"Cmd:{line}")
    verb, *arguments = line.split() or [""]
    if host.faults().get("hang") == verb:
        return
    if verb == "quit":
        _quit(daemon, shell, arguments)
        return
    command = COMMANDS.get(verb)
    text = f'Unknown command "{verb}"' if command is None else command(daemon, arguments)
    if text:
        daemon.log.write(text)
    shell.send("=" + text)


def _quit(daemon: Daemon, shell: Packets, arguments: list[str]) -> None:
    _, uid = shell.peer()
    if uid not in (0, os.geteuid()):
        shell.send("=Not enough privilege to execute quit command")
        return
    if host.faults().get("refuse_quit"):
        return
    timed = arguments[:1] == ["-t"] and len(arguments) > 1 and arguments[1].isdecimal()
    daemon.quit(shell, float(arguments[1]) if timed else None)


# -- servers -----------------------------------------------------------------


def _find(daemon: Daemon, arguments: list[str]) -> ServerProcess | None:
    name = arguments[0] if arguments else ""
    return next((each for each in daemon.servers if str(each.pid) == name), None)


def _missing(arguments: list[str]) -> str:
    name = arguments[0] if arguments else "0"
    return f"Server {name} not found"


def _ask(daemon: Daemon, arguments: list[str], request: str) -> str:
    server = _find(daemon, arguments)
    if server is None:
        return _missing(arguments)
    reply = server.ask(request) if server.ready else None
    return f"Server {server.pid} is <busy>" if reply is None else reply


def _get_server_list(daemon: Daemon, _arguments: list[str]) -> str:
    return "\n".join(str(server.pid) for server in daemon.servers)


def _get_server_status(daemon: Daemon, arguments: list[str]) -> str:
    server = _find(daemon, arguments)
    if server is None:
        return _missing(arguments)
    return (server.ready and server.ask("status")) or "INITIALIZING"


def _start_server(daemon: Daemon, arguments: list[str]) -> str:
    if arguments[:1] != ["-uid"] or len(arguments) < 2:
        return "A user id (UID) is required to start a new server"
    digits = len(arguments[1]) - len(arguments[1].lstrip("0123456789"))
    uid = int(arguments[1][:digits] or "0")
    if not any(each.uid == uid and not each.ending for each in daemon.servers):
        daemon.start_server(uid)
    return ""


def _shutdown_server(daemon: Daemon, arguments: list[str]) -> str:
    server = _find(daemon, arguments)
    if server is None:
        return _missing(arguments)
    daemon.shut_down(server, force="-f" in arguments)
    return ""


def _get_client_list(daemon: Daemon, arguments: list[str]) -> str:
    return _ask(daemon, arguments, "clients")


def _terminate_client(daemon: Daemon, arguments: list[str]) -> str:
    server = _find(daemon, arguments)
    if server is None:
        return f"{_missing(arguments)}\n{_missing(arguments)}!\n1"
    client = arguments[1] if len(arguments) > 1 and arguments[1].isdecimal() else "0"
    reply = _ask(daemon, arguments, f"terminate {client}")
    return reply if reply == "0" else f"Invalid process {client}!\n1"


def _get_device_client_list(daemon: Daemon, arguments: list[str]) -> str:
    if arguments:
        return _ask(daemon, arguments, "devices")
    replies = [_ask(daemon, [str(each.pid)], "devices") for each in daemon.servers]
    return "\n".join(reply for reply in replies if reply)


def _ps(daemon: Daemon, arguments: list[str]) -> str:
    if arguments[:1] == ["-p"]:
        server = _find(daemon, arguments[1:])
        if server is None:
            return f"{_missing(arguments[1:])}\n{_missing(arguments[1:])}\n"
        servers = [server]
    else:
        servers = daemon.servers
    if not servers:
        return "Server not found"
    rows = ["PID       ID    SERVER    DEVICE             NAMESPACE COMMAND"]
    for server in servers:
        for line in (server.ask("devices") or "").splitlines():
            uuid, pid = line.split(" ")
            rows.append(f"{pid:<9} 0     {server.pid:<9} {uuid[:17]:<18} 0         {_command(pid)}")
    return "\n".join(rows)


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().split("\0")[0]
    except OSError:
        return "-"


# -- settings ----------------------------------------------------------------


def _get_default_percentage(daemon: Daemon, _arguments: list[str]) -> str:
    return f"{daemon.percentage:.1f}"


def _set_default_percentage(daemon: Daemon, arguments: list[str]) -> str:
    value = parse_percentage(arguments[0]) if arguments else None
    if value is None:
        # The shell is not told, only the log: what it sees is the value that stays.
        daemon.log.write(PERCENTAGE_RANGE)
    else:
        daemon.percentage = value
    return f"{daemon.percentage:.1f}"


def _get_percentage(daemon: Daemon, arguments: list[str]) -> str:
    return _ask(daemon, arguments, "get_percentage")


def _set_percentage(daemon: Daemon, arguments: list[str]) -> str:
    value = parse_percentage(arguments[1]) if len(arguments) > 1 else None
    if value is None:
        return _get_percentage(daemon, arguments)
    return _ask(daemon, arguments, f"set_percentage {value}")


def _get_default_memory(daemon: Daemon, arguments: list[str]) -> str:
    mib = daemon.memory.get(arguments[0]) if arguments else None
    if mib is None:
        daemon.log.write(NO_LIMIT)
        return ""
    return format_mib(mib)


def _set_default_memory(daemon: Daemon, arguments: list[str]) -> str:
    if arguments:
        daemon.memory.set(arguments[0], parse_mib(" ".join(arguments[1:])))
    return ""


def _get_memory(daemon: Daemon, arguments: list[str]) -> str:
    name = arguments[1] if len(arguments) > 1 else "0"
    reply = _ask(daemon, arguments, f"get_memory {name}")
    if not reply.isdecimal():
        return reply
    return format_mib(int(reply)) if int(reply) else ""


def _set_memory(daemon: Daemon, arguments: list[str]) -> str:
    name = arguments[1] if len(arguments) > 1 else "0"
    return _ask(daemon, arguments, f"set_memory {name} {parse_mib(' '.join(arguments[2:]))}")


def _get_priority(daemon: Daemon, _arguments: list[str]) -> str:
    return str(daemon.priority)


def _set_priority(daemon: Daemon, arguments: list[str]) -> str:
    if arguments[:1] not in (["0"], ["1"]):
        return "Invalid priority value - must be 0 or 1!"
    daemon.priority = int(arguments[0])
    return ""


COMMANDS = {
    "get_server_list": _get_server_list,
    "get_server_status": _get_server_status,
    "start_server": _start_server,
    "shutdown_server": _shutdown_server,
    "get_client_list": _get_client_list,
    "terminate_client": _terminate_client,
    "get_device_client_list": _get_device_client_list,
    "ps": _ps,
    "get_default_active_thread_percentage": _get_default_percentage,
    "set_default_active_thread_percentage": _set_default_percentage,
    "get_active_thread_percentage": _get_percentage,
    "set_active_thread_percentage": _set_percentage,
    "get_default_device_pinned_mem_limit": _get_default_memory,
    "set_default_device_pinned_mem_limit": _set_default_memory,
    "get_device_pinned_mem_limit": _get_memory,
    "set_device_pinned_mem_limit": _set_memory,
    "get_default_client_priority": _get_priority,
    "set_default_client_priority": _set_priority,
}
