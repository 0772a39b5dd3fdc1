"""What a CDI spec may hold that is written as root. Pure.

A container runtime does as root what a spec says, so a spec is as good as root: it could
run a hook, or mount the host's files. Only what a lease needs is let through: variables,
GPU and network device nodes, the pipes of MPS daemons, and what the operator names. The
runtime's own spec (nvidia.com/gpu) brings driver libraries and hooks.
"""

import json
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpupool_agent.helper.refusal import RefusedError, is_list, is_table, refuse

SPEC_BYTES_MAX = 64 * 1024
ENTRIES_MAX = 256

KIND = re.compile(r"gpupool[a-z0-9.-]{0,64}/[a-z][a-z0-9_-]{0,62}", re.ASCII)
SLOT = re.compile(r"[0-9a-f]{8}", re.ASCII)
"""The name of a slot: of one MPS daemon, and of its directory in ``mps_dir``."""
VERSION = re.compile(r"[01]\.[0-9]{1,2}\.[0-9]{1,2}", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}", re.ASCII)
VARIABLE = re.compile(r"(?!LD_|PATH=)[A-Z][A-Z0-9_]{0,63}=[ -~]{0,4096}", re.ASCII)
DEVICE_NODE = re.compile(
    r"/dev/(nvidia[a-z0-9-]{0,32}|nvidia-caps(-imex-channels)?/[a-z0-9-]{1,32}"
    r"|infiniband/[a-z0-9_]{1,32}|gdrdrv)",
    re.ASCII,
)
TEXT = re.compile(r"[ -~]{0,1024}", re.ASCII)
MOUNT_OPTIONS = frozenset(
    {"ro", "rw", "bind", "rbind", "nosuid", "nodev", "noexec", "private", "rprivate"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mountable:
    """Host paths that a spec may mount: the pipes in ``mps_dir``, and exactly ``paths``.

    Not all of ``mps_dir``: that is every daemon of the host, with its logs. Only root may
    write in it and in the slots: a link there would lead anywhere.
    """

    mps_dir: Path
    paths: tuple[Path, ...]

    def has(self, path: Path) -> bool:
        """Whether a path without . and .. is one of them."""
        slot = path.parent
        is_pipe = path.name == "pipe" and slot.parent == self.mps_dir
        return path in self.paths or (is_pipe and SLOT.fullmatch(slot.name) is not None)


def checked_spec(text: str, mountable: Mountable) -> str:
    """The spec, written anew; RefusedError where it holds anything that it may not."""
    if len(text.encode("utf-8", "replace")) > SPEC_BYTES_MAX:
        raise RefusedError(f"spec: it has at most {SPEC_BYTES_MAX} bytes")
    try:
        spec = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"spec: it is not JSON: {error}"[:200]) from error
    found = _table("spec", spec, "cdiVersion", "kind", "annotations", "devices", "containerEdits")
    _text("spec.cdiVersion", found.get("cdiVersion"), VERSION, "a version as 0.6.0")
    _text("spec.kind", found.get("kind"), KIND, "gpupool.../class")
    _annotations("spec.annotations", found.get("annotations", {}))
    for device in _list("spec.devices", found.get("devices", [])):
        each = _table("spec.devices", device, "name", "annotations", "containerEdits")
        _text("spec.devices.name", each.get("name"), NAME, "a name")
        _annotations("spec.devices.annotations", each.get("annotations", {}))
        _edits(each.get("containerEdits", {}), mountable)
    _edits(found.get("containerEdits", {}), mountable)
    # Not as the peer wrote it: another reader might see something else in that.
    return json.dumps(found, indent=2, sort_keys=True) + "\n"


def _edits(value: Any, mountable: Mountable) -> None:
    edits = _table("spec.containerEdits", value, "env", "deviceNodes", "mounts")
    for variable in _list("spec.containerEdits.env", edits.get("env", [])):
        _text("spec.containerEdits.env", variable, VARIABLE, "NAME=value, not of the loader")
    for node in _list("spec.containerEdits.deviceNodes", edits.get("deviceNodes", [])):
        _device_node(node)
    for mount in _list("spec.containerEdits.mounts", edits.get("mounts", [])):
        _mount(mount, mountable)


def _device_node(value: Any) -> None:
    where = "spec.containerEdits.deviceNodes"
    node = _table(where, value, "path", "hostPath", "permissions", "type")
    _text(f"{where}.path", node.get("path"), DEVICE_NODE, "a GPU's or network adapter's node")
    host = node.get("hostPath", node.get("path"))
    _text(f"{where}.hostPath", host, DEVICE_NODE, "a GPU's or network adapter's node")
    if node.get("permissions", "rw") not in ("r", "rw", "rwm"):
        refuse(f"{where}.permissions", node["permissions"], "r, rw or rwm")
    if node.get("type", "c") != "c":
        refuse(f"{where}.type", node["type"], "c")


def _mount(value: Any, mountable: Mountable) -> None:
    where = "spec.containerEdits.mounts"
    mount = _table(where, value, "hostPath", "containerPath", "type", "options")
    host = _path(f"{where}.hostPath", mount.get("hostPath"))
    if not mountable.has(host):
        accepted = ", ".join([f"{mountable.mps_dir}/SLOT/pipe", *map(str, mountable.paths)])
        refuse(f"{where}.hostPath", str(host), f"one of {accepted}")
    _path(f"{where}.containerPath", mount.get("containerPath"))
    if mount.get("type", "bind") not in ("", "bind", "none"):
        refuse(f"{where}.type", mount["type"], "bind")
    for option in _list(f"{where}.options", mount.get("options", [])):
        if not isinstance(option, str) or option not in MOUNT_OPTIONS:
            refuse(f"{where}.options", option, f"one of {', '.join(sorted(MOUNT_OPTIONS))}")


def _path(where: str, value: Any) -> Path:
    text = _text(where, value, TEXT, "a path")
    if not text.startswith("/") or text.startswith("//") or posixpath.normpath(text) != text:
        refuse(where, text, "an absolute path without . and ..")
    return Path(text)


def _annotations(where: str, value: Any) -> None:
    if not is_table(value) or len(value) > ENTRIES_MAX:
        refuse(where, value, f"an object of at most {ENTRIES_MAX} texts")
    for name, text in value.items():
        _text(where, name, TEXT, "a text")
        _text(where, text, TEXT, "a text")


def _table(where: str, value: Any, *keys: str) -> dict[str, Any]:
    if not is_table(value) or not set(value) <= set(keys):
        refuse(where, value, f"an object with no keys but {', '.join(keys)}")
    return value


def _list(where: str, value: Any) -> list[Any]:
    if not is_list(value) or len(value) > ENTRIES_MAX:
        refuse(where, value, f"a list of at most {ENTRIES_MAX} entries")
    return value


def _text(where: str, value: Any, pattern: re.Pattern[str], accepted: str) -> str:
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        refuse(where, value, accepted)
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands in it twice")
    return found
