"""Files and directories that the helper makes. All names are its own, below its settings."""

import contextlib
import errno
import os
import pwd
import shutil
import struct
from pathlib import Path

from gpupool_agent.helper.checks import LEASE_ID
from gpupool_agent.helper.refusal import FailedError

CDI_PREFIX = "gpupool-"
CDI_SUFFIX = ".json"

_ACL = "system.posix_acl_access"
_ACL_VERSION = 2
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NOBODY = 0xFFFFFFFF
"""Tags of an access control list in an extended attribute, <linux/posix_acl_xattr.h>."""


class CdiFiles:
    """The CDI specs of leases in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, lease_id: str, spec: str) -> None:
        """Write a spec; whoever reads sees all of it or nothing."""
        try:
            make_directory(self._directory, 0o755)
            write_file(self._file(lease_id), spec, 0o644)
        except OSError as error:
            raise FailedError(f"the CDI spec cannot be written: {error.strerror}") from error

    def remove(self, lease_id: str) -> None:
        """Remove a spec; nothing where there is none."""
        try:
            self._file(lease_id).unlink(missing_ok=True)
        except OSError as error:
            raise FailedError(f"the CDI spec cannot be removed: {error.strerror}") from error

    def sweep(self) -> None:
        """Remove what a helper that was killed had half written. FailedError."""
        try:
            for each in self._directory.glob(f".{CDI_PREFIX}*.new"):
                each.unlink(missing_ok=True)
        except OSError as error:
            raise FailedError(f"half a CDI spec stays: {error.strerror}") from error

    def leases(self) -> list[str]:
        """Leases that have one."""
        names = (
            each.name.removeprefix(CDI_PREFIX).removesuffix(CDI_SUFFIX)
            for each in self._directory.glob(f"{CDI_PREFIX}*{CDI_SUFFIX}")
        )
        return sorted(name for name in names if LEASE_ID.fullmatch(name))

    def _file(self, lease_id: str) -> Path:
        return self._directory / f"{CDI_PREFIX}{lease_id}{CDI_SUFFIX}"


def make_directory(directory: Path, mode: int) -> None:
    """Make a directory with this very mode, whatever the umask; one that is there stays."""
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        return
    directory.chmod(mode)


def write_file(file: Path, text: str, mode: int) -> None:
    """Replace a file as a whole; a name that begins with a dot is no spec and no record."""
    beside = file.with_name(f".{file.name}.new")
    beside.unlink(missing_ok=True)
    opened = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(opened, "w", encoding="utf-8") as written:
        os.fchmod(opened, mode)
        written.write(text)
    beside.replace(file)


def make_for_user(directory: Path, uid: int) -> None:
    """Make a directory of root's that one user may go into, and nobody else.

    It stays root's: what is in there tells root where to send commands. OSError.
    """
    directory.mkdir(mode=0o700)
    directory.chmod(0o700)
    if uid == 0:
        return
    entries = (
        (_OWNER, 7, _NOBODY),
        (_USER, 5, uid),
        (_GROUP, 0, _NOBODY),
        (_MASK, 5, _NOBODY),
        (_OTHER, 0, _NOBODY),
    )
    value = struct.pack("<I", _ACL_VERSION) + b"".join(
        struct.pack("<HHI", *each) for each in entries
    )
    try:
        os.setxattr(directory, _ACL, value)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        # A file system without access control lists: the user's own group, then.
        os.chown(directory, 0, pwd.getpwuid(uid).pw_gid)
        directory.chmod(0o750)


def remove_tree(directory: Path) -> None:
    """Remove a directory with all in it; nothing where there is none. OSError."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory)
