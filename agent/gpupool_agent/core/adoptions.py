"""Processes that were taken into leases at their owner's wish: they count to them."""

from collections.abc import Collection
from dataclasses import dataclass

from gpupool.model.ids import LeaseId

ADOPTIONS_MAX = 1024
"""Adopted processes of one node at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """A process of a lease; ``actor`` is the user who took it in, by name or id."""

    lease_id: LeaseId
    pid: int
    start_ticks: int
    actor: str = ""


class Adoptions:
    """Adopted processes that live, by pid. Each is watched, so that no other has its pid."""

    def __init__(self, kept: Collection[Adoption] = ()) -> None:
        self.living: dict[int, Adoption] = {each.pid: each for each in kept}

    def end(self, adoption: Adoption) -> bool:
        """The process is gone; False when it was not adopted any more."""
        if self.living.get(adoption.pid) != adoption:
            return False
        del self.living[adoption.pid]
        return True

    def keep_of(self, leases: Collection[LeaseId]) -> list[Adoption]:
        """Forget those of leases that have nothing here any more; the forgotten."""
        over = [each for each in self.living.values() if each.lease_id not in leases]
        for each in over:
            del self.living[each.pid]
        return over
