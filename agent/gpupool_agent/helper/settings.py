"""The helper's settings: a TOML file, then GPUPOOL_HELPER_* in the environment, then flags."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpupool_agent.helper.cdi import Mountable
from gpupool_agent.helper.checks import UID_MAX, Policy
from gpupool_agent.settings import SOCKET_PATH_BYTES_MAX, check, read_values

ENVIRONMENT_PREFIX = "GPUPOOL_HELPER_"
RUN_DIR = Path("/run/gpupool-helper")
SOCKET = RUN_DIR / "helper.sock"
MPS_DIR = Path("/run/gpupool-mps")
SUPERVISORS = ("auto", "systemd", "session")

MPS_DIR_BYTES_MAX = SOCKET_PATH_BYTES_MAX - len("/01234567/pipe/control_privileged")
"""Sockets of the daemons lie so much deeper."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"text": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperSettings:
    """Everything that can be set, validated as a whole when it is made; SettingsError."""

    socket: Path = field(default=SOCKET, metadata={"text": "Unix socket that the agent asks on."})
    socket_group: str = _setting(
        "gpupool", "Group that may open the socket, by name or number. Empty: root's."
    )
    agent_user: str = _setting(
        "gpupool", "The one user besides root who is answered, by name or number."
    )
    run_dir: Path = field(
        default=RUN_DIR,
        metadata={"text": "What the helper knows of its MPS daemons; must outlive its restarts."},
    )
    mps_dir: Path = field(
        default=MPS_DIR,
        metadata={
            "text": "Pipe and log directories of MPS daemons; short, since sockets live in them."
        },
    )
    mps_supervisor: str = _setting(
        "auto",
        "Who keeps MPS daemons: systemd (gpupool-mps@.service), session (a session of their"
        " own), or auto: systemd where it runs.",
    )
    mps_control: str = _setting(
        "nvidia-cuda-mps-control", "MPS's control program, by name or path."
    )
    probe_program: tuple[str, ...] = _setting(
        (), "Program and arguments that try a slice as its user. Empty: the pool's own."
    )
    smi_program: str = _setting("nvidia-smi", "Program that resets GPUs, by name or path.")
    cdi_dir: Path = field(
        default=Path("/run/cdi"), metadata={"text": "Where CDI specs of leases are written."}
    )
    cdi_mounts: tuple[str, ...] = _setting(
        ("/dev/shm",),  # noqa: S108 - CUDA's clients and their MPS server share memory there
        "Host paths that a CDI spec may mount, besides the pipes in mps_dir.",
    )
    pci_rescan_file: Path = field(
        default=Path("/sys/bus/pci/rescan"),
        metadata={"text": "Where the kernel is told to look for devices."},
    )
    uid_min: int = _setting(1000, "Lowest uid that slices and probes may have (1..4294967294).")
    uid_max: int = field(
        default=UID_MAX, metadata={"text": "Highest uid that they may have (1..4294967294)."}
    )
    allow_root: bool = _setting(False, "Let root have slices and probes.")
    driver_deadline_s: float = _setting(
        10.0, "A driver call that takes longer counts as hung, in seconds (0.1..600)."
    )
    command_deadline_s: float = _setting(
        15.0, "Longest time of MPS commands and of systemctl, in seconds (0.1..600)."
    )
    start_deadline_s: float = _setting(
        10.0, "Longest time of an MPS daemon to its start, in seconds (0.1..600)."
    )
    stop_deadline_s: float = _setting(
        10.0, "Time that an MPS daemon has to end before it is killed, in seconds (0.1..600)."
    )
    reset_deadline_s: float = _setting(
        60.0, "Longest time of a GPU's reset, in seconds (0.1..600)."
    )
    connections_max: int = _setting(16, "Connections at a time (1..1024).")
    requests_max: int = _setting(64, "Actions at a time (1..1024).")

    def __post_init__(self) -> None:
        for key in ("socket", "run_dir", "mps_dir", "cdi_dir", "pci_rescan_file"):
            path: Path = getattr(self, key)
            good = str(path).startswith("/") and ".." not in path.parts
            check(good, key, path, "an absolute path without ..")
        check(
            len(os.fsencode(self.socket)) <= SOCKET_PATH_BYTES_MAX,
            "socket",
            self.socket,
            f"a path of at most {SOCKET_PATH_BYTES_MAX} bytes",
        )
        check(
            len(os.fsencode(self.mps_dir)) <= MPS_DIR_BYTES_MAX,
            "mps_dir",
            self.mps_dir,
            f"a path of at most {MPS_DIR_BYTES_MAX} bytes",
        )
        check(
            self.mps_supervisor in SUPERVISORS,
            "mps_supervisor",
            self.mps_supervisor,
            f"one of {', '.join(SUPERVISORS)}",
        )
        for key in ("agent_user", "mps_control", "smi_program"):
            check(bool(getattr(self, key)), key, "", "a name")
        for key in ("uid_min", "uid_max"):
            check(1 <= getattr(self, key) <= UID_MAX, key, getattr(self, key), f"1..{UID_MAX}")
        check(self.uid_min <= self.uid_max, "uid_max", self.uid_max, "at least uid_min")
        for key in ("driver", "command", "start", "stop", "reset"):
            name = f"{key}_deadline_s"
            check(0.1 <= getattr(self, name) <= 600, name, getattr(self, name), "0.1..600")
        for key in ("connections_max", "requests_max"):
            check(1 <= getattr(self, key) <= 1024, key, getattr(self, key), "1..1024")

    def policy(self) -> Policy:
        """What is permitted of what may be asked for."""
        return Policy(
            uid_min=self.uid_min,
            uid_max=self.uid_max,
            allow_root=self.allow_root,
            mountable=Mountable(
                mps_dir=self.mps_dir, paths=tuple(Path(each) for each in self.cdi_mounts)
            ),
        )


def load_settings(
    path: Path | None, environment: Mapping[str, str], flags: Mapping[str, str]
) -> HelperSettings:
    """Read the settings in their order; a later one replaces an earlier one.

    ``flags`` are texts by the setting's name. Raises SettingsError.
    """
    return HelperSettings(
        **read_values(HelperSettings, ENVIRONMENT_PREFIX, path, environment, flags)
    )
