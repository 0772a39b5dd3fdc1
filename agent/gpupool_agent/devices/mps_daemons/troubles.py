"""What is wrong with MPS on each GPU, told when it changes."""

import time
from collections.abc import Callable, Mapping

import structlog

from gpupool.model.ids import DeviceUuid

Tell = Callable[[DeviceUuid, str], None]

FAILED_START_S = 30.0
"""A GPU whose daemon did not start is out of the pool so long: the next slice would fail too."""


class Troubles:
    """The last word on each GPU; empty: nothing is wrong."""

    def __init__(self) -> None:
        self._reasons: dict[DeviceUuid, str] = {}
        self._foreign: Mapping[DeviceUuid, str] = {}
        self._forgiven_at_s: dict[DeviceUuid, float] = {}
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

    def found_foreign(self, found: Mapping[DeviceUuid, str]) -> None:
        """Tells of foreign daemons, all that there are; other troubles stay."""
        for gpu in set(found) | set(self._foreign):
            if self.of(gpu) in ("", self._foreign.get(gpu, "")):
                self.report(gpu, found.get(gpu, ""))
        self._foreign = found

    def start_failed(self, gpu: DeviceUuid, reason: str) -> None:
        """Tells it, until ``forgive`` finds that the GPU may be tried again."""
        self._forgiven_at_s[gpu] = time.monotonic() + FAILED_START_S
        self.report(gpu, reason)

    def forgive(self) -> None:
        """Ends the time of failed starts."""
        now = time.monotonic()
        for gpu in [gpu for gpu, at_s in self._forgiven_at_s.items() if now >= at_s]:
            del self._forgiven_at_s[gpu]
            self.over(gpu)

    def over(self, gpu: DeviceUuid) -> None:
        """Nothing of our own is wrong any more."""
        self.report(gpu, self._foreign.get(gpu, ""))
