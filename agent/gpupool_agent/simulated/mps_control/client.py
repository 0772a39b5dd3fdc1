"""What a CUDA client does to reach its MPS server, and what the server tells it.

A daemon that cannot be reached is no error to CUDA: the client runs without MPS.
"""

from gpupool_agent.simulated.mps_control.packets import Packets, connect

UNLIMITED = 100.0
ERROR_OF = {
    "fault": "CUDA_ERROR_MPS_SERVER_NOT_READY: a client of the same GPU caused a fatal fault",
    "terminated": "CUDA_ERROR_MPS_CLIENT_TERMINATED: terminated by the control daemon",
    "gone": "CUDA_ERROR_MPS_CONNECTION_FAILED: the MPS server has shut down",
}


class MpsRefusedError(Exception):
    """The server, or the daemon before it, does not let the client in."""


class MpsClient:
    """A client's connection. ``share_pct`` and ``limits_mib`` (by UUID) are the server's word."""

    def __init__(self, connection: Packets, share_pct: float, limits_mib: dict[str, int]) -> None:
        self._connection = connection
        self.share_pct = share_pct
        self.limits_mib = limits_mib

    def fileno(self) -> int:
        """For poll: readable once the server has something to say, or is gone."""
        return self._connection.fileno()

    def say(self, word: str) -> None:
        """Tell the server: "busy", "idle" or "fatal"."""
        self._connection.send(word)

    def hear(self) -> str:
        """Give the error that the server's next word means."""
        word = self._connection.receive()
        return ERROR_OF.get(word or "", "CUDA_ERROR_MPS_RPC_FAILURE: the MPS server is gone")

    def close(self) -> None:
        """Leave."""
        self._connection.close()


def join(pipe: str, uuids: tuple[str, ...], environment: dict[str, str]) -> MpsClient | None:
    """Become a client, after waiting for another user's to go.

    None: no daemon answers there. Raises MpsRefusedError.
    """
    daemon = connect(f"{pipe}/control")
    if daemon is None:
        return None
    daemon.send("client")
    word = daemon.receive()
    daemon.close()
    if word is None:
        raise MpsRefusedError("CUDA_ERROR_MPS_CONNECTION_FAILED: the daemon has closed")
    server = connect(word.partition(" ")[2])
    if server is None:
        raise MpsRefusedError("CUDA_ERROR_MPS_CONNECTION_FAILED: the server is gone")
    share = environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") or str(UNLIMITED)
    limits = environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "").replace(" ", "") or "-"
    server.send(" ".join((share, limits, *uuids)))
    reply = server.receive()
    if reply is None or not reply.startswith("welcome "):
        server.close()
        raise MpsRefusedError(
            f"CUDA error {(reply or 'the server is gone').removeprefix('refused ')}"
        )
    _, percentage, *given = reply.split(" ")
    found: dict[str, int] = {}
    for each in given:
        uuid, _, mib = each.partition("=")
        if mib != "-":
            found[uuid] = int(mib)
    return MpsClient(server, float(percentage), found)
