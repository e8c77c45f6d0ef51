"""A file that is written whole: what is on the disk when, and what is refused before anything is written."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from app.files import write_json
from localmoe.core.whole_file import check_writable, sync_folder, write_whole
from localmoe.hub.token import save_token
from localmoe.quant.shard_writer import write_synced

needs_folders = pytest.mark.skipif(os.name == "nt", reason="Windows syncs no folders")


@needs_folders
@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_whole(path, b"new"),
        lambda path: write_json(path, "new"),
        lambda path: write_synced(path, b"new"),
        lambda path: save_token("hf_" + "x" * 30),
    ],
)
def test_the_rename_is_put_on_the_disk_after_the_file(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def renamed(source: Any, target: Any) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(os, "replace", renamed)
    write(tmp_path / "chat.json")
    assert done == ["file", "rename", "folder"]


@needs_folders
def test_a_disk_that_syncs_no_folders_keeps_the_file_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync
    answer = errno.EINVAL

    def refuse(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(answer, os.strerror(answer))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    write_whole(tmp_path / "a", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    answer = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        sync_folder(tmp_path)


def test_what_can_be_written_is_told_before_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"old")
    check_writable(tmp_path / "there")
    check_writable(tmp_path / "new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("there", b"old")]


def test_what_cannot_be_written_is_told_before(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent" / "a", tmp_path / ("a" * 250), Path(os.devnull)):
        with pytest.raises(OSError):
            check_writable(path)
    assert list(tmp_path.iterdir()) == []
