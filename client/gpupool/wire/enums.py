"""Tables between the pool's words and the wire's numbers."""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Generic, TypeVar

from gpupool.model.assignment import AssignmentState, ProcessNoteKind
from gpupool.model.hold import HoldScope
from gpupool.model.lease import LeaseState, MemberState
from gpupool.model.request import Level, OnFailure, WorkloadClass
from gpupool.v1 import node_pb2, pool_pb2, resources_pb2
from gpupool.wire.door import path
from gpupool.wire.errors import BadField

_Word = TypeVar("_Word", bound=StrEnum)
_Number = TypeVar("_Number", bound=int)


class EnumTable(Generic[_Word, _Number]):
    """Both directions of one enum; number 0 is "unspecified" and no word."""

    def __init__(
        self, words: Iterable[_Word], number_of: Callable[[str], _Number], prefix: str
    ) -> None:
        self._number = {word: number_of(f"{prefix}_{word.name}") for word in words}
        self._word = {int(number): word for word, number in self._number.items()}
        self._accepted = ", ".join(f"{prefix}_{word.name}" for word in self._number)

    def to_proto(self, word: _Word) -> _Number:
        """Number of a word."""
        return self._number[word]

    def from_proto(self, at: str, name: str, number: int) -> _Word:
        """Word of a number; BadField where it is unspecified or unknown."""
        found = self._word.get(number)
        if found is None:
            raise BadField(path(at, name), number, self._accepted)
        return found

    def optional_from_proto(self, at: str, name: str, number: int) -> _Word | None:
        """Word of a number, None where unspecified; BadField where unknown."""
        return None if number == 0 else self.from_proto(at, name, number)


LEVELS = EnumTable(Level, resources_pb2.Level.Value, "LEVEL")
ON_FAILURES = EnumTable(OnFailure, resources_pb2.OnFailure.Value, "ON_FAILURE")
WORKLOAD_CLASSES = EnumTable(WorkloadClass, resources_pb2.WorkloadClass.Value, "WORKLOAD_CLASS")
LEASE_STATES = EnumTable(LeaseState, resources_pb2.LeaseState.Value, "LEASE_STATE")
MEMBER_STATES = EnumTable(MemberState, resources_pb2.MemberState.Value, "MEMBER_STATE")
ASSIGNMENT_STATES = EnumTable(AssignmentState, node_pb2.AssignmentState.Value, "ASSIGNMENT_STATE")
PROCESS_NOTE_KINDS = EnumTable(ProcessNoteKind, node_pb2.ProcessNoteKind.Value, "PROCESS_NOTE_KIND")
HOLD_SCOPES = EnumTable(HoldScope, pool_pb2.HoldScope.Value, "HOLD_SCOPE")
