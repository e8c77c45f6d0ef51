"""A file that grows piece by piece over several runs, hashed as it grows. Does not know where the pieces come
from, nor when they are enough."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import BinaryIO

from localmoe.hub.remote_files import RemoteFile

_READ_BYTES = 1 << 20


class PartFile:
    """The bytes of `file` that are in `path`; nothing is hashed or open before `resume`."""

    def __init__(self, file: RemoteFile, path: Path) -> None:
        self.file = file
        self.path = path
        self.size = 0
        self._hasher = file.hasher()
        self._stream: BinaryIO | None = None
        self._stopped = threading.Event()

    def hash_present(self) -> None:
        """Hash what an earlier run left; `stop` ends it early. Takes a second a gigabyte, so call it from a
        thread."""
        self.size, self._hasher = 0, self.file.hasher()
        try:
            if self.path.stat().st_size > self.file.num_bytes:
                self.path.unlink()
            stream = self.path.open("rb")
        except FileNotFoundError:
            return
        with stream:
            while not self._stopped.is_set() and (data := stream.read(_READ_BYTES)):
                self._hasher.update(data)
                self.size += len(data)

    def append(self, data: bytes) -> None:
        """Write and hash the next bytes."""
        if self._stream is None:
            # unbuffered: what was received is the system's, whatever becomes of this process
            self._stream = self.path.open("ab", buffering=0)
        view = memoryview(data)
        while view:
            view = view[self._stream.write(view) :]
        self._hasher.update(data)
        self.size += len(data)

    def restart(self) -> None:
        """Throw away what is there. The name gets a new file: the old one's bytes may be a link's."""
        self.close()
        self.path.unlink(missing_ok=True)
        self.size, self._hasher = 0, self.file.hasher()

    @property
    def is_right(self) -> bool:
        """Whether size and checksum are those of the Hub."""
        return self.size == self.file.num_bytes and self._hasher.hexdigest() == self.file.digest

    def sync(self) -> None:
        """Put the bytes on the disk, and close; blocks while the disk writes."""
        self.close()
        with self.path.open("ab") as stream:  # makes the file of an empty one
            os.fsync(stream.fileno())

    def stop(self) -> None:
        """Make a `hash_present` in another thread return, and close. The bytes stay."""
        self._stopped.set()
        self.close()

    def close(self) -> None:
        """The bytes stay; `append` opens again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
