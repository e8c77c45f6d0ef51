"""The life of a download on the disk: a hidden sibling that outlives the process, swapped into place when it
is whole. Does not know where the bytes come from."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from localmoe.core.errors import DiskFullError, DownloadError, LocalMoeError
from localmoe.core.units import format_bytes
from localmoe.core.whole_file import sync_folder
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.disk import free_disk_bytes, is_full
from localmoe.hub.download_record import RECORD_FILE, DownloadRecord
from localmoe.hub.local_models import models_folder
from localmoe.hub.names import safe_name
from localmoe.hub.remote_files import RemoteFile, RemoteSnapshot
from localmoe.hub.unfinished import PENDING_FILE, Pending

_MARGIN_BYTES = 64 << 20  # that a download leaves free, for the file system and others


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn an operating system's refusal into a DownloadError."""
    try:
        yield
    except OSError as error:
        kind = DiskFullError if is_full(error) else DownloadError
        raise kind(
            f"Writing the download to {folder} failed ({error.strerror or error}); what has arrived is kept: "
            f"{'free some disk space' if is_full(error) else 'check that folder'} and pull again."
        ) from error


class DownloadFolder:
    """Where one repo's files are gathered (`path`) and where the model will lie (`target`).

    A file is NAME.DIGEST.part while it grows and NAME.DIGEST when it is checked, so that what a later commit
    changes is never taken for what it changes it to; it gets its plain name in `publish`.
    """

    def __init__(self, repo_id: str) -> None:
        self.repo_id = repo_id
        self.home = models_folder()
        self.name = safe_name(repo_id)
        self.target = self.home / self.name
        self.path = self.home / f".{self.name}.download"
        self._old = self.home / f".{self.name}.replaced"

    def part(self, file: RemoteFile) -> Path:
        """Where a file grows."""
        return self.path / f"{_key(file)}.part"

    def whole(self, file: RemoteFile) -> Path:
        """Where a checked file waits."""
        return self.path / _key(file)

    @property
    def is_begun(self) -> bool:
        """Whether something of an unfinished download, or of a swap that was cut short, is there."""
        return self.path.is_dir() or self._old.is_dir()

    def settle(self) -> None:
        """Undo a swap that was cut short, or end one: what it replaced is the model as long as there is no
        other, and rubbish afterwards."""
        if os.path.lexists(self.target):
            shutil.rmtree(self._old, ignore_errors=True)
        elif self._old.is_dir():
            self._old.rename(self.target)

    def is_published(self, snapshot: RemoteSnapshot, files: Sequence[RemoteFile]) -> bool:
        """Whether the model in place is this commit's and can be used, as far as that is seen without reading
        its weights: who is told to download a damaged one again has to get another one."""
        record = DownloadRecord.read(self.target)
        if record != DownloadRecord(self.repo_id, snapshot.commit):
            return False
        if not all(_is_right(self.target / file.name, file) for file in files):
            return False
        try:
            Checkpoint.open(self.target)
        except LocalMoeError:
            return False
        return True

    def prepare(self, files: Sequence[RemoteFile], revision: str | None = None) -> None:
        """Make the folder, keep what these files have there or in an older version of the model, remove the
        rest, and note what was asked for, so that lists can tell how far it is.

        Raises:
            DownloadError: `target` holds something that localmoe did not download.
        """
        self._check_target()
        self.path.mkdir(parents=True, exist_ok=True)
        for file in files:
            self._adopt(file)
        kept = {path.name for file in files for path in (self.part(file), self.whole(file))}
        self._keep(kept | {PENDING_FILE})
        Pending(self.repo_id, revision, sum(file.num_bytes for file in files)).write(self.path)

    def held_bytes(self, files: Sequence[RemoteFile]) -> dict[str, int]:
        """What is there already, in whole files and in parts, by name."""
        held = {}
        for file in files:
            size = max(_size(self.whole(file)), _size(self.part(file)), 0)
            held[file.name] = size if size <= file.num_bytes else 0
        return held

    def check_room(self, missing_bytes: int) -> None:
        """Raises DiskFullError: the disk does not hold what is still missing."""
        needed, free = missing_bytes + _MARGIN_BYTES, free_disk_bytes(self.path)
        if missing_bytes and free < needed:
            raise DiskFullError(
                f"{self.repo_id} needs {format_bytes(needed)} more of disk space and {self.home} has "
                f"{format_bytes(free)} free: free some, or set LOCALMOE_HOME to a folder on another disk."
            )

    def publish(self, snapshot: RemoteSnapshot, files: Sequence[RemoteFile]) -> Path:
        """Give the whole files their names, check that they are a model, and swap it in.

        Raises:
            DownloadError: the files are no usable model, though they are the Hub's.
        """
        for file in files:
            os.replace(self.whole(file), self.path / file.name)
        self._keep({file.name for file in files})
        try:
            Checkpoint.open(self.path)
        except LocalMoeError as error:
            raise DownloadError(
                f"{self.repo_id} is downloaded as the Hub has it, but is no usable model ({error}): choose "
                "another revision or repo."
            ) from error
        record = asdict(DownloadRecord(self.repo_id, snapshot.commit))
        with (self.path / RECORD_FILE).open("w", encoding="utf-8") as stream:
            json.dump(record, stream)
            stream.flush()
            os.fsync(stream.fileno())
        sync_folder(self.path)
        self._swap()
        sync_folder(self.home)
        shutil.rmtree(self._old, ignore_errors=True)  # what stays is removed by the next pull
        return self.target

    def discard(self) -> int:
        """Remove what an unfinished download left; returns the bytes freed."""
        if not self.path.is_dir():
            return 0
        freed = sum(max(_size(path), 0) for path in self.path.iterdir())
        shutil.rmtree(self.path)
        return freed

    def _check_target(self) -> None:
        if not os.path.lexists(self.target):
            return
        record = DownloadRecord.read(self.target)
        held = "" if record is None else record.repo_id
        if held != self.repo_id and held.lower() == self.repo_id.lower():  # the disk does not tell them apart
            raise DownloadError(
                f"{self.target} holds {held}: write the name in the same letters, or remove it."
            )
        if self.target.is_symlink() or record is None or record.repo_id != self.repo_id:
            raise DownloadError(
                f"{self.target} holds a model that was not downloaded from {self.repo_id} by localmoe, and "
                "is left as it is: move it elsewhere first."
            )

    def _adopt(self, file: RemoteFile) -> None:
        """Take over a file of the right size from a publication that was cut short, or from the version of
        the model that is in place; as a part, so that it is hashed before it counts."""
        part, named = self.part(file), self.path / file.name
        if _size(self.whole(file)) == file.num_bytes:
            return
        self.whole(file).unlink(missing_ok=True)
        if _size(named) == file.num_bytes:
            os.replace(named, part)
        elif not part.exists() and _size(self.target / file.name) == file.num_bytes:
            with suppress(OSError):  # no hard links here: it is downloaded again
                os.link(self.target / file.name, part)

    def _keep(self, names: Set[str]) -> None:
        """Remove all other files."""
        for path in list(self.path.iterdir()):
            if path.name not in names:
                path.unlink()

    def _swap(self) -> None:
        had_old = self.target.exists()
        if had_old:
            self.target.rename(self._old)
        try:
            self.path.rename(self.target)
        except OSError:
            if had_old:
                self._old.rename(self.target)
            raise


def _key(file: RemoteFile) -> str:
    return f"{file.name}.{file.digest[:16]}"


def _is_right(path: Path, file: RemoteFile) -> bool:
    """Whether it has the size, and unless it is of weights the checksum, of the Hub's."""
    if _size(path) != file.num_bytes:
        return False
    if file.name.endswith(".safetensors"):
        return True
    hasher = file.hasher()
    try:
        hasher.update(path.read_bytes())
    except OSError:
        return False
    return hasher.hexdigest() == file.digest


def _size(path: Path) -> int:
    """Of a regular file, not through a link; -1 for anything else."""
    try:
        return path.stat(follow_symlinks=False).st_size if path.is_file() else -1
    except OSError:
        return -1
