"""Pictures of chats on disk: one file each, named by the SHA-256 of its bytes, so that the same one is kept
once. Knows no chat."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from app.files import refused
from localmoe.core.errors import LocalMoeError
from localmoe.core.whole_file import write_whole
from localmoe.vision.image_file import check_image

MAX_PICTURES = 8  # of a message
UNSENT_S = 24 * 3600.0  # for so long a picture is kept that no chat has
_GONE = (
    "A picture of this chat is not on the disk any more: attach the same file again, which brings it back, "
    "or edit its message and remove it there."
)
_ID = re.compile(r"[0-9a-f]{64}")
_KINDS = (  # by how their files begin
    (b"\x89PNG", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"), (b"BM", "image/bmp"),
)  # fmt: skip


class PictureError(LocalMoeError):
    """A picture is not there, or the disk did not take it."""


def is_picture_id(value: object) -> bool:
    """Whether it is 64 hex digits; nothing else ever becomes a file name."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def picture_id(data: bytes) -> str:
    """The name of a picture with these bytes."""
    return hashlib.sha256(data).hexdigest()


def picture_kind(data: bytes) -> str:
    """Its media type."""
    return next((kind for begin, kind in _KINDS if data.startswith(begin)), "application/octet-stream")


class PictureStore:
    """The folder of pictures. Safe for several threads of one process."""

    def __init__(self, folder: Path) -> None:
        """The folder is made with the first picture."""
        self._folder = folder
        self._lock = threading.Lock()  # what is attached just now is not removed

    def keep(self, data: bytes) -> str:
        """Put a picture on the disk, if it is not there; its id.

        Raises:
            ConfigError: it is none that can be read.
            PictureError: the disk refuses.
        """
        check_image(data)
        found = picture_id(data)
        path = self._folder / found
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # as chats, for their owner alone
            with self._lock:
                if path.is_file() and path.read_bytes() == data:
                    os.utime(path)  # unsent for a day from now on
                    return found
            write_whole(path, data)
        except OSError as error:
            raise PictureError(refused("The picture could not be saved", self._folder, error)) from error
        return found

    def has(self, wanted: str) -> bool:
        """Whether there is a picture of this id."""
        return is_picture_id(wanted) and (self._folder / wanted).is_file()

    def read(self, wanted: str) -> bytes:
        """The bytes of a picture.

        Raises:
            PictureError: it is not there, or not as it was kept, or cannot be read.
        """
        data = self._read(wanted)
        if data is None:
            raise PictureError(_GONE)
        return data

    def read_all(self, wanted: Iterable[str]) -> dict[str, bytes]:
        """The bytes of those that are there, by id. Raises as `read` if one cannot be read."""
        found = {one: self._read(one) for one in dict.fromkeys(wanted)}
        return {one: data for one, data in found.items() if data is not None}

    def _read(self, wanted: str) -> bytes | None:
        if not self.has(wanted):
            return None
        try:
            data = (self._folder / wanted).read_bytes()
        except OSError as error:
            raise PictureError(
                f"A picture of this chat could not be read from {self._folder} ({error.strerror or error}): "
                "make it readable and try again."
            ) from error
        return data if picture_id(data) == wanted else None  # the disk has damaged it

    def check(self, wanted: Iterable[str]) -> None:
        """See that they are there.

        Raises:
            PictureError: one is not.
        """
        if not all(map(self.has, wanted)):
            raise PictureError(_GONE)

    def remove_sent(self, sent: Mapping[str, float]) -> None:
        """Remove pictures of a chat that is gone: id -> when it was sent last, in seconds since 1970. What
        was attached since then stays, as a message that is being written may have it."""
        for one, at in sent.items():
            path = self._folder / one
            with self._lock, contextlib.suppress(OSError):  # costs a little room
                if path.stat().st_mtime <= at:
                    path.unlink()

    def remove_unused(self, used: Collection[str] | None) -> None:
        """Remove pictures older than a day that are not `used` (None: nobody knows), and what a kill left
        half written. Nobody may be writing there."""
        oldest = time.time() - UNSENT_S
        for path in self._folder.glob("*"):
            unfinished = path.name.startswith(".") and path.name.endswith(".part")
            unused = used is not None and is_picture_id(path.name) and path.name not in used
            with contextlib.suppress(OSError):  # costs a little room
                if unfinished or (unused and path.stat().st_mtime < oldest):
                    path.unlink()
