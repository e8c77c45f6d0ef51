"""Writes a file so that under its name there is the old one or the whole new one, whatever happens. Knows
nothing of what it holds."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write beside `path`, flush to the disk, then rename over it; nothing else is left behind.

    Raises:
        OSError: it cannot be written; a file of that name is as it was.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
