"""The real programs that tests run beside our own, from the system's package manager.

Only what tests of this release use. Each one is optional: without it the tests
that need it are skipped, and scripts/test says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class SystemPart:
    """A program, its Debian package, and what is not tested without it."""

    program: str
    package: str
    skipped_without: str


PARTS = (
    SystemPart(
        program="promtool",
        package="prometheus",
        skipped_without="that Prometheus accepts /metrics",
    ),
    SystemPart(
        program="systemd-nspawn",
        package="systemd-container",
        skipped_without="the services under a systemd that was booted for real",
    ),
    SystemPart(
        program="strace",
        package="strace",
        skipped_without="the store killed at each write, and that it syncs before it answers",
    ),
)

_POLICY = Path("/usr/sbin/policy-rc.d")


def ensure_system_parts() -> None:
    """Installs what is missing where that is allowed, and says what stays missing."""
    missing = [part for part in PARTS if shutil.which(part.program) is None]
    if missing and _may_install():
        packages = [part.package for part in missing]
        print(f"installing {', '.join(packages)}", flush=True)
        with _no_services_started():
            failure = _apt("update", "-qq") or _apt(
                "install", "-y", "-qq", "--no-install-recommends", *packages
            )
        if failure:
            print(f"apt-get failed: {failure}", flush=True)
    for part in missing:
        if shutil.which(part.program) is None:
            print(
                f"skipped: {part.skipped_without} ({part.program} is missing; "
                f"install it with: sudo apt-get install {part.package})",
                flush=True,
            )


def _may_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def _apt(*arguments: str) -> str:
    """Runs apt-get; returns the last line it complained with, or nothing."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        ["apt-get", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


@contextmanager
def _no_services_started() -> Iterator[None]:
    """Keeps packages from starting servers: tests start their own, on loopback."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()
