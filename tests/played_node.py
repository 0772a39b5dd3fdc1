"""A node's agent, played for the core: it obeys when told to, and reports."""

from dataclasses import dataclass, field

from gpupool.model.assignment import (
    Assignment,
    AssignmentKey,
    AssignmentReport,
    AssignmentState,
    DesiredState,
    DeviceReport,
    Hello,
    Report,
)
from gpupool.model.ids import ConnectionId, DeviceUuid, LeaseId, NodeId
from gpupool.model.inventory import NodeInventory


@dataclass
class PlayedNode:
    """A node's agent, played: it obeys when told to, and reports."""

    node_id: NodeId
    inventory: NodeInventory
    boot_id: str = "boot-1"
    instance: str = "instance-1"
    connection: ConnectionId | None = None
    desired: DesiredState | None = None
    running: dict[AssignmentKey, Assignment] = field(default_factory=dict)
    dirty: dict[DeviceUuid, str] = field(default_factory=dict)
    failed: set[DeviceUuid] = field(default_factory=set)
    refuses: str = ""
    broken: set[DeviceUuid] = field(default_factory=set)
    highest_epoch: int = 0
    accepted: tuple[int, int] = (0, 0)
    watched: set[LeaseId] = field(default_factory=set)
    tokens: dict[DeviceUuid, int] = field(default_factory=dict)
    forgotten: set[tuple[AssignmentKey, int]] = field(default_factory=set)

    def device_reports(self) -> tuple[DeviceReport, ...]:
        return tuple(
            DeviceReport(
                uuid=device.uuid,
                clean=device.uuid not in self.dirty,
                failed=device.uuid in self.failed,
                reason=self.dirty.get(device.uuid, ""),
            )
            for device in self.inventory.devices
        )

    def hello(self) -> Hello:
        return Hello(
            node_id=self.node_id,
            boot_id=self.boot_id,
            agent_version="0.1.0",
            agent_instance_id=self.instance,
            protocol_revisions=(1,),
            inventory=self.inventory,
            assignments=tuple(
                AssignmentReport(
                    key=key,
                    token=assignment.token,
                    state=AssignmentState.PREPARED,
                    environment=environment(assignment),
                    place=assignment.place,
                    uid=assignment.uid,
                )
                for key, assignment in self.running.items()
            ),
            devices=self.device_reports(),
            highest_epoch=self.highest_epoch,
        )

    def forget(self, *keys: AssignmentKey) -> None:
        """It runs these no longer, and has told nobody."""
        for key in keys:
            self.forgotten.add((key, self.running.pop(key).token))

    def account(self, epoch: int) -> Report:
        """All that it has, as it says it now and then."""
        return Report(
            full=True,
            assignments=self.hello().assignments,
            devices=self.device_reports(),
            alive_holders=tuple(sorted(self.watched)),
            # In a new term nothing has been accepted yet.
            accepted_revision=self.accepted[1] if self.accepted[0] == epoch else 0,
        )

    def obey(self) -> Report | None:
        """Carries out the newest desired state; the report about it."""
        desired, self.desired = self.desired, None
        if desired is None:
            return None
        self.highest_epoch = max(self.highest_epoch, desired.epoch)
        self.accepted = (desired.epoch, desired.revision)
        self.watched = {watch.lease_id for watch in desired.holders}
        wanted = {assignment.key: assignment for assignment in desired.assignments}
        reports = [
            AssignmentReport(key=key, token=old.token, state=AssignmentState.ENDED)
            for key, old in self.running.items()
            if (wanted[key].token != old.token if key in wanted else key not in desired.unclaimed)
        ]
        for report in reports:
            del self.running[report.key]
        # In the order in which they were granted, like an agent.
        for key, assignment in sorted(wanted.items(), key=lambda item: item[1].token):
            if key not in self.running:
                reports.append(self._prepare(assignment))
        return Report(
            assignments=tuple(reports),
            devices=self.device_reports(),
            accepted_revision=desired.revision,
        )

    def _prepare(self, assignment: Assignment) -> AssignmentReport:
        refused = self.refuses
        for share in assignment.place.devices:
            if share.device_uuid in self.broken:
                refused = self.dirty[share.device_uuid] = "its GPU is broken"
        for share in assignment.place.devices:
            floor = self.tokens.get(share.device_uuid, 0)
            if assignment.token >= floor:
                continue
            # Promise 3, seen from the node: tokens of a device only grow. Only what it has
            # forgotten may come again under one that is too old by now.
            assert (assignment.key, assignment.token) in self.forgotten
            refused = f"token {assignment.token} is lower than {floor}"
        if refused:
            return AssignmentReport(
                key=assignment.key,
                token=assignment.token,
                state=AssignmentState.FAILED,
                reason=refused,
            )
        for share in assignment.place.devices:
            self.tokens[share.device_uuid] = assignment.token
        self.running[assignment.key] = assignment
        return AssignmentReport(
            key=assignment.key,
            token=assignment.token,
            state=AssignmentState.PREPARED,
            environment=environment(assignment),
        )


def environment(assignment: Assignment) -> dict[str, str]:
    """What a played node gives a holder."""
    uuids = ",".join(share.device_uuid for share in assignment.place.devices)
    return {"CUDA_VISIBLE_DEVICES": uuids, "GPUPOOL_LEASE_ID": assignment.key.lease_id}
