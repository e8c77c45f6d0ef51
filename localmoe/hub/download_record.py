"""Which revision of which repo a model folder holds, as far as the folder tells. Does not ask the Hub, and
writes nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RECORD_FILE = "localmoe_download.json"


@dataclass(frozen=True, slots=True)
class DownloadRecord:
    """What RECORD_FILE says of a model: the repo and the commit hash that it was downloaded from."""

    repo_id: str
    revision: str

    @classmethod
    def read(cls, folder: Path) -> DownloadRecord | None:
        """None: this folder was not downloaded by localmoe, or the record is damaged."""
        try:
            values = json.loads((folder / RECORD_FILE).read_text("utf-8"))
            return cls(str(values["repo_id"]), str(values["revision"]))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None


def snapshot_revision(folder: Path) -> str:
    """The Hub revision of a model folder that localmoe downloaded, or that is in the Hugging Face cache
    (REPO/snapshots/REVISION); "" of any other."""
    record = DownloadRecord.read(folder)
    if record is not None:
        return record.revision
    return folder.name if folder.parent.name == "snapshots" else ""
