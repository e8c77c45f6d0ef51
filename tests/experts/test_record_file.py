"""A file of all expert records is there whole or not at all, and is taken for no other weights' or form's."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from localmoe.core.errors import DiskError
from localmoe.experts import record_file
from localmoe.experts.record_file import RecordFile
from localmoe.experts.records import RecordLayout
from localmoe.hub.draft_places import record_files
from localmoe.hub.process_marks import own_mark
from localmoe.hub.unfinished_records import remove_leftovers
from localmoe.kernels.weight_forms import WeightForm

SMALL, LARGE = RecordLayout((6, 4), (4, 3), False), RecordLayout((96, 64), (64, 48), False)
LAYERS = (SMALL, LARGE, SMALL)
TILED = RecordLayout((256, 128), (128, 128), False)


def file_in(folder: Path, **changes: object) -> RecordFile:
    file = RecordFile.in_folder(folder, LAYERS, 3, torch.float32, "some weights")
    return replace(file, **changes)  # type: ignore[arg-type]


def content(file: RecordFile, layer: int) -> bytes:
    """Of a layer, which tells it and each of its experts apart."""
    stride = file.stride(layer)
    return b"".join(bytes([16 * layer + expert + 1]) * stride for expert in range(file.num_experts))


def write(file: RecordFile, layers: int = len(LAYERS)) -> None:
    with file.written(lambda done: None) as memory:
        for layer in range(layers):
            memory(len(content(file, layer)))[:] = content(file, layer)


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_every_record_is_where_the_file_says_and_begins_with_a_page(tmp_path: Path) -> None:
    file = file_in(tmp_path / "a" / "b")
    assert not file.is_whole()
    write(file)
    assert file.is_whole() and names_in(file.path.parent) == [file.path.name]
    whole = file.path.read_bytes()
    assert len(whole) == file.num_bytes
    for layer in range(len(LAYERS)):
        stride = file.stride(layer)
        assert stride >= LAYERS[layer].num_bytes(torch.float32) and stride % 4096 == 0
        for expert in range(3):
            offset = file.offset(layer, expert)
            assert offset % 4096 == 0
            assert whole[offset : offset + stride] == bytes([16 * layer + expert + 1]) * stride


def test_what_is_told_is_every_byte_of_the_layers_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "_SYNCED_BYTES", 1 << 14)
    file, told = file_in(tmp_path), []
    with file.written(told.append) as memory:
        for layer in range(len(LAYERS)):
            memory(3 * file.stride(layer))
    total = sum(3 * file.stride(layer) for layer in range(len(LAYERS)))
    assert told[0] == 0 and told == sorted(set(told)) and len(told) > len(LAYERS) and told[-1] < total


@pytest.mark.parametrize(
    "change",
    [
        {"origin": "other weights"},
        {"num_experts": 4},
        {"dtype": torch.bfloat16},
        {"layouts": (SMALL, LARGE)},
        {"layouts": (SMALL, LARGE, LARGE)},
        {"layouts": (SMALL, SMALL, LARGE)},  # as many bytes
        {"layouts": (SMALL, replace(LARGE, transposed=True), SMALL)},
        {"layouts": (RecordLayout((4, 6), (3, 4), True), LARGE, SMALL)},
    ],
    ids=lambda change: "-".join(change),
)
def test_other_weights_or_another_form_are_not_taken_for_these(
    tmp_path: Path, change: dict[str, object]
) -> None:
    file = file_in(tmp_path)
    write(file)
    assert not replace(file, **change).is_whole()  # type: ignore[arg-type]
    assert file.is_whole()


def test_each_form_and_dtype_of_a_model_has_a_file_of_its_own(tmp_path: Path) -> None:
    forms = [replace(TILED, form=form) for form in WeightForm]
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    files = [RecordFile.in_folder(tmp_path, [form], 2, dtype, "x") for form in forms for dtype in dtypes]
    assert len({file.path for file in files}) == len(files)
    heads = [replace(file, path=files[0].path).head for file in files]
    assert len(set(heads)) == len(files) and {len(head) for head in heads} == {4096}


@pytest.mark.parametrize("form", list(WeightForm), ids=lambda form: form.value)
def test_the_file_of_any_form_is_found_among_what_was_made_of_a_model(
    form: WeightForm, tmp_path: Path
) -> None:
    """By which it is counted and deleted."""
    file = RecordFile.in_folder(tmp_path, [replace(TILED, form=form)], 3, torch.bfloat16, "some weights")
    file.path.write_bytes(b"some")
    assert record_files(tmp_path) == {file.path: 4}


@pytest.mark.parametrize("length", [0, 1, 4096, -4096, -1, +1, +4096])
def test_a_file_of_another_length_is_not_whole(tmp_path: Path, length: int) -> None:
    file = file_in(tmp_path)
    write(file)
    os.truncate(file.path, length if length >= 0 and length in (0, 4096) else file.num_bytes + length)
    assert not file.is_whole()
    write(file)
    assert file.is_whole()


def test_a_damaged_head_or_a_folder_of_that_name_is_no_file(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    write(file)
    with file.path.open("r+b") as stream:
        stream.write(b"[")
    assert not file.is_whole()
    file.path.unlink()
    file.path.mkdir()
    assert not file.is_whole()
    with pytest.raises(DiskError, match="cannot be written"):
        write(file)
    assert names_in(tmp_path) == [file.path.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, MemoryError])
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_an_error_in_the_middle_leaves_nothing(
    tmp_path: Path, error: type[BaseException], layers: int
) -> None:
    file = file_in(tmp_path)
    with pytest.raises(error), file.written(lambda done: None) as memory:
        kept = [memory(3 * file.stride(layer)) for layer in range(layers)]
        raise error
    assert len(kept) == layers and names_in(tmp_path) == []


def test_who_wants_none_any_more_while_it_is_synced_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "_SYNCED_BYTES", 1 << 14)
    file = file_in(tmp_path)

    def told(done: int) -> None:
        if done > 1 << 14:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), file.written(told) as memory:
        for layer in range(len(LAYERS)):
            memory(3 * file.stride(layer))
    assert names_in(tmp_path) == []


def test_what_was_there_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    old, new = file_in(tmp_path, origin="old"), file_in(tmp_path, origin="new")
    write(old)
    with pytest.raises(ValueError), new.written(lambda done: None) as memory:
        memory(3 * new.stride(0))
        raise ValueError
    assert old.is_whole()
    write(new)
    assert new.is_whole() and not old.is_whole() and len(names_in(tmp_path)) == 1


@pytest.fixture
def half_written(tmp_path: Path) -> Iterator[tuple[RecordFile, subprocess.Popen[str]]]:
    """A file in whose middle another process is."""
    source = (
        "import sys, time, torch; from pathlib import Path\n"
        "from localmoe.experts.record_file import RecordFile\n"
        "from localmoe.experts.records import RecordLayout\n"
        "layers = RecordLayout((6, 4), (4, 3), False), RecordLayout((96, 64), (64, 48), False)\n"
        "layers = (*layers, layers[0])\n"
        "file = RecordFile.in_folder(Path(sys.argv[1]), layers, 3, torch.float32, 'some weights')\n"
        "with file.written(lambda done: None) as memory:\n"
        "    memory(3 * file.stride(0))[:] = b'x' * 3 * file.stride(0)\n"
        "    print('in the middle', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        try:
            assert writer.stdout is not None and writer.stdout.readline() == "in the middle\n"
            yield file_in(tmp_path), writer
        finally:
            writer.kill()


def test_a_killed_writer_leaves_no_file_and_what_it_left_goes_once_it_has_ended(
    half_written: tuple[RecordFile, subprocess.Popen[str]],
) -> None:
    file, writer = half_written
    folder = file.path.parent
    (part,) = names_in(folder)
    write(file)  # beside it
    assert file.is_whole() and names_in(folder) == sorted([part, file.path.name])
    file.path.unlink()
    os.kill(writer.pid, getattr(signal, "SIGKILL", signal.SIGTERM))
    writer.wait(20)
    assert not file.is_whole() and names_in(folder) == [part]
    write(file)
    assert file.is_whole() and names_in(folder) == [file.path.name]


def test_two_writers_in_one_process_do_not_write_into_one_file(tmp_path: Path) -> None:
    """As when a model is loaded again while its load before is not quite over."""
    file, other = file_in(tmp_path), file_in(tmp_path, origin="other weights")
    with file.written(lambda done: None) as memory:
        first = memory(len(content(file, 0)))
        first[:] = content(file, 0)
        write(other)
        assert other.is_whole()
        for layer in (1, 2):
            memory(len(content(file, layer)))[:] = content(file, layer)
        del first
    assert file.is_whole() and names_in(tmp_path) == [file.path.name]
    whole = file.path.read_bytes()
    assert [whole[file.offset(layer, 0)] for layer in range(3)] == [1, 17, 33]


def test_two_threads_that_write_the_same_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    file, failed = file_in(tmp_path), []

    def work() -> None:
        try:
            for _ in range(10):
                write(file)
                assert file.is_whole()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == [] and file.is_whole() and names_in(tmp_path) == [file.path.name]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_in(tmp_path / "not" / "yet")
    free = SimpleNamespace(free=file.num_bytes + record_file._SPARE_BYTES - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    with pytest.raises(DiskError, match=r"takes .* and the disk with .* free: make room, or set") as told:
        write(file)
    assert str(tmp_path) in str(told.value) and "\n" not in str(told.value)
    assert names_in(tmp_path) == []
    free.free += 1
    write(file)
    assert file.is_whole()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="a full disk is found later")
def test_a_disk_that_others_have_filled_meanwhile_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=r"cannot be written \(No space left on device\): make room") as told:
        write(file_in(tmp_path))
    assert "\n" not in str(told.value) and names_in(tmp_path) == []


def test_a_file_that_is_deleted_while_it_is_written_is_one_sentence(tmp_path: Path) -> None:
    file = file_in(tmp_path / "home")
    with (
        pytest.raises(DiskError, match="it was deleted while it was written, so load the model again"),
        file.written(lambda done: None),
    ):
        shutil.rmtree(tmp_path / "home")


def test_a_name_in_the_way_of_its_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "drafts").write_text("")
    with pytest.raises(DiskError, match="cannot be written"):
        write(file_in(tmp_path / "drafts" / "model"))


@pytest.mark.skipif(sys.platform == "win32", reason="rights are others")
def test_a_folder_that_may_not_be_read_or_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even looked into, as another user's; to root none is such."""
    stat, mkdir, locked = os.stat, os.mkdir, str(tmp_path / "locked")

    def refused(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if str(path).startswith(locked + os.sep):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *arguments, **options)

        return call

    os.mkdir(locked)
    monkeypatch.setattr(os, "stat", refused(stat))
    monkeypatch.setattr(os, "mkdir", refused(mkdir))
    with pytest.raises(
        DiskError, match=r"\(Permission denied\): set LOCALMOE_HOME to a folder on another disk"
    ) as told:
        write(file_in(Path(locked) / "drafts" / "model"))
    assert "\n" not in str(told.value) and "make room" not in str(told.value)


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="mounts a disk")
def test_a_small_disk_holds_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "_SPARE_BYTES", -1 << 40)  # others take the room at the same moment
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", tmp_path], check=False).returncode:
        pytest.skip("may not mount")
    try:
        with pytest.raises(DiskError, match="No space left"):
            write(file_in(tmp_path))
        assert names_in(tmp_path) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_leftovers_of_others_stay_while_those_may_live(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    gone = max(psutil.pids()) + 10_000
    parent = psutil.Process(os.getppid())
    lives = [f"{parent.pid}-{int(parent.create_time() * 1000)}", own_mark()]
    ended = [f"{gone}-1", f"{os.getpid()}-1"]  # whose id is another's by now
    names = [f".{file.path.name}.{ended[0]}-0.part", f".experts-bf12-bfloat16.records.{ended[1]}-12.part"]
    kept = [f".{file.path.name}.{mark}-0.part" for mark in lives]
    kept += [".experts-x.part", f"experts-x.{ended[0]}.part", "draft"]
    for name in (*names, *kept):
        (tmp_path / name).write_bytes(b"x")
    remove_leftovers(tmp_path)
    assert names_in(tmp_path) == sorted(kept)


def test_memory_of_a_layer_is_the_files(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    with file.written(lambda done: None) as memory:
        taken = memory(3 * file.stride(0))
        assert isinstance(taken, mmap.mmap) and taken[:] == bytes(len(taken))
        del taken
        with pytest.raises(AssertionError):
            memory(1)
