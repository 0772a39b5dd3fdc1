"""The control daemon: who is served by which server, and what each setting is.

At most one server is active. A client of its user is sent on to it; a client of
another user waits until that server's clients have gone and it has ended.
"""

import fcntl
import os
import select
import time

from gpupool_agent.simulated.mps_control import host
from gpupool_agent.simulated.mps_control.limits import MemoryLimits, parse_environment
from gpupool_agent.simulated.mps_control.packets import Door, Packets, pair
from gpupool_agent.simulated.mps_control.server import Server, serve

PID_FILE = "nvidia-cuda-mps-control.pid"
CONTROL = "control"
LOCK = "control_lock"
EXIT_NO_DIRECTORY = 1
REPLY_LIMIT_S = 2.0
_TURN_MS = 200


class AlreadyRunningError(Exception):
    """Another daemon has this pipe directory."""


class ServerProcess:
    """A server as the daemon knows it."""

    def __init__(self, pid: int, uid: int, link: Packets, path: str) -> None:
        self.pid = pid
        self.uid = uid
        self.link = link
        self.path = path
        self.ready = False
        self.ready_after_s = 0.0
        self.ending = False

    def ask(self, request: str) -> str | None:
        """Ask the process; None when it does not answer."""
        if not self.link.send(request):
            return None
        while True:
            reply = self.link.receive()
            if reply is None or reply.startswith("="):
                return None if reply is None else reply[1:]


