"""The checkpoint on disk: what the agent must find again after its restart.

One JSON file, replaced as a whole: written beside, synced, renamed, and the
directory synced. A lock beside it keeps a second agent off the same state.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from gpupool.model.assignment import (
    Assignment,
    AssignmentKey,
    AssignmentState,
    HolderWatch,
)
from gpupool.model.caller import ProcessRef
from gpupool.model.ids import DeviceUuid, LeaseId, NodeId
from gpupool.model.lease import DeviceShare, Place, ShareGiven
from gpupool_agent.core.adoptions import Adoption
from gpupool_agent.core.events import Checkpoint, CheckpointEntry

VERSION = 1


class StateLockedError(Exception):
    """Another agent runs on this state directory; the text names its pid."""


class CheckpointError(Exception):
    """The checkpoint cannot be read; the text says how to go on."""


class StateDirectory:
    """The state directory of one agent, locked while the object is open.

    Raises StateLockedError, and OSError where the directory cannot be used.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = path / "checkpoint.json"
        self._lock = os.open(path / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise StateLockedError(f"{path} is in use by the agent with pid {holder}") from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def load(self) -> Checkpoint | None:
        """Give the last one saved, None before the first; raises CheckpointError."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            record = json.loads(text)
            if record["version"] != VERSION:
                raise CheckpointError(
                    f"{self._path}: version {record['version']} is unknown, this agent reads "
                    f"version {VERSION}; run the agent that wrote it"
                )
            return _checkpoint(record)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self._path} is damaged ({error!r}); move it away when nothing of the pool "
                "runs on this node any more"
            ) from error

    def save(self, checkpoint: Checkpoint) -> None:
        """Return once it is durable; raises OSError, and then the last one still is."""
        beside = self._path.with_suffix(".new")
        data = json.dumps(_record(checkpoint), separators=(",", ":")).encode()
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._lock)


def _record(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "version": VERSION,
        "boot_id": checkpoint.boot_id,
        "epoch": checkpoint.epoch,
        "revision": checkpoint.revision,
        "contact_lost_s": checkpoint.contact_lost_s,
        "assignments": [_entry_record(entry) for entry in checkpoint.entries],
        "holders": [
            {
                "lease_id": watch.lease_id,
                "node_id": watch.process.node_id,
                "pid": watch.process.pid,
                "start_ticks": watch.process.start_ticks,
            }
            for watch in checkpoint.holders
        ],
        "floors": [[uuid, token] for uuid, token in checkpoint.floors],
        "tombstones": [[key.lease_id, key.rank, token] for key, token in checkpoint.tombstones],
        "adoptions": [
            {
                "lease_id": each.lease_id,
                "pid": each.pid,
                "start_ticks": each.start_ticks,
                "actor": each.actor,
            }
            for each in checkpoint.adoptions
        ],
    }


def _checkpoint(record: dict[str, Any]) -> Checkpoint:
    return Checkpoint(
        boot_id=record["boot_id"],
        epoch=record["epoch"],
        revision=record["revision"],
        contact_lost_s=record["contact_lost_s"],
        entries=tuple(_entry(each) for each in record["assignments"]),
        holders=tuple(
            HolderWatch(
                lease_id=LeaseId(each["lease_id"]),
                process=ProcessRef(
                    node_id=NodeId(each["node_id"]),
                    pid=each["pid"],
                    start_ticks=each["start_ticks"],
                ),
            )
            for each in record["holders"]
        ),
        floors=tuple((DeviceUuid(uuid), token) for uuid, token in record["floors"]),
        tombstones=tuple(
            (AssignmentKey(lease_id=LeaseId(lease_id), rank=rank), token)
            for lease_id, rank, token in record["tombstones"]
        ),
        # Written since 0.2.0.
        adoptions=tuple(
            Adoption(
                lease_id=LeaseId(each["lease_id"]),
                pid=each["pid"],
                start_ticks=each["start_ticks"],
                actor=each["actor"],
            )
            for each in record.get("adoptions", [])
        ),
    )


def _entry_record(entry: CheckpointEntry) -> dict[str, Any]:
    assignment = entry.assignment
    return {
        "lease_id": assignment.key.lease_id,
        "rank": assignment.key.rank,
        "group": assignment.group,
        "token": assignment.token,
        "node_id": assignment.place.node_id,
        "devices": [
            [share.device_uuid, share.share_pct, share.memory_mib, share.whole]
            for share in assignment.place.devices
        ],
        "cpu_milli": assignment.place.cpu_milli,
        "host_memory_mib": assignment.place.host_memory_mib,
        "uid": assignment.uid,
        "disconnect_s": assignment.disconnect_s,
        "world_size": assignment.world_size,
        "state": entry.state.value,
        "environment": entry.environment,
        "reason": entry.reason,
        "touched": entry.touched,
        "given": [
            [share.device_uuid, share.sm_count, share.share_milli_pct] for share in entry.given
        ],
    }


def _entry(record: dict[str, Any]) -> CheckpointEntry:
    place = Place(
        node_id=NodeId(record["node_id"]),
        devices=tuple(
            DeviceShare(
                device_uuid=DeviceUuid(uuid), share_pct=share, memory_mib=memory, whole=whole
            )
            for uuid, share, memory, whole in record["devices"]
        ),
        cpu_milli=record["cpu_milli"],
        host_memory_mib=record["host_memory_mib"],
    )
    return CheckpointEntry(
        assignment=Assignment(
            key=AssignmentKey(lease_id=LeaseId(record["lease_id"]), rank=record["rank"]),
            group=record["group"],
            token=record["token"],
            place=place,
            uid=record["uid"],
            disconnect_s=record["disconnect_s"],
            world_size=record["world_size"],
        ),
        state=AssignmentState(record["state"]),
        environment=dict(record["environment"]),
        reason=record["reason"],
        touched=record["touched"],
        # Written since 0.2.0.
        given=tuple(
            ShareGiven(device_uuid=DeviceUuid(uuid), sm_count=count, share_milli_pct=share)
            for uuid, count, share in record.get("given", [])
        ),
    )
