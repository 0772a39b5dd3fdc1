"""Trees below /sys for tests: made by hand, or real ones from the shared data."""

import json
from collections.abc import Mapping
from pathlib import Path


def write_tree(root: Path, files: Mapping[str, str]) -> None:
    """Writes files by their path below ``root``."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def real_tree(root: Path, recording: Path) -> Path:
    """Writes a real host's tree below ``root``; where its /sys is."""
    found: dict[str, str] = json.loads(recording.read_text())
    files = {path: text.strip() for path, text in found.items() if isinstance(text, str)}
    write_tree(root, files)
    adapters = root / "sys/class/infiniband"
    adapters.mkdir(parents=True, exist_ok=True)
    for adapter in sorted((root / "sys/bus/pci/devices").glob("*/infiniband/*")):
        # The class is links to where the devices are; the recordings lack them.
        (adapters / adapter.name).symlink_to(adapter)
        if not (adapter / "device").exists():
            (adapter / "device").symlink_to(adapter.parents[1])
    return root / "sys"


def port_files(adapter: str, port: int = 1, **files: str) -> dict[str, str]:
    """Files of a healthy InfiniBand port, with these instead or beside them."""
    usual = {
        "state": "4: ACTIVE",
        "phys_state": "5: LinkUp",
        "rate": "400 Gb/sec (4X NDR)",
        "lid": "0x2f",
        "sm_lid": "0x1",
        "link_layer": "InfiniBand",
        "gids/0": "fe80:0000:0000:0000:b83f:d203:0012:3456",
    }
    base = f"class/infiniband/{adapter}/ports/{port}"
    return {f"{base}/{name.replace('__', '/')}": text for name, text in (usual | files).items()}