class Daemon:
    """State of the daemon; ``Shell`` in ``commands`` carries commands out on it."""

    def __init__(self, *, echo: bool) -> None:
        pipes, logs = host.pipe_directory(), host.log_directory()
        os.makedirs(pipes, exist_ok=True)
        os.makedirs(logs, mode=0o700, exist_ok=True)
        self.pipes = pipes
        self._logs = logs
        self._lock = os.open(f"{pipes}/{LOCK}", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise AlreadyRunningError from error
        self.log = host.LogFile(f"{logs}/control.log", "Control", echo=echo)
        self._door = Door(f"{pipes}/{CONTROL}")
        self.uuids = host.visible_uuids()
        self.percentage = float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") or 100)
        self.priority = int(os.environ.get("CUDA_MPS_CLIENT_PRIORITY") or 0)
        self.memory = MemoryLimits(self.uuids)
        for name, mib in parse_environment(
            os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "")
        ).items():
            self.memory.set(name, mib)
        self.servers: list[ServerProcess] = []
        self._waiting: list[tuple[Packets, int, int]] = []
        self.shells: dict[int, Packets] = {}
        self.status = 0
        self.quitting: list[Packets] | None = None
        self._force_at_s = float("inf")
        self._forced = False

    def write_pid(self) -> None:
        """Say who it is, once it is the process that stays."""
        with open(f"{self.pipes}/{PID_FILE}", "w") as file:
            file.write(f"{os.getpid()}\n")
        self.log.write(f"Starting control daemon using socket {self.pipes}/{CONTROL}")
        self.log.write(
            "To connect CUDA applications to this daemon, set env"
            f" CUDA_MPS_PIPE_DIRECTORY={self.pipes}"
        )

    def run(self) -> int:
        """Serve until ``quit``; gives the exit status."""
        from gpupool_agent.simulated.mps_control.commands import answer

        while not (self.quitting is not None and not self.servers):
            if not os.path.exists(self.pipes):
                # Nothing simulated outlives the directory that it was simulated in.
                return EXIT_NO_DIRECTORY
            poller = select.poll()
            links = {server.link.fileno(): server for server in self.servers}
            waiting = {entry[0].fileno(): entry for entry in self._waiting}
            doors = [] if self.quitting is not None else [self._door.fileno()]
            for descriptor in (*doors, *links, *waiting, *self.shells):
                poller.register(descriptor, select.POLLIN)
            for descriptor, _ in poller.poll(_TURN_MS):
                if descriptor == self._door.fileno():
                    self._accept()
                elif descriptor in links:
                    self._hear_server(links[descriptor])
                elif descriptor in waiting:
                    self._waiting.remove(waiting[descriptor])
                    waiting[descriptor][0].close()
                elif descriptor in self.shells:
                    answer(self, self.shells[descriptor])
            self._settle()
        self.log.write(f"Exit with status {self.status}")
        for shell in self.quitting or []:
            shell.send(f"!{self.status}")
        os.unlink(f"{self.pipes}/{PID_FILE}")
        return self.status

    # -- clients -------------------------------------------------------------

    def _accept(self) -> None:
        connection = self._door.accept()
        connection.limit(REPLY_LIMIT_S)
        who = connection.receive()
        if who == "ui":
            self.shells[connection.fileno()] = connection
            self.log.write("NEW UI")
        elif who == "client":
            pid, uid = connection.peer()
            self.log.write(
                f"NEW CLIENT {pid} from user {uid}: Server is not ready, push client"
                " to pending list"
            )
            self._waiting.append((connection, pid, uid))
            self._settle()
        else:
            connection.close()

    def _settle(self) -> None:
        """Send clients on, start the server that the next one needs, end the one in its way."""
        self._say_ready()
        if self.quitting is not None:
            self._settle_quit()
            return
        for entry in list(self._waiting):
            connection, pid, uid = entry
            server = next((each for each in self.servers if not each.ending), None)
            if server is None:
                if not self.servers:
                    self.start_server(uid)
                return
            if server.uid != uid:
                # Its clients go first; then it ends, and the next one is started.
                if server.ready and server.ask("clients") == "":
                    self.shut_down(server, force=False)
                return
            if not server.ready:
                return
            self._waiting.remove(entry)
            self.log.write(f"NEW CLIENT {pid} from user {uid}: Server already exists")
            connection.send(f"server {server.path}")
            connection.close()

    def _settle_quit(self) -> None:
        if time.monotonic() < self._force_at_s or self._forced:
            return
        self._forced = True
        self.status = 1
        for server in self.servers:
            self.shut_down(server, force=True)

    # -- servers -------------------------------------------------------------

    def start_server(self, uid: int) -> None:
        """Fork a server for a user, with the settings of this moment."""
        near, far = pair()
        path = f"{self.pipes}/s{time.monotonic_ns():x}"
        door = Door(path)
        no_gpu = bool(host.faults().get("no_server"))
        server = Server(
            link=far,
            door=door,
            log=host.LogFile(f"{self._logs}/server.log", "Server"),
            uuids=() if no_gpu else self.uuids,
            percentage=self.percentage,
            memory=self.memory.copy(),
        )
        pid = os.fork()
        if pid == 0:
            # What keeps the daemon's place must go with the daemon.
            os.close(self._lock)
            self._door.close()
            near.close()
            others = [each.link for each in self.servers]
            for each in (*others, *self.shells.values(), *(w[0] for w in self._waiting)):
                each.close()
            serve(server, uid, () if no_gpu else self.uuids)
        far.close()
        door.close()
        near.limit(REPLY_LIMIT_S)
        self.log.write(f"Starting new server {pid} for user {uid}")
        process = ServerProcess(pid, uid, near, path)
        slow_s = float(host.faults().get("slow_start_s", "0"))
        process.ready_after_s = time.monotonic() + slow_s
        self.servers.append(process)

    def shut_down(self, server: ServerProcess, *, force: bool) -> None:
        """Have it end: after its clients, or before."""
        server.ending = True
        server.ask("shutdown -f" if force else "shutdown")

    def quit(self, shell: Packets, timeout_s: float | None) -> None:
        """End, once every server has; those that still run after the time are forced."""
        self.quitting = [*(self.quitting or []), shell]
        if timeout_s is not None:
            self.log.write(f"quit command issued with timeout of {timeout_s:g}")
            self._force_at_s = time.monotonic() + timeout_s
        for server in self.servers:
            if not server.ending:
                self.shut_down(server, force=False)

    def _hear_server(self, server: ServerProcess) -> None:
        text = server.link.receive()
        if text is not None:
            return
        self.servers.remove(server)
        server.link.close()
        _, status = os.waitpid(server.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code:
            self.status = 1
        self.log.write(f"Server {server.pid} exited with status {code}")
        if os.path.exists(server.path):
            os.unlink(server.path)

    def _say_ready(self) -> None:
        for server in self.servers:
            if not server.ready and time.monotonic() >= server.ready_after_s:
                # Any answer says that the process has begun to serve.
                server.ready = server.ask("status") is not None
                if server.ready:
                    self.log.write(f"NEW SERVER {server.pid}: Ready")
