"""What the Hub says of a repo's files: names, sizes, checksums. Asks nobody and reads no file."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal, Protocol

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][\w.+ -]{0,199}", re.ASCII)


class Hasher(Protocol):
    """The part of a hashlib object that is needed here."""

    def update(self, data: bytes, /) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """The digest of what was added."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of one commit.

    Attributes:
        name: relative to the repo; "/" separates folders.
        digest: lower-case hexadecimal.
        kind: sha256 of the content for what the Hub stores as large files; for the rest git's id of a blob,
            SHA-1 of "blob SIZE\\0" and the content (Git Internals, "Git Objects").
    """

    name: str
    num_bytes: int
    digest: str
    kind: Literal["sha256", "git"]

    @property
    def is_plain(self) -> bool:
        """Whether the name is a plain one of the repo's root folder, safe on any file system."""
        return _PLAIN_NAME.fullmatch(self.name) is not None and not self.name.endswith((".", " "))

    def hasher(self) -> Hasher:
        """A new hash object whose digest over the whole content has to be `digest`."""
        if self.kind == "sha256":
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.num_bytes, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class RemoteSnapshot:
    """All files of a repo at one commit."""

    repo_id: str
    commit: str
    files: tuple[RemoteFile, ...]

    def find(self, name: str) -> RemoteFile | None:
        """The file of this name."""
        return next((file for file in self.files if file.name == name), None)
