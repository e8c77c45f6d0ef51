"""Writes a file so that under its name there is the old one or the whole new one, whatever happens. Knows
nothing of what it holds."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

# what disks answer that cannot put a folder's entries in order: network disks, folders that one may not list
_UNSYNCED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EPERM, errno.EBADF})


def write_whole(path: Path, data: bytes) -> None:
    """Write beside `path`, flush to the disk, then rename over it; nothing else is left behind.

    Raises:
        OSError: it cannot be written; a file of that name is as it was, or whole and new if it is only not
            certain to outlive a loss of power.
    """
    temporary = _beside(path)
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def check_writable(path: Path) -> None:
    """See that `write_whole` can write there: for what is written after hours of work.

    Raises:
        OSError: it cannot, as far as can be known before.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # a device or a pipe would be replaced by a file
        raise OSError(errno.EINVAL, "it is a device, not a file", str(path))
    temporary = _beside(path)
    try:
        temporary.open("xb").close()
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk, so that a rename outlives a loss of power. Where a disk has no such
    thing nothing is done (Windows needs none)."""
    if os.name == "nt":
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _UNSYNCED:
            raise


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
