"""What all that fills a folder asks of the disk. Writes no file."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path


def free_disk_bytes(folder: Path) -> int:
    """Bytes that this user may still write below `folder`."""
    return shutil.disk_usage(folder).free


def is_full(error: OSError) -> bool:
    """Whether the disk, or the user's share of it, has no room left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
