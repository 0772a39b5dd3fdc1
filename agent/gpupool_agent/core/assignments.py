"""One assignment on its node."""

from dataclasses import dataclass, field
from enum import StrEnum

from gpupool.model.assignment import (
    Assignment,
    AssignmentKey,
    AssignmentReport,
    AssignmentState,
)
from gpupool.model.lease import ShareGiven
from gpupool_agent.core.texts import sendable

AssignmentName = tuple[AssignmentKey, int]
"""Key and token: one assignment for ever."""

CHECK_DELAY_S_MIN = 0.25
CHECK_DELAY_S_MAX = 2.0


class Step(StrEnum):
    """What is under way for an assignment; its answer comes for sure."""

    PREPARE = "prepare"
    CLEAN_UP = "clean_up"


@dataclass(slots=True)
class Kept:
    """An assignment that is prepared, runs or ends here.

    ``reason`` is what it waits for or failed by, ``cause`` why it ends; it has ended by that.
    ``touched``: a Prepare of it was begun, ever. ``adopted``: it is from before the
    agent's restart. ``cleaned_s``: when its CleanUp had succeeded; a reading begun
    later can confirm the end. ``stop_since_s``: the node's clock ended it, so its
    processes go too.
    """

    assignment: Assignment
    state: AssignmentState
    wait_until_s: float
    environment: dict[str, str] = field(default_factory=dict[str, str])
    reason: str = ""
    cause: str = ""
    given: tuple[ShareGiven, ...] = ()
    touched: bool = False
    step: Step | None = None
    adopted: bool = False
    cleaned_s: float | None = None
    check_s: float = 0.0
    check_delay_s: float = CHECK_DELAY_S_MIN
    stop_since_s: float | None = None
    warned: bool = False

    @property
    def name(self) -> AssignmentName:
        """Key and token."""
        return self.assignment.key, self.assignment.token

    @property
    def active(self) -> bool:
        """It may have a holder."""
        return self.state in (AssignmentState.PREPARING, AssignmentState.PREPARED)

    @property
    def occupies(self) -> bool:
        """Something of it may be on its devices."""
        return self.touched and self.state is not AssignmentState.ENDED

    def end(self, now: float, reason: str) -> None:
        """Begin to end it, once; one that nothing was done for has ended at once."""
        if self.state in (AssignmentState.ENDING, AssignmentState.ENDED):
            return
        self.state = AssignmentState.ENDING if self.touched else AssignmentState.ENDED
        self.environment = {}
        self.given = ()
        self.reason = self.cause = reason
        self.check_s = now
        self.check_delay_s = CHECK_DELAY_S_MIN

    def check_later(self, now: float) -> None:
        """Look again after a delay that doubles up to its bound."""
        self.check_s = now + self.check_delay_s
        self.check_delay_s = min(self.check_delay_s * 2, CHECK_DELAY_S_MAX)

    def report(self, *, with_place: bool = False, degraded: str = "") -> AssignmentReport:
        """What the allocator is told; the place only in Hello and in full accounts."""
        return AssignmentReport(
            key=self.assignment.key,
            token=self.assignment.token,
            state=self.state,
            environment=self.environment,
            reason=sendable(self.reason),
            place=self.assignment.place if with_place else None,
            uid=self.assignment.uid if with_place else 0,
            given=self.given,
            degraded=sendable(degraded),
        )
