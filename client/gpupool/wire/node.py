"""The stream between a node's agent and the allocator.

What it carries is translated in ``inventory`` and ``assignment`` and named here
too, so that either end needs one import.
"""

from collections.abc import Sequence

from gpupool.model import limits
from gpupool.model.assignment import (
    DeviceReport,
    DeviceTelemetry,
    FaultReport,
    Hello,
    HolderEnd,
    ProcessNote,
    Report,
    Welcome,
)
from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool.v1 import node_pb2 as pb
from gpupool.wire import door
from gpupool.wire.assignment import (
    ASSIGNMENTS_PER_NODE_MAX,
    assignment_from_proto,
    assignment_key_from_proto,
    assignment_key_to_proto,
    assignment_report_from_proto,
    assignment_report_to_proto,
    assignment_reports_from_proto,
    assignment_to_proto,
    desired_state_from_proto,
    desired_state_to_proto,
    holder_watch_from_proto,
    holder_watch_to_proto,
)
from gpupool.wire.enums import PROCESS_NOTE_KINDS
from gpupool.wire.inventory import (
    device_from_proto,
    device_to_proto,
    hca_from_proto,
    hca_port_from_proto,
    hca_port_to_proto,
    hca_to_proto,
    node_inventory_from_proto,
    node_inventory_to_proto,
    stray_process_from_proto,
    stray_process_to_proto,
)
from gpupool.wire.resources import PID_MAX
from gpupool.wire.times import (
    duration_from_proto,
    duration_to_proto,
    timestamp_from_proto,
    timestamp_to_proto,
)

__all__ = [
    "assignment_from_proto",
    "assignment_key_from_proto",
    "assignment_key_to_proto",
    "assignment_report_from_proto",
    "assignment_report_to_proto",
    "assignment_to_proto",
    "desired_state_from_proto",
    "desired_state_to_proto",
    "device_from_proto",
    "device_report_from_proto",
    "device_report_to_proto",
    "device_telemetry_from_proto",
    "device_telemetry_to_proto",
    "device_to_proto",
    "fault_report_from_proto",
    "fault_report_to_proto",
    "hca_from_proto",
    "hca_port_from_proto",
    "hca_port_to_proto",
    "hca_to_proto",
    "hello_from_proto",
    "hello_to_proto",
    "holder_end_from_proto",
    "holder_end_to_proto",
    "holder_watch_from_proto",
    "holder_watch_to_proto",
    "node_inventory_from_proto",
    "node_inventory_to_proto",
    "process_note_from_proto",
    "process_note_to_proto",
    "report_from_proto",
    "report_to_proto",
    "stray_process_from_proto",
    "stray_process_to_proto",
    "telemetry_from_proto",
    "telemetry_to_proto",
    "welcome_from_proto",
    "welcome_to_proto",
]

_PROTOCOL_REVISIONS_MAX = 64
_STRAYS_MAX = 1024
_FAULTS_MAX = 1024
_PROCESS_NOTES_MAX = 1024
_WELCOME_S_MAX = 86400.0
_POWER_MW_MAX = 1_000_000_000


def hello_to_proto(hello: Hello) -> pb.Hello:
    """An agent introduces its node."""
    return pb.Hello(
        node_id=hello.node_id,
        boot_id=hello.boot_id,
        agent_version=hello.agent_version,
        agent_instance_id=hello.agent_instance_id,
        protocol_revisions=hello.protocol_revisions,
        inventory=node_inventory_to_proto(hello.inventory),
        assignments=[assignment_report_to_proto(report) for report in hello.assignments],
        devices=[device_report_to_proto(report) for report in hello.devices],
        highest_epoch=hello.highest_epoch,
    )


def hello_from_proto(message: pb.Hello, at: str = "hello") -> Hello:
    """Raises BadField."""
    door.count(at, "protocol_revisions", message.protocol_revisions, 1, _PROTOCOL_REVISIONS_MAX)
    return Hello(
        node_id=door.node_id(at, "node_id", message.node_id),
        boot_id=door.identifier(at, "boot_id", message.boot_id),
        agent_version=door.text(at, "agent_version", message.agent_version, least=1),
        agent_instance_id=door.identifier(at, "agent_instance_id", message.agent_instance_id),
        protocol_revisions=tuple(
            door.integer(at, f"protocol_revisions[{index}]", revision, 1, door.INT32_MAX)
            for index, revision in enumerate(message.protocol_revisions)
        ),
        inventory=node_inventory_from_proto(f"{at}.inventory", message.inventory),
        assignments=assignment_reports_from_proto(at, message.assignments),
        devices=_device_reports(at, message.devices),
        highest_epoch=door.integer(at, "highest_epoch", message.highest_epoch, 0, door.INT64_MAX),
    )


