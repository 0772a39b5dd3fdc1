"""What an agent must find again of its MPS daemons after its restart.

One small file a GPU, written before anything on the GPU is changed and removed after
all of it is undone. A file of another boot says nothing about this one: the mode and
the processes went with the boot, and directories are made anew.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gpupool.model.assignment import AssignmentKey
from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool_agent.devices.interfaces import MpsError, SliceLimits
from gpupool_agent.devices.mps import SLICES_MAX
from gpupool_agent.devices.privileged import ComputeMode, DaemonFacts

Json = dict[str, Any]
SliceName = tuple[AssignmentKey, int]


def slot_name(gpu: DeviceUuid) -> str:
    """Short name of a GPU's directories: the path of a Unix socket is short too."""
    return hashlib.sha256(gpu.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """The daemon of one GPU. ``found_mode`` is what the GPU gets back at the end.

    ``daemon`` None: it was about to be started. ``server``: the last that was seen.
    ``settled``: daemon and server have had the limits that these slices need.
    """

    gpu: DeviceUuid
    uid: int
    boot_id: str
    found_mode: ComputeMode | None
    daemon: DaemonFacts | None = None
    server: DaemonFacts | None = None
    slices: dict[SliceName, SliceLimits] = field(default_factory=dict[SliceName, SliceLimits])
    settled: bool = False

    @property
    def pipe(self) -> str:
        """Where clients reach the daemon; empty while there is none."""
        return self.daemon.pipe_directory if self.daemon is not None else ""

    @property
    def name(self) -> str:
        """Name of the slot."""
        return slot_name(self.gpu)

    def check_room(self, limits: SliceLimits) -> None:
        """Raise MpsError where a slice does not fit beside the others."""
        gpu = self.gpu
        others = self.without_slice((limits.key, limits.token)).slices.values()
        taken = sum(each.share_pct for each in others)
        if limits.uid != self.uid:
            raise MpsError(f"{gpu}: its MPS serves uid {self.uid}, not {limits.uid}")
        if taken + limits.share_pct > 100:
            raise MpsError(f"{gpu}: {taken} % are taken, {limits.share_pct} % do not fit")
        if len(others) >= SLICES_MAX:
            raise MpsError(f"{gpu}: it has {SLICES_MAX} slices, the most that MPS serves")

    def environment(self, limits: SliceLimits) -> dict[str, str]:
        """What confines the clients of a slice."""
        found = {"CUDA_MPS_PIPE_DIRECTORY": self.pipe}
        if limits.share_pct:
            found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(limits.share_pct)
        if limits.memory_mib:
            found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"{self.gpu}={limits.memory_mib}M"
        return found

    def with_slice(self, limits: SliceLimits) -> "SlotRecord":
        """The same with a slice more."""
        slices = {**self.slices, (limits.key, limits.token): limits}
        return replace(self, slices=slices, settled=False)

    def without_slice(self, name: SliceName) -> "SlotRecord":
        """The same without a slice."""
        left = {other: limits for other, limits in self.slices.items() if other != name}
        return replace(self, slices=left, settled=False)


@dataclass(slots=True)
class Slot:
    """A GPU with a daemon. ``limited``: its memory default was set, ever."""

    record: SlotRecord
    limited: bool = False


class Records:
    """The files, in a directory of the agent's own."""

    def __init__(self, directory: Path, boot_id: str) -> None:
        self._directory = directory
        self._boot_id = boot_id

    def load(self) -> list[SlotRecord]:
        """Every record of this boot; those of another one are removed."""
        found: list[SlotRecord] = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                record = _record(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, KeyError, TypeError):
                record = None
            if record is None or record.boot_id != self._boot_id:
                path.unlink(missing_ok=True)
            else:
                found.append(record)
        return found

    def save(self, record: SlotRecord) -> None:
        """Write one; raises OSError."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._directory / f"{record.name}.json"
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(_row(record)), encoding="utf-8")
        os.replace(beside, path)  # noqa: PTH105 - the same as Path.replace

    def remove(self, record: SlotRecord) -> None:
        """Forget one."""
        (self._directory / f"{record.name}.json").unlink(missing_ok=True)


def _row(record: SlotRecord) -> dict[str, Any]:
    return {
        "gpu": record.gpu,
        "uid": record.uid,
        "boot_id": record.boot_id,
        "found_mode": record.found_mode,
        "daemon": _process_row(record.daemon),
        "server": _process_row(record.server),
        "settled": record.settled,
        "slices": [
            {
                "lease_id": limits.key.lease_id,
                "rank": limits.key.rank,
                "token": limits.token,
                "uid": limits.uid,
                "share_pct": limits.share_pct,
                "memory_mib": limits.memory_mib,
                "sm_count": limits.sm_count,
            }
            for limits in record.slices.values()
        ],
    }


def _process_row(process: DaemonFacts | None) -> Json | None:
    return None if process is None else asdict(process)


def _process(row: Json | None) -> DaemonFacts | None:
    return None if row is None else DaemonFacts(**row)


def _record(row: dict[str, Any]) -> SlotRecord:
    slices = [
        SliceLimits(
            key=AssignmentKey(lease_id=LeaseId(each["lease_id"]), rank=each["rank"]),
            token=each["token"],
            uid=each["uid"],
            share_pct=each["share_pct"],
            memory_mib=each["memory_mib"],
            sm_count=each["sm_count"],
        )
        for each in row["slices"]
    ]
    mode = row["found_mode"]
    return SlotRecord(
        gpu=DeviceUuid(row["gpu"]),
        uid=row["uid"],
        boot_id=row["boot_id"],
        found_mode=None if mode is None else ComputeMode(mode),
        daemon=_process(row["daemon"]),
        server=_process(row["server"]),
        slices={(limits.key, limits.token): limits for limits in slices},
        settled=row.get("settled", False),
    )
