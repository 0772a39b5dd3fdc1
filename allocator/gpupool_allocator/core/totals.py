"""Sums over the pool, kept with every change: a number shown must not cost a walk over it."""

from dataclasses import dataclass

from gpupool_allocator.core.capacity import NodeCapacity


@dataclass(frozen=True, slots=True)
class Totals:
    """Devices of a node, or of the pool.

    ``free``: nothing is granted on them, and they are offered. ``used``: something
    is granted on them. The rest are unavailable. ``granted_share_pct`` sums the
    shares, a whole device counting 100.
    """

    devices: int = 0
    free: int = 0
    used: int = 0
    granted_share_pct: int = 0

    def replaced(self, old: "Totals", new: "Totals") -> "Totals":
        """These totals with one part of them replaced."""
        return Totals(
            self.devices - old.devices + new.devices,
            self.free - old.free + new.free,
            self.used - old.used + new.used,
            self.granted_share_pct - old.granted_share_pct + new.granted_share_pct,
        )


NOTHING = Totals()


def totals_of(node: NodeCapacity) -> Totals:
    """Sums over one node's devices."""
    reachable = node.offered and not node.holds
    free = used = share_pct = 0
    for device in node.devices.values():
        if device.granted:
            used += 1
            share_pct += 100 if device.whole else 100 - device.free_share_pct
        elif reachable and device.usable():
            free += 1
    return Totals(len(node.devices), free, used, share_pct)