def welcome_to_proto(welcome: Welcome) -> pb.Welcome:
    """The allocator's answer to Hello."""
    message = pb.Welcome(
        epoch=welcome.epoch,
        protocol_revision=welcome.protocol_revision,
        allocator_version=welcome.allocator_version,
        heartbeat_timeout=duration_to_proto(welcome.heartbeat_timeout_s),
        report_interval=duration_to_proto(welcome.report_interval_s),
        forward_key=welcome.forward_key,
    )
    if welcome.reconnect_spread_s:
        message.reconnect_spread.CopyFrom(duration_to_proto(welcome.reconnect_spread_s))
    return message


def welcome_from_proto(message: pb.Welcome, at: str = "welcome") -> Welcome:
    """Raises BadField, also where the report interval is zero: it would never rest."""
    return Welcome(
        epoch=door.integer(at, "epoch", message.epoch, 0, door.INT64_MAX),
        protocol_revision=door.integer(
            at, "protocol_revision", message.protocol_revision, 1, door.INT32_MAX
        ),
        allocator_version=door.text(at, "allocator_version", message.allocator_version),
        heartbeat_timeout_s=duration_from_proto(
            at, "heartbeat_timeout", message.heartbeat_timeout, 0.01, _WELCOME_S_MAX
        ),
        report_interval_s=duration_from_proto(
            at, "report_interval", message.report_interval, 0.01, _WELCOME_S_MAX
        ),
        reconnect_spread_s=duration_from_proto(
            at, "reconnect_spread", message.reconnect_spread, 0.0, _WELCOME_S_MAX
        ),
        forward_key=door.text(at, "forward_key", message.forward_key),
    )


def device_report_to_proto(report: DeviceReport) -> pb.DeviceReport:
    """What a node says about one device."""
    return pb.DeviceReport(
        uuid=report.uuid,
        clean=report.clean,
        failed=report.failed,
        strays=[stray_process_to_proto(stray) for stray in report.strays],
        reason=report.reason,
    )


def device_report_from_proto(at: str, message: pb.DeviceReport) -> DeviceReport:
    """Raises BadField."""
    door.count(at, "strays", message.strays, 0, _STRAYS_MAX)
    return DeviceReport(
        uuid=DeviceUuid(door.device_uuid(at, "uuid", message.uuid)),
        clean=message.clean,
        failed=message.failed,
        strays=tuple(
            stray_process_from_proto(f"{at}.strays[{index}]", stray)
            for index, stray in enumerate(message.strays)
        ),
        reason=door.long_text(at, "reason", message.reason),
    )


def holder_end_to_proto(end: HolderEnd) -> pb.HolderEnd:
    """A holding process that ended."""
    return pb.HolderEnd(lease_id=end.lease_id, pid=end.pid, reason=end.reason)


def holder_end_from_proto(at: str, message: pb.HolderEnd) -> HolderEnd:
    """Raises BadField."""
    return HolderEnd(
        lease_id=LeaseId(door.identifier(at, "lease_id", message.lease_id)),
        pid=door.integer(at, "pid", message.pid, 0, PID_MAX),
        reason=door.text(at, "reason", message.reason),
    )


def fault_report_to_proto(fault: FaultReport) -> pb.FaultReport:
    """Something is wrong, or well again."""
    message = pb.FaultReport(
        code=fault.code,
        device_uuid=fault.device_uuid or "",
        evidence=fault.evidence,
        open=fault.open,
    )
    if fault.unix_s:
        message.time.CopyFrom(timestamp_to_proto(fault.unix_s))
    return message


def fault_report_from_proto(at: str, message: pb.FaultReport) -> FaultReport:
    """Raises BadField; no device means the node."""
    device_uuid: DeviceUuid | None = None
    if message.device_uuid:
        device_uuid = DeviceUuid(door.device_uuid(at, "device_uuid", message.device_uuid))
    return FaultReport(
        code=door.word(at, "code", message.code),
        evidence=door.long_text(at, "evidence", message.evidence),
        open=message.open,
        device_uuid=device_uuid,
        unix_s=timestamp_from_proto(at, "time", message.time),
    )


def process_note_to_proto(note: ProcessNote) -> pb.ProcessNote:
    """Something that was done to a process."""
    return pb.ProcessNote(
        kind=PROCESS_NOTE_KINDS.to_proto(note.kind),
        device_uuid=note.device_uuid,
        process=stray_process_to_proto(note.process),
        reason=note.reason,
        actor=note.actor,
    )


def process_note_from_proto(at: str, message: pb.ProcessNote) -> ProcessNote:
    """Raises BadField."""
    return ProcessNote(
        kind=PROCESS_NOTE_KINDS.from_proto(at, "kind", message.kind),
        device_uuid=DeviceUuid(door.device_uuid(at, "device_uuid", message.device_uuid)),
        process=stray_process_from_proto(f"{at}.process", message.process),
        reason=door.long_text(at, "reason", message.reason, most=limits.NAME_CHARS_MAX),
        actor=door.long_text(at, "actor", message.actor, most=limits.NAME_CHARS_MAX),
    )


