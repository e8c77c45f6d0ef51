"""Small JSON files on disk, replaced whole or not at all. Knows nothing of what they hold."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from localmoe.core.whole_file import sync_folder
from localmoe.hub.disk import is_full


def write_json(path: Path, value: object, *, compact: bool = False) -> None:
    """Write beside `path`, flush to the disk, then rename over it; readable by the owner alone. compact: on
    one line, which takes a small part of the time (json indents in Python, not in C)."""
    text = json.dumps(value, ensure_ascii=False, indent=None if compact else 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)  # else a loss of power may take the rename back
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def unknown_fields(values: Mapping[str, object], known: Iterable[str]) -> dict[str, object]:
    """What a newer version has written beside the fields that this one knows, to be written back; but for
    what JSON can say and no file can hold."""
    names = set(known)
    found = {}
    for name, value in values.items():
        if name in names:
            continue
        with contextlib.suppress(ValueError, RecursionError):  # no Unicode, or too deep
            json.dumps({name: value}, ensure_ascii=False, indent=1).encode()
            found[name] = value
    return found


def newer_schema(values: Mapping[str, object], schema: int) -> int:
    """Of a file that is written back: it stays a newer version's."""
    found = values.get("schema")
    return max(schema, found) if type(found) is int and found < 1 << 31 else schema


def remove_unfinished(folder: Path) -> None:
    """Remove what writes into this folder left that a kill cut short: whole texts, also of what was deleted
    since. Nobody may be writing there."""
    for path in folder.glob(".*.json.*.tmp"):
        with contextlib.suppress(OSError):  # costs a little room
            path.unlink()


def refused(what: str, folder: Path, error: OSError) -> str:
    """The sentence on what the disk refuses, e.g. what="The chat could not be saved", with the remedy."""
    remedy = "make room there" if is_full(error) else "make it writable"
    return f"{what} in {folder} ({error.strerror or error}): {remedy} and try again."


def set_aside(path: Path) -> Path:
    """Rename a file that cannot be read so that nothing overwrites it; its new path."""
    kept = _damaged_name(path)
    os.replace(path, kept)
    return kept


def copy_aside(path: Path) -> Path:
    """The same for a file in whose place another one is written: until then it keeps its name, and the next
    start finds it there if this one is killed."""
    kept = _damaged_name(path)
    try:
        os.link(path, kept)
    except OSError:  # a disk without hard links
        shutil.copy2(path, kept)
    return kept


def left_aside(path: Path) -> Path | None:
    """The file that was set aside last, if nothing was written in its place since: who set it aside may have
    been killed before anybody read of it."""
    if path.exists():
        return None
    found = path.parent.glob(f"{path.name}.*.damaged")
    return max(found, key=lambda kept: kept.stat().st_ctime, default=None)


def _damaged_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(3)}.damaged")
