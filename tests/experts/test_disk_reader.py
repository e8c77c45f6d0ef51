"""Bytes of a file come into memory as they lie there, whichever way it is read; what fails is a sentence."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from localmoe.core.errors import DiskError
from localmoe.experts import disk_reader
from localmoe.experts.disk_reader import DiskReader
from localmoe.experts.host_memory import anonymous_memory

PAGES = 64
WAIT_S = 20.0


def memory(pages: int) -> Tensor:
    return torch.frombuffer(anonymous_memory(pages * 4096), dtype=torch.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.records"
    path.write_bytes(torch.randint(256, (PAGES * 4096,), dtype=torch.uint8).numpy().tobytes())
    return path


@pytest.fixture(params=["past the system's cache", "through it", "where it is refused"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "past the system's cache" and not hasattr(os, "O_DIRECT"):
        pytest.skip("no such way here")
    if request.param == "through it":
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    if request.param == "where it is refused":

        def refuse(path: str, flags: int) -> int:
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr(disk_reader, "_open_directly", refuse)
    return str(request.param)


@pytest.fixture
def reader(file: Path, way: str) -> Iterator[DiskReader]:
    made = DiskReader(file, threads=3)
    yield made
    made.close()


def test_the_bytes_are_those_of_the_file(file: Path, reader: DiskReader) -> None:
    whole = file.read_bytes()
    wanted = [(first, pages) for first in range(0, PAGES - 8, 3) for pages in (1, 5, 8)]
    places = [memory(pages) for _, pages in wanted]
    reads = [reader.read(4096 * first, place) for (first, _), place in zip(wanted, places, strict=True)]
    for read, (first, pages), place in zip(reads, wanted, places, strict=True):
        assert read.result(WAIT_S) is None
        assert bytes(place.numpy()) == whole[4096 * first : 4096 * (first + pages)]


def test_the_last_page_is_read_and_none_behind_it(reader: DiskReader) -> None:
    reader.read(4096 * (PAGES - 1), memory(1)).result(WAIT_S)
    for first in (PAGES, PAGES - 1, 2 * PAGES):
        with pytest.raises(DiskError, match="shorter than it was: load the model again"):
            reader.read(4096 * first, memory(2)).result(WAIT_S)
    reader.read(0, memory(PAGES)).result(WAIT_S)


@pytest.mark.parametrize("length", [0, 100, 4096 * 3 + 512, 4096 * 3 + 7])
def test_a_file_that_was_cut_meanwhile_is_a_sentence(file: Path, reader: DiskReader, length: int) -> None:
    reader.read(0, memory(1)).result(WAIT_S)
    os.truncate(file, length)
    with pytest.raises(DiskError, match="load the model again, which writes it anew") as told:
        reader.read(4096 * 3, memory(2)).result(WAIT_S)
    assert str(file) in str(told.value) and "\n" not in str(told.value)


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path, way: str) -> None:
    with pytest.raises(DiskError, match=r"cannot be read \(No such file or directory\)"):
        reader = DiskReader(tmp_path / "none.records", threads=2)
        try:
            reader.read(0, memory(1)).result(WAIT_S)
        finally:
            reader.close()


def test_a_file_that_is_deleted_or_replaced_meanwhile_is_read_as_it_was(
    file: Path, reader: DiskReader
) -> None:
    """Also by threads that have read nothing yet."""
    whole = file.read_bytes()
    file.unlink()
    file.write_bytes(bytes(len(whole)))
    places = [memory(8) for _ in range(24)]
    for read in [reader.read(4096 * 8 * (i % 8), place) for i, place in enumerate(places)]:
        read.result(WAIT_S)
    for i, place in enumerate(places):
        first = 4096 * 8 * (i % 8)
        assert bytes(place.numpy()) == whole[first : first + 8 * 4096]


def test_closing_ends_reads_that_run_and_cancels_those_that_wait(
    file: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, fill = threading.Semaphore(0), threading.Event(), DiskReader._fill

    def slow(self: DiskReader, *arguments: object) -> None:
        begun.release()
        assert go_on.wait(WAIT_S)
        fill(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskReader, "_fill", slow)
    reader = DiskReader(file, threads=2)
    reads = [reader.read(0, memory(1)) for _ in range(6)]
    assert all(begun.acquire(timeout=WAIT_S) for _ in range(2))
    closer = threading.Thread(target=reader.close)
    closer.start()
    for read in reads[2:]:
        with pytest.raises(CancelledError):
            read.result(WAIT_S)
    assert closer.is_alive(), "memory must not go while a read fills it"
    go_on.set()
    closer.join(WAIT_S)
    assert [read.result(0) for read in reads[:2]] == [None, None]
    reader.close()


def test_nothing_stays_open(file: Path, way: str) -> None:
    def of_file() -> int:
        return sum(found.path == str(file) for found in psutil.Process().open_files())

    def threads() -> int:
        return sum(thread.name.startswith("localmoe-disk") for thread in threading.enumerate())

    before = threads()
    for _ in range(3):
        reader = DiskReader(file, threads=4)
        reads: list[Future[None]] = [reader.read(0, memory(PAGES)) for _ in range(12)]
        assert all(read.result(WAIT_S) is None for read in reads)
        assert of_file() > 0
        reader.close()
        assert of_file() == 0 and threads() == before
