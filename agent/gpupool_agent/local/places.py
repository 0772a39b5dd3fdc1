"""Who may connect: no user can take the socket from the others, or from root.

Pure: it counts connections, and opens none.
"""

from collections import Counter

ROOT = 0
USER_PART = 4
"""A user has at most one of so many parts of all places."""
ROOT_PART = 8
"""One of so many parts is kept for root."""


class Places:
    """Connections at a time: ``most`` in all, of them a quarter a user, and an eighth root's alone.

    Root may have them all. Where there is one place, it is anybody's.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Counter[int] = Counter()
        self.user_most = max(1, most // USER_PART)
        self.users_most = most - min(most - 1, max(1, most // ROOT_PART))

    def of(self, uid: int) -> int:
        """Places that a user has now."""
        return self._taken[uid]

    def take(self, uid: int) -> bool:
        """Takes a place; False where there is none for this user."""
        if not self._has_room(uid):
            return False
        self._taken[uid] += 1
        return True

    def give_back(self, uid: int) -> None:
        """Gives a place back that was taken."""
        self._taken[uid] -= 1
        if not self._taken[uid]:
            del self._taken[uid]

    def _has_room(self, uid: int) -> bool:
        everybodys = self._taken.total()
        if uid == ROOT:
            return everybodys < self._most
        users = everybodys - self._taken[ROOT]
        return (
            everybodys < self._most
            and users < self.users_most
            and self._taken[uid] < self.user_most
        )


class Seldom:
    """Says of each uid at most once in ``period_s`` that there is something to say."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._said_at_s: dict[int, float] = {}

    def due(self, uid: int, now_s: float) -> bool:
        """Whether to say it now; then it is taken as said."""
        since_s = now_s - self._period_s
        # What is older says nothing any more: as many are kept as come in one period.
        self._said_at_s = {each: at_s for each, at_s in self._said_at_s.items() if at_s > since_s}
        if uid in self._said_at_s:
            return False
        self._said_at_s[uid] = now_s
        return True