def report_to_proto(report: Report) -> pb.Report:
    """What is on a node, as far as it changed."""
    message = pb.Report(
        full=report.full,
        assignments=[assignment_report_to_proto(entry) for entry in report.assignments],
        devices=[device_report_to_proto(entry) for entry in report.devices],
        alive_holder_lease_ids=report.alive_holders,
        ended_holders=[holder_end_to_proto(end) for end in report.ended_holders],
        accepted_revision=report.accepted_revision,
        faults=[fault_report_to_proto(fault) for fault in report.faults],
        process_notes=[process_note_to_proto(note) for note in report.process_notes],
    )
    if report.inventory is not None:
        message.inventory.CopyFrom(node_inventory_to_proto(report.inventory))
    return message


def report_from_proto(message: pb.Report, at: str = "report") -> Report:
    """Raises BadField."""
    holders = message.alive_holder_lease_ids
    door.count(at, "alive_holder_lease_ids", holders, 0, ASSIGNMENTS_PER_NODE_MAX)
    door.count(at, "ended_holders", message.ended_holders, 0, ASSIGNMENTS_PER_NODE_MAX)
    door.count(at, "faults", message.faults, 0, _FAULTS_MAX)
    door.count(at, "process_notes", message.process_notes, 0, _PROCESS_NOTES_MAX)
    return Report(
        full=message.full,
        inventory=(
            node_inventory_from_proto(f"{at}.inventory", message.inventory)
            if message.HasField("inventory")
            else None
        ),
        assignments=assignment_reports_from_proto(at, message.assignments),
        devices=_device_reports(at, message.devices),
        alive_holders=tuple(
            LeaseId(door.identifier(at, "alive_holder_lease_ids", lease_id)) for lease_id in holders
        ),
        ended_holders=tuple(
            holder_end_from_proto(f"{at}.ended_holders[{index}]", end)
            for index, end in enumerate(message.ended_holders)
        ),
        accepted_revision=door.integer(
            at, "accepted_revision", message.accepted_revision, 0, door.INT64_MAX
        ),
        faults=tuple(
            fault_report_from_proto(f"{at}.faults[{index}]", fault)
            for index, fault in enumerate(message.faults)
        ),
        process_notes=tuple(
            process_note_from_proto(f"{at}.process_notes[{index}]", note)
            for index, note in enumerate(message.process_notes)
        ),
    )


def device_telemetry_to_proto(telemetry: DeviceTelemetry) -> pb.DeviceTelemetry:
    """Measurements of a device; what it cannot say is left out."""
    return pb.DeviceTelemetry(
        uuid=telemetry.uuid,
        utilization_pct=telemetry.utilization_pct,
        memory_used_mib=telemetry.memory_used_mib,
        temperature_c=telemetry.temperature_c,
        power_mw=telemetry.power_mw,
    )


def device_telemetry_from_proto(at: str, message: pb.DeviceTelemetry) -> DeviceTelemetry:
    """Raises BadField for measurements that no device makes."""
    telemetry = DeviceTelemetry(
        uuid=DeviceUuid(door.device_uuid(at, "uuid", message.uuid)),
        utilization_pct=message.utilization_pct if message.HasField("utilization_pct") else None,
        memory_used_mib=message.memory_used_mib if message.HasField("memory_used_mib") else None,
        temperature_c=message.temperature_c if message.HasField("temperature_c") else None,
        power_mw=message.power_mw if message.HasField("power_mw") else None,
    )
    door.integer(at, "utilization_pct", telemetry.utilization_pct or 0, 0, 100)
    memory_mib = telemetry.memory_used_mib or 0
    door.integer(at, "memory_used_mib", memory_mib, 0, limits.GPU_MEMORY_MIB_MAX)
    door.integer(at, "temperature_c", telemetry.temperature_c or 0, -273, 1000)
    door.integer(at, "power_mw", telemetry.power_mw or 0, 0, _POWER_MW_MAX)
    return telemetry


def telemetry_to_proto(devices: Sequence[DeviceTelemetry]) -> pb.Telemetry:
    """Measurements of a node."""
    return pb.Telemetry(devices=[device_telemetry_to_proto(device) for device in devices])


def telemetry_from_proto(
    message: pb.Telemetry, at: str = "telemetry"
) -> tuple[DeviceTelemetry, ...]:
    """Raises BadField; no device may appear twice."""
    door.count(at, "devices", message.devices, 0, limits.DEVICES_PER_NODE_MAX)
    devices = tuple(
        device_telemetry_from_proto(f"{at}.devices[{index}]", device)
        for index, device in enumerate(message.devices)
    )
    door.unique(at, "devices", [device.uuid for device in devices])
    return devices


def _device_reports(at: str, messages: Sequence[pb.DeviceReport]) -> tuple[DeviceReport, ...]:
    door.count(at, "devices", messages, 0, limits.DEVICES_PER_NODE_MAX)
    reports = tuple(
        device_report_from_proto(f"{at}.devices[{index}]", report)
        for index, report in enumerate(messages)
    )
    door.unique(at, "devices", [report.uuid for report in reports])
    return reports
