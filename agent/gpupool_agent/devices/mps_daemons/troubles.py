"""What is wrong with MPS on each GPU, told when it changes."""

from collections.abc import Callable

import structlog

from gpupool.model.ids import DeviceUuid

Tell = Callable[[DeviceUuid, str], None]


class Troubles:
    """The last word on each GPU; empty: nothing is wrong."""

    def __init__(self) -> None:
        self._reasons: dict[DeviceUuid, str] = {}
        self._tell: Tell | None = None
        self._log = structlog.get_logger()

    def tell_to(self, tell: Tell) -> None:
        """Tells what is wrong now, and each change from now on."""
        self._tell = tell
        for gpu, reason in self._reasons.items():
            tell(gpu, reason)

    def of(self, gpu: DeviceUuid) -> str:
        """What was reported last."""
        return self._reasons.get(gpu, "")

    def report(self, gpu: DeviceUuid, reason: str) -> None:
        """Tells what is wrong, once."""
        if reason == self.of(gpu):
            return
        if reason:
            self._reasons[gpu] = reason
            self._log.warning("mps.trouble", gpu=gpu, reason=reason)
        else:
            del self._reasons[gpu]
            self._log.warning("mps.restored", gpu=gpu)
        if self._tell is not None:
            self._tell(gpu, reason)
