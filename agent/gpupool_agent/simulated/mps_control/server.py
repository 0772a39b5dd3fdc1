"""An MPS server: one process for one user, which the daemon forks; it has the clients.

A client says "hello", then "busy" and "idle" as it puts work on the GPU. One that goes
while it is busy leaves the server in FAULT: every other client is told, and nobody new
is let in until all that were there have gone.
"""

import os
import select

from gpupool_agent.simulated.mps_control import host
from gpupool_agent.simulated.mps_control.limits import MemoryLimits, parse_environment
from gpupool_agent.simulated.mps_control.packets import Door, Packets

CLIENTS_MAX = 48
EXIT_CRASHED = 1
_TURN_MS = 200


class Client:
    """A client of the server. ``pid`` is as the kernel says."""

    def __init__(self, connection: Packets, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        self.uuids: tuple[str, ...] = ()
        self.busy = False
        self.greeted = False


class Server:
    """The loop of the server process."""

    def __init__(
        self,
        *,
        link: Packets,
        door: Door,
        log: host.LogFile,
        uuids: tuple[str, ...],
        percentage: float,
        memory: MemoryLimits,
    ) -> None:
        self._link: Packets | None = link
        self._door = door
        self._log = log
        self._uuids = uuids
        self._percentage = percentage
        self._memory = memory
        self._clients: dict[int, Client] = {}
        self._faulted = False
        self._ending = False
        self._injected = False

    def run(self) -> int:
        """Serve until told to end, or until there is neither daemon nor client."""
        if not self._uuids:
            self._log.write("Failed to start : no CUDA-capable device is detected")
            return EXIT_CRASHED
        self._tell("ready")
        while True:
            if host.faults().get("crash_server"):
                self._log.write("Server encountered a fatal exception. Shutting down")
                return EXIT_CRASHED
            self._inject_fault()
            if (self._ending or self._link is None) and not self._clients:
                return 0
            poller = select.poll()
            for descriptor in self._descriptors():
                poller.register(descriptor, select.POLLIN)
            for descriptor, _ in poller.poll(_TURN_MS):
                self._serve(descriptor)

    def _descriptors(self) -> list[int]:
        link = [] if self._link is None else [self._link.fileno()]
        return [self._door.fileno(), *link, *self._clients]

    def _serve(self, descriptor: int) -> None:
        if descriptor == self._door.fileno():
            connection = self._door.accept()
            pid, _ = connection.peer()
            self._clients[connection.fileno()] = Client(connection, pid)
        elif self._link is not None and descriptor == self._link.fileno():
            request = self._link.receive()
            if request is None:
                self._log.write("Lost connection to the control daemon")
                self._link.close()
                self._link = None
            else:
                self._link.send("=" + self._answer(request.split(" ")))
        elif descriptor in self._clients:
            self._hear(self._clients[descriptor])

    # -- clients -------------------------------------------------------------

    def _hear(self, client: Client) -> None:
        text = client.connection.receive()
        if text is None:
            self._drop(client)
            if client.busy:
                self._log.write(f"Client {client.pid} died with work in flight")
                self._fault()
        elif text in ("busy", "idle"):
            client.busy = text == "busy"
        elif text == "fatal":
            self._log.write(f"Client {client.pid} caused a fatal exception")
            self._fault()
        else:
            self._greet(client, text)

    def _greet(self, client: Client, text: str) -> None:
        """Let a client in, under the tighter of its own limits and the server's."""
        percentage, limits, *uuids = text.split(" ")
        refusal = ""
        if self._faulted or self._ending:
            refusal = "807 the MPS server is not ready to accept new MPS client requests"
        elif sum(each.greeted for each in self._clients.values()) >= CLIENTS_MAX:
            refusal = "808 the hardware resources required to create MPS client have been exhausted"
        elif not set(uuids) <= set(self._uuids):
            refusal = "100 no CUDA-capable device is detected"
        if refusal:
            client.connection.send(f"refused {refusal}")
            self._drop(client)
            return
        own = parse_environment("" if limits == "-" else limits)
        given: list[str] = []
        for ordinal, uuid in enumerate(uuids):
            mine = own.get(uuid, own.get(str(ordinal)))
            both = [mib for mib in (mine, self._memory.effective(uuid)) if mib is not None]
            given.append(f"{uuid}={min(both)}" if both else f"{uuid}=-")
        client.greeted = True
        client.uuids = tuple(uuids)
        self._log.write(f"New client {client.pid} connected")
        share = min(self._percentage, float(percentage))
        client.connection.send(f"welcome {share} {' '.join(given)}")

    def _drop(self, client: Client) -> None:
        self._clients.pop(client.connection.fileno(), None)
        client.connection.close()
        if client.greeted:
            self._log.write(f"Client {client.pid} disconnected")
        if self._faulted and not self._injected and not self._clients:
            self._faulted = False
            self._log.write("Recovered from fault")

    def _fault(self) -> None:
        """Every client shares the fault, without being told whose it is."""
        for client in self._clients.values():
            client.busy = False
            client.connection.send("fault")
        self._faulted = bool(self._clients) or self._injected

    def _inject_fault(self) -> None:
        wanted = bool(host.faults().get("fault_server"))
        if wanted and not self._injected:
            self._injected = True
            self._fault()
        elif self._injected and not wanted:
            self._injected = False
            self._faulted = bool(self._clients)

    # -- the daemon ----------------------------------------------------------

    def _tell(self, text: str) -> None:
        if self._link is not None:
            self._link.send(text)

    def _answer(self, words: list[str]) -> str:
        verb, arguments = words[0], words[1:]
        clients = [each for each in self._clients.values() if each.greeted]
        match verb:
            case "status":
                return "FAULT" if self._faulted else "ACTIVE"
            case "clients":
                return "\n".join(str(client.pid) for client in clients)
            case "devices":
                return "\n".join(
                    f"{uuid} {client.pid}"
                    for uuid in self._uuids
                    for client in clients
                    if uuid in client.uuids
                )
            case "get_percentage":
                return f"{self._percentage:.1f}"
            case "set_percentage":
                self._percentage = float(arguments[0])
                return f"{self._percentage:.1f}"
            case "get_memory":
                return str(self._memory.get(arguments[0]) or 0)
            case "set_memory":
                self._memory.set(arguments[0], int(arguments[1]))
                return ""
            case "terminate":
                return self._terminate(int(arguments[0]))
            case "shutdown":
                self._shut_down(force=arguments == ["-f"])
                return ""
            case _:
                return ""

    def _terminate(self, pid: int) -> str:
        client = next((each for each in self._clients.values() if each.pid == pid), None)
        if client is None:
            return "1"
        client.connection.send("terminated")
        self._log.write(f"Terminating client {pid}")
        self._drop(client)
        return "0"

    def _shut_down(self, *, force: bool) -> None:
        self._ending = True
        for client in list(self._clients.values()) if force else []:
            client.connection.send("gone")
            self._drop(client)


def serve(server: Server, uid: int, uuids: tuple[str, ...]) -> None:
    """Be a server process of this user until the end; does not return."""
    code = EXIT_CRASHED
    try:
        host.name_process()
        host.become_user(uid)
        if uuids:
            host.list_on_gpus(uuids)
        code = server.run()
        if uuids:
            host.unlist()
    finally:
        os._exit(code)
