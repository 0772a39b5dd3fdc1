"""The control socket of a running fleet: one JSON object up, one down.

Up: ``{"node": ..., "action": ..., "arguments": [...]}``; down: ``{"result": ...}`` or
``{"error": ...}``. It is a Unix socket in the fleet's own directory; whoever may
open that may break its machines.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gpupool_agent.simulated.directory import SOCKET_NAME

LINE_BYTES_MAX = 65536
TIMEOUT_S = 60.0
"""How long a command may take: a reboot ends and starts an agent."""

Handler = Callable[[str, str, list[str]], Awaitable[Any]]
"""Carries out an action on a node; raises ValueError for a bad one."""


class InjectionError(Exception):
    """The fleet refused the command; the text says why."""


async def serve(directory: Path, handler: Handler) -> asyncio.Server:
    """Open the socket in ``directory``."""
    path = directory / SOCKET_NAME
    path.unlink(missing_ok=True)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), TIMEOUT_S)
            writer.write(json.dumps(await _reply(line, handler)).encode() + b"\n")
            await writer.drain()
        except (ConnectionError, TimeoutError):
            pass  # The asker has gone; there is nobody to tell.
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, path, limit=LINE_BYTES_MAX)
    path.chmod(0o600)
    return server


async def _reply(line: bytes, handler: Handler) -> dict[str, Any]:
    try:
        request = json.loads(line)
        arguments = [str(argument) for argument in request.get("arguments", [])]
        return {"result": await handler(str(request["node"]), str(request["action"]), arguments)}
    except (ValueError, KeyError, AttributeError) as error:
        return {"error": str(error)}


def inject(directory: Path, node: str, action: str, *arguments: str) -> Any:
    """Send one command to the fleet with this control directory; blocks.

    Raises InjectionError when the fleet refuses it or is not there.
    """
    request = {"node": node, "action": action, "arguments": arguments}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(str(directory / SOCKET_NAME))
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as file:
                line = file.readline()
        except OSError as error:
            raise InjectionError(f"no fleet answers in {directory}: {error}") from error
    reply = json.loads(line) if line else {"error": "the fleet closed the connection"}
    if "error" in reply:
        raise InjectionError(reply["error"])
    return reply["result"]
