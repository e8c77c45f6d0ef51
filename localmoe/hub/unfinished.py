"""Downloads that were begun and are not whole: which, and how far. Downloads nothing."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from localmoe.hub.download_record import DownloadRecord
from localmoe.hub.hf_cache import folder_names
from localmoe.hub.names import is_repo_id, repo_id_of, safe_name

PENDING_FILE = "localmoe_pending.json"
_SUFFIX = ".download"


@dataclass(frozen=True, slots=True)
class Pending:
    """What PENDING_FILE says of a download: what was asked for, and the size of it all."""

    repo_id: str
    revision: str | None
    total_bytes: int

    def write(self, folder: Path) -> None:
        """Replace the file whole."""
        temporary = folder / f"{PENDING_FILE}.{secrets.token_hex(4)}.tmp"
        try:
            with temporary.open("w", encoding="utf-8") as stream:
                json.dump(asdict(self), stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, folder / PENDING_FILE)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path) -> Pending | None:
        """None: an older version began this download, or the file is damaged."""
        try:
            values = json.loads((folder / PENDING_FILE).read_text("utf-8"))
            revision = values["revision"]
            pending = cls(str(values["repo_id"]), None if revision is None else str(revision), 0)
            return cls(pending.repo_id, pending.revision, max(0, int(values["total_bytes"])))
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None


@dataclass(frozen=True, slots=True)
class UnfinishedDownload:
    """held_bytes: on the disk; total_bytes: of the whole model, None if it is not known."""

    repo_id: str
    revision: str | None
    folder: Path
    held_bytes: int
    total_bytes: int | None


def list_unfinished(models_folder: Path) -> list[UnfinishedDownload]:
    """In name order; folders whose names lead to no repo are left out."""
    found = []
    for name in folder_names(models_folder):
        if not (name.startswith(".") and name.endswith(_SUFFIX)):
            continue
        folder = models_folder / name
        pending = Pending.read(folder)
        bare = name[1 : -len(_SUFFIX)]
        repo_id = pending.repo_id if pending is not None else repo_id_of(bare)
        if not is_repo_id(repo_id) or safe_name(repo_id) != bare:
            continue
        revision, total = (None, None) if pending is None else (pending.revision, pending.total_bytes)
        found.append(UnfinishedDownload(repo_id, revision, folder, _held_bytes(folder), total))
    return found


def missing_bytes(models_folder: Path, source: DownloadRecord, num_bytes: int) -> int:
    """What a download of so many bytes has still to write, by the sizes of what is here: nothing where this
    very revision is."""
    if DownloadRecord.read(models_folder / safe_name(source.repo_id)) == source:
        return 0
    found = list_unfinished(models_folder)
    return max(0, num_bytes - sum(one.held_bytes for one in found if one.repo_id == source.repo_id))


def _held_bytes(folder: Path) -> int:
    held = 0
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):  # renamed meanwhile, as a download runs
                held += entry.stat(follow_symlinks=False).st_size if entry.is_file() else 0
    return held
