"""One entry of the download queue, and the file that keeps the queue over a restart. Downloads nothing."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from app.files import left_aside, newer_schema, set_aside, unknown_fields, write_json
from app.unicode_text import whole_unicode
from localmoe.hub.names import is_repo_id

SCHEMA = 2  # since 2: from_disk
State = Literal["queued", "running", "paused", "failed", "cancelled", "done"]
Role = Literal["model", "draft"]
_STATES = ("queued", "running", "paused", "failed", "cancelled", "done")
_NOT_KEPT = ("rate", "seconds_left")


@dataclass(frozen=True, slots=True)
class Download:
    """A repo to bring here.

    Attributes:
        role: "draft": a ready-made GPTQ checkpoint for the model `for_model`.
        then_chat: load it when it is here, and open the chat.
        draft: which draft it is loaded with: "background", "instant", or a folder.
        from_disk: whether with experts on the disk.
        done_bytes, total_bytes: when last told; the disk knows better.
        error_kind: class of the error, which says what ways on there are.
        rate, seconds_left: while it runs, for people.
    """

    id: str
    repo_id: str
    revision: str | None = None
    state: State = "queued"
    role: Role = "model"
    for_model: str = ""
    then_chat: bool = False
    draft: str = "background"
    from_disk: bool = False
    done_bytes: int = 0
    total_bytes: int = 0
    error_kind: str = ""
    error: str = ""
    rate: str = ""
    seconds_left: float | None = None


_KNOWN = frozenset(field.name for field in fields(Download))


def new_id() -> str:
    """Of an entry."""
    return secrets.token_hex(8)


class QueueFile:
    """Reads and writes the queue; `report` is a sentence if it could not be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.report = ""
        self._schema = SCHEMA
        self._others: dict[str, object] = {}  # a newer version's fields
        self._unknown: dict[str, dict[str, object]] = {}  # and those of entries, by id

    def read(self) -> list[Download]:
        """The queue as it was kept; what ran goes on."""
        if not self._path.exists():
            if (kept := left_aside(self._path)) is not None:
                self._say_unread(kept)
            return []
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            unknown = [unknown_fields(values, _KNOWN) for values in data["downloads"]]
            if newer_schema(data, SCHEMA) == SCHEMA and any(unknown):
                raise ValueError("a field that no download of this version has")
            found = [_entry({n: v for n, v in values.items() if n in _KNOWN}) for values in data["downloads"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._say_unread(set_aside(self._path))
            return []
        self._schema = newer_schema(data, SCHEMA)
        self._others = unknown_fields(data, ("schema", "downloads"))
        self._unknown = {one.id: rest for one, rest in zip(found, unknown, strict=True)}
        return found

    def _say_unread(self, kept: Path) -> None:
        self.report = f"The download queue could not be read, so it is empty; kept as {kept.name}."

    def write(self, downloads: Sequence[Download]) -> None:
        """Replace the file whole."""
        entries = [asdict(download) for download in downloads if download.state != "done"]
        for entry in entries:
            for name in _NOT_KEPT:
                del entry[name]
        entries = [{**entry, **self._unknown.get(entry["id"], {})} for entry in entries]
        write_json(self._path, {"schema": self._schema, "downloads": entries, **self._others})


def _entry(values: dict[str, Any]) -> Download:
    download = Download(**values)
    texts = (
        download.id, download.repo_id, download.for_model, download.draft, download.error_kind,
        download.error, download.revision or "",
    )  # fmt: skip
    numbers = (download.done_bytes, download.total_bytes)
    if not all(isinstance(text, str) and whole_unicode(text) == text for text in texts) or not all(
        type(n) is int for n in numbers
    ):
        raise ValueError("a value of another type")
    if not is_repo_id(download.repo_id) or download.state not in _STATES or not download.id.isalnum():
        raise ValueError("no download")
    if download.role not in ("model", "draft") or not isinstance(download.revision, str | None):
        raise ValueError("no download")
    if not isinstance(download.then_chat, bool) or not isinstance(download.from_disk, bool):
        raise ValueError("no download")
    return download
