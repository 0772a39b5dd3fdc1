"""Processes on this node that hold leases: watched, alive, ended."""

from collections.abc import Collection

from gpupool.model.assignment import HolderEnd, HolderWatch
from gpupool.model.ids import LeaseId, NodeId
from gpupool_agent.core.events import NodeEffect, UnwatchHolder, WatchHolder


class Holders:
    """What the allocator wants watched, and what became of it.

    An end is told again until the allocator no longer asks for the watch.
    """

    def __init__(self, node_id: NodeId) -> None:
        self._node_id = node_id
        self.watched: dict[LeaseId, HolderWatch] = {}
        self.ended: dict[LeaseId, tuple[HolderWatch, HolderEnd]] = {}
        self.untold: dict[LeaseId, HolderEnd] = {}
        # Watched although nobody asks: an allocator would take the news for a mistake.
        self._unasked: frozenset[LeaseId] = frozenset()

    def apply(
        self, wanted: tuple[HolderWatch, ...], unclaimed: Collection[LeaseId] = ()
    ) -> list[NodeEffect]:
        """Watch exactly these, and on those of ``unclaimed`` leases that were watched before.

        An allocator that does not know a lease cannot ask for its holder, and yet the
        lease goes on here: its processes still belong to it by their descent.
        """
        effects: list[NodeEffect] = []
        asked = {key: old for key, old in self.watched.items() if key in unclaimed}
        here = {watch.lease_id: watch for watch in wanted if self._is_here(watch)}
        self._unasked = frozenset(asked.keys() - here.keys())
        asked |= here
        for lease_id in [key for key in self.ended if key not in asked]:
            del self.ended[lease_id]
            self.untold.pop(lease_id, None)
        for lease_id in [key for key, old in self.watched.items() if asked.get(key) != old]:
            del self.watched[lease_id]
            effects.append(UnwatchHolder(lease_id=lease_id))
        for lease_id, watch in asked.items():
            over = self.ended.get(lease_id)
            if over is not None and over[0] == watch:
                self.untold[lease_id] = over[1]
            elif lease_id not in self.watched:
                self.ended.pop(lease_id, None)
                self.untold.pop(lease_id, None)
                self.watched[lease_id] = watch
                effects.append(WatchHolder(watch=watch))
        return effects

    def end(self, watch: HolderWatch, reason: str) -> bool:
        """A holder is gone; False when nobody asks for this process any more."""
        if self.watched.get(watch.lease_id) != watch:
            return False
        del self.watched[watch.lease_id]
        self._note(watch, reason)
        if watch.lease_id in self._unasked:
            del self.untold[watch.lease_id]
        return True

    def end_all(self, watches: tuple[HolderWatch, ...], reason: str) -> None:
        """Holders from before a reboot are gone."""
        for watch in watches:
            self._note(watch, reason)

    def take_untold(self) -> tuple[HolderEnd, ...]:
        """Ends that the next report carries."""
        untold = tuple(self.untold[lease_id] for lease_id in sorted(self.untold))
        self.untold.clear()
        return untold

    def tell_all(self) -> None:
        """A new connection hears of every end."""
        self.untold = {
            lease_id: end
            for lease_id, (_, end) in self.ended.items()
            if lease_id not in self._unasked
        }

    def alive(self) -> tuple[LeaseId, ...]:
        """Leases whose holders live, in order, as far as they were asked for."""
        return tuple(sorted(self.watched.keys() - self._unasked))

    def pids(self) -> dict[LeaseId, int]:
        """Holding processes that live."""
        return {lease_id: watch.process.pid for lease_id, watch in self.watched.items()}

    def _note(self, watch: HolderWatch, reason: str) -> None:
        end = HolderEnd(lease_id=watch.lease_id, pid=watch.process.pid, reason=reason)
        self.ended[watch.lease_id] = (watch, end)
        self.untold[watch.lease_id] = end

    def _is_here(self, watch: HolderWatch) -> bool:
        return watch.process.node_id == self._node_id
