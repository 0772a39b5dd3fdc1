"""The fence: which orders of which allocator a node still obeys.

Three lines of defence against an order that comes late (C79). A lower epoch, or a
lower revision within the epoch, is not even read. A tombstone refuses an assignment
that has ended here. And where the tombstone is already forgotten, since their number
is bounded, the highest token ever accepted on a device still refuses every unknown
assignment below it.
"""

from gpupool.model.assignment import Assignment, AssignmentKey, DesiredState
from gpupool.model.ids import DeviceUuid, LeaseId

TOMBSTONES_MAX = 1024
FLOORS_MAX = 1024


class Fence:
    """Epoch, revision, tombstones and the highest token of each device."""

    def __init__(
        self,
        *,
        epoch: int = 0,
        revision: int = 0,
        floors: tuple[tuple[DeviceUuid, int], ...] = (),
        tombstones: tuple[tuple[AssignmentKey, int], ...] = (),
    ) -> None:
        self.epoch = epoch
        self.revision = revision
        self._floors = dict(floors)
        self._tombstones = dict(tombstones)

    def refuse_welcome(self, epoch: int) -> str:
        """Why an allocator of this epoch is not obeyed; empty: it is."""
        if epoch < self.epoch:
            return f"epoch {epoch} is over: epoch {self.epoch} was heard"
        return ""

    def enter(self, epoch: int) -> bool:
        """Take note of an epoch; True when it is a new one."""
        assert epoch >= self.epoch
        if epoch == self.epoch:
            return False
        self.epoch = epoch
        self.revision = 0
        return True

    def refuse_desired(self, desired: DesiredState) -> str:
        """Why a desired state is too old; empty: it is not."""
        if desired.epoch < self.epoch:
            return f"epoch {desired.epoch} is over: epoch {self.epoch} was heard"
        if desired.epoch == self.epoch and desired.revision < self.revision:
            return f"revision {desired.revision} is older than {self.revision}"
        return ""

    def has_ended(self, assignment: Assignment) -> bool:
        """This very assignment, or a later one of its member, has ended here."""
        return self._tombstones.get(assignment.key, -1) >= assignment.token

    def refuse_token(self, assignment: Assignment) -> str:
        """Why an assignment that is not known here is too old; empty: it is not."""
        for share in assignment.place.devices:
            floor = self._floors.get(share.device_uuid, 0)
            if assignment.token < floor:
                return f"token {assignment.token} is lower than {floor} seen on {share.device_uuid}"
        return ""

    def accept(self, assignment: Assignment) -> None:
        """Remember the token of an accepted assignment on its devices."""
        for share in assignment.place.devices:
            floor = self._floors.pop(share.device_uuid, 0)
            self._floors[share.device_uuid] = max(floor, assignment.token)
        while len(self._floors) > FLOORS_MAX:
            del self._floors[next(iter(self._floors))]

    def bury(self, key: AssignmentKey, token: int) -> None:
        """Remember that an assignment has ended."""
        buried = max(self._tombstones.pop(key, -1), token)
        self._tombstones[key] = buried
        while len(self._tombstones) > TOMBSTONES_MAX:
            del self._tombstones[next(iter(self._tombstones))]

    def floors(self) -> tuple[tuple[DeviceUuid, int], ...]:
        """Highest token of each device, least recently raised first."""
        return tuple(self._floors.items())

    def tombstones(self) -> tuple[tuple[AssignmentKey, int], ...]:
        """Ended assignments, oldest first."""
        return tuple(self._tombstones.items())

    def knows_end_of(self, lease_id: LeaseId) -> bool:
        """Whether something of a lease has ended here, as far as is remembered."""
        return any(key.lease_id == lease_id for key in self._tombstones)

    def floor_of(self, uuid: DeviceUuid) -> int:
        """Highest token accepted on a device; 0: none."""
        return self._floors.get(uuid, 0)
