"""Reads files that a user names, up to a sensible size: a device, a pipe that never ends, or a wrong file of
50 GB would fill the memory. Knows nothing of what they hold."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

from localmoe.core.units import format_bytes

_PIECE = 1 << 20


def read_bounded(path: Path, most: int, begins: bytes = b"") -> bytes:
    """All of a file of at most `most` bytes.

    Args:
        begins: with what such files begin; a device or a pipe that does not is read no further.

    Raises:
        OSError: it cannot be read, or is larger; `strerror` says which.
    """
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size  # 0 of devices and pipes
        if size <= most:
            pieces = [stream.read(max(_PIECE, size))]
            if not pieces[0].startswith(begins):
                return pieces[0]
            size = len(pieces[0])
            while size <= most and (piece := stream.read(_PIECE)):
                pieces.append(piece)
                size += len(piece)
            if size <= most:
                return b"".join(pieces)
    raise OSError(errno.EFBIG, f"it has more than {format_bytes(most)}", str(path))


def read_text_bounded(path: Path, most: int) -> str:
    """The text of such a file in UTF-8, with or without a mark at its beginning, its ends of lines as Python
    reads them.

    Raises:
        OSError: as `read_bounded`. UnicodeDecodeError: it is no text.
    """
    return io.StringIO(read_bounded(path, most).decode("utf-8-sig"), newline=None).read()
