"""Tells whether a path still leads to the file that was read before: a pull swaps a model's folder, also
under a load. Does not decide which files are read, nor when.

A file is known by its size and the time of its last change. Inode and device numbers are left out: FAT,
exFAT and many network drives give a closed file new ones, so that it would seem to be another in the middle
of a load; and two downloads do not end at one moment.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path

from localmoe.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class FileVersion:
    """What a file was when it was opened. `modified_ns`: nanoseconds, as the file system rounds them."""

    num_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> FileVersion:
        """Of an open file: a path may lead elsewhere by now."""
        found = os.fstat(descriptor)
        return cls(found.st_size, found.st_mtime_ns)


def open_again(file: Path, version: FileVersion) -> io.FileIO:
    """The file, open to read, known to be of this version; its bytes stay those even if the path is given
    to another file.

    Raises:
        CheckpointError: it is another one.
        OSError: it cannot be opened.
    """
    stream = io.FileIO(file, "r")
    try:
        if FileVersion.of(stream.fileno()) != version:
            raise CheckpointError(
                f"Weight file {file} has changed since it was opened: load the model again."
            )
    except BaseException:
        stream.close()
        raise
    return stream
