"""Collects what one ``handle`` wants done, each record once and in its last form."""

from collections.abc import Mapping

from gpupool.model.errors import Refused
from gpupool.model.event import Event
from gpupool.model.ids import CommandId
from gpupool_allocator.core.effects import Alarm, Answer, Delete, Effect, Put, Record


class Outbox:
    """Effects of the event in hand.

    While the store refuses writes, changes that nodes cause are kept back here and
    written when it takes them again; until then nobody is promised anything by them
    (they are repaired from the nodes' own reports after a crash).
    """

    def __init__(self, last_sequence: int) -> None:
        self.sequence = last_sequence
        self.unix_s = 0.0
        self.writable = True
        self._writes: dict[tuple[str, str], Put | Delete] = {}
        self._history: list[Record] = []
        self._tells: list[Effect] = []

    def put(self, kind: str, key: str, effect: Put | Delete) -> None:
        """Notes a write; a later one for the same record replaces it."""
        self._writes.pop((kind, key), None)
        self._writes[kind, key] = effect

    def record(
        self, kind: str, subject: str, cause: str, details: Mapping[str, str] | None = None
    ) -> None:
        """Appends an event to the history."""
        self.sequence += 1
        self._history.append(
            Record(
                event=Event(
                    sequence=self.sequence,
                    unix_s=self.unix_s,
                    kind=kind,
                    subject=subject,
                    cause=cause,
                    details=dict(details or {}),
                )
            )
        )

    def tell(self, effect: Effect) -> None:
        """Notes an effect to be performed after the commit."""
        self._tells.append(effect)

    def refuse(self, command: CommandId, refused: Refused) -> None:
        """Answers a command with a refusal."""
        self._tells.append(Answer(command=command, result=refused, final=True))

    def alarm(self, code: str, message: str) -> None:
        """Raises an alarm and puts it into the history."""
        self.record("alarm." + code, "pool", message)
        self._tells.append(Alarm(code=code, message=message))

    def take(self) -> list[Effect]:
        """Everything collected, writes first; what may not be written yet stays."""
        effects: list[Effect] = []
        if self.writable:
            effects += self._writes.values()
            effects += self._history
            self._writes, self._history = {}, []
        effects += self._tells
        self._tells = []
        return effects
