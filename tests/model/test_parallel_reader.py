"""Reading with threads: every element in its place for any split, dtype and strides; errors, cancelling and
callbacks as from one thread; no thread is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localmoe.core.errors import CheckpointError, LoadCancelledError
from localmoe.hub.checkpoint import TensorHeader
from localmoe.hub.file_version import FileVersion
from localmoe.model import parallel_reader
from localmoe.model.parallel_reader import num_threads, read_pieces
from localmoe.model.pieces import PIECE_BYTES, STAGED_BYTES, Piece, split_read
from localmoe.model.weight_reader import WeightReader

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = st.sampled_from(list(NAMES))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def write(path: Path, tensors: list[Tensor]) -> list[TensorHeader]:
    """Raw tensors one after another, from byte 13 on."""
    start = 13
    parts = [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    path.write_bytes(b"x" * start + b"".join(parts))
    version, headers = version_of(path), []
    for i, tensor in enumerate(tensors):
        dtype, shape = NAMES[tensor.dtype], tuple(tensor.shape)
        headers.append(TensorHeader(f"t{i}", path, dtype, shape, tensor.nbytes, start, version))
        start += tensor.nbytes
    return headers


def version_of(path: Path) -> FileVersion:
    with path.open("rb") as file:
        return FileVersion.of(file.fileno())


@st.composite
def reads(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """(stored, memory full of NaN, view of it to fill): contiguous, a slab along either dimension, or
    transposed; of the stored dtype or another."""
    shape = draw(st.sampled_from([(), (7,), (1, 5), (6, 4), (33, 17), (3, 5, 8)]))
    seed, stored_as, wanted = draw(st.integers(0, 99)), draw(DTYPES), draw(DTYPES)
    stored = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(stored_as)
    if len(shape) != 2:
        memory = torch.full(shape, torch.nan, dtype=wanted)
        return stored, memory, memory
    kind = draw(st.sampled_from(["whole", "rows", "columns", "transposed"]))
    rows, columns = shape
    memory = torch.full((rows * 2, columns * 2), torch.nan, dtype=wanted)
    if kind == "whole":
        memory = torch.full(shape, torch.nan, dtype=wanted)
        return stored, memory, memory
    if kind == "rows":
        memory = torch.full((rows * 2, columns), torch.nan, dtype=wanted)
        return stored, memory, memory[rows:]
    if kind == "columns":
        return stored, memory, memory[:rows].narrow(1, columns, columns)
    memory = torch.full((columns * 2, rows * 2), torch.nan, dtype=wanted)
    return stored, memory, memory.t()[rows:, :columns]


@given(
    parts=st.lists(reads(), min_size=1, max_size=5), piece_bytes=st.integers(1, 300), seed=st.integers(0, 9)
)
@settings(max_examples=60)
def test_every_element_lands_in_its_place_and_nowhere_else(
    parts: list[tuple[Tensor, Tensor, Tensor]],
    piece_bytes: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    headers = write(tmp_path_factory.mktemp("read") / "file", [stored for stored, _, _ in parts])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localmoe.model.pieces.PIECE_BYTES", piece_bytes)
        patch.setattr("localmoe.model.pieces.STAGED_BYTES", piece_bytes)
        patch.setattr(parallel_reader, "num_threads", lambda: 1 + seed % 4)
        pieces = [
            piece
            for header, (_, _, view) in zip(headers, parts, strict=True)
            for piece in split_read(header, view)
        ]
        assert sum(piece.num_bytes for piece in pieces) == sum(header.num_bytes for header in headers)
        seen: list[Piece] = []
        read_pieces(pieces, seen.append)
        assert len(seen) == len(pieces)
    for stored, memory, view in parts:
        assert torch.equal(view, stored.to(view.dtype))
        assert memory.isnan().sum() == memory.numel() - view.numel(), "the rest is untouched"


def test_part_of_a_tensor_is_read_from_its_first_element_on(tmp_path: Path) -> None:
    stored = torch.arange(24, dtype=torch.float32).view(4, 6)
    (header,) = write(tmp_path / "file", [stored])
    target = torch.full((2, 6), torch.nan)
    read_pieces(list(split_read(header, target, first_element=12, layer=3)))
    assert torch.equal(target, stored[2:])
    assert [piece.layer for piece in split_read(header, target, layer=3)] == [3]


def test_large_reads_are_split_at_the_limits(tmp_path: Path) -> None:
    header = TensorHeader("t", tmp_path, "BF16", (1000, 50_000), 100_000_000, 0, FileVersion(100_000_000, 0))
    direct = list(split_read(header, torch.empty(1000, 50_000, dtype=torch.bfloat16)))
    staged = list(split_read(header, torch.empty(50_000, 1000, dtype=torch.bfloat16).t()))
    assert all(piece.num_bytes <= PIECE_BYTES for piece in direct) and len(direct) == 6
    converted = list(split_read(header, torch.empty(1000, 50_000, dtype=torch.float32)))
    for pieces in (staged, converted):
        assert all(piece.num_bytes <= STAGED_BYTES for piece in pieces)


def many(tmp_path: Path, count: int = 40) -> tuple[list[Tensor], list[Piece]]:
    stored = [torch.full((64,), float(i)) for i in range(count)]
    headers = write(tmp_path / "many", stored)
    targets = [torch.full((64,), torch.nan) for _ in stored]
    return targets, [p for h, t in zip(headers, targets, strict=True) for p in split_read(h, t)]


def test_the_callback_runs_in_the_calling_thread_and_several_threads_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets, pieces = many(tmp_path)
    readers: set[int] = set()
    together = threading.Barrier(2, timeout=20)
    real = WeightReader.read_part

    def read_part(self: WeightReader, header: TensorHeader, first: int, out: Tensor) -> None:
        if threading.get_ident() not in readers:
            readers.add(threading.get_ident())
            together.wait()  # passed only if two readers are inside at a time
        real(self, header, first, out)

    monkeypatch.setattr(parallel_reader, "num_threads", lambda: 2)
    monkeypatch.setattr(WeightReader, "read_part", read_part)
    callers: set[int] = set()
    read_pieces(pieces, lambda piece: callers.add(threading.get_ident()))
    assert callers == {threading.get_ident()}
    assert len(readers) == 2 and threading.get_ident() not in readers
    assert all(torch.equal(target, torch.full((64,), float(i))) for i, target in enumerate(targets))


def test_a_file_that_ends_early_is_the_same_one_sentence_from_any_thread(tmp_path: Path) -> None:
    _, pieces = many(tmp_path)
    with (tmp_path / "many").open("r+b") as file:
        file.truncate(13 + 20 * 256)
    with pytest.raises(CheckpointError, match=r"many has changed since it was opened: load the model again"):
        read_pieces(pieces)
    version = version_of(tmp_path / "many")
    pieces = [replace(piece, header=replace(piece.header, version=version)) for piece in pieces]
    with pytest.raises(CheckpointError, match=r"many ends too early: download the model again\.$"):
        read_pieces(pieces)


def test_a_file_that_is_gone_is_refused_and_the_others_stop(tmp_path: Path) -> None:
    _, pieces = many(tmp_path)
    (tmp_path / "many").unlink()
    with pytest.raises(CheckpointError, match=r"Opening .*many failed: No such file or directory\.$"):
        read_pieces(pieces)


def test_readers_that_have_no_memory_to_begin_with_end_the_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would come with a piece, and the caller would wait for ever."""
    source = torch.ones(4, 4)
    (header,) = write(tmp_path / "w", [source])
    pieces, cancel = list(split_read(header, torch.empty(4, 4))), threading.Event()

    def full(*_args: object, **_options: object) -> Tensor:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(parallel_reader.torch, "empty", full)
    timer = threading.Timer(5.0, cancel.set)
    timer.start()
    with pytest.raises(MemoryError, match="bad_alloc"):
        read_pieces(pieces, cancel=cancel)
    timer.cancel()
    timer.join()


def test_what_the_callback_raises_stops_the_readers(tmp_path: Path) -> None:
    _, pieces = many(tmp_path)
    with pytest.raises(ZeroDivisionError):
        read_pieces(pieces, lambda piece: print(1 / 0))


def test_cancelling_stops_within_a_piece_also_while_a_read_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pieces = many(tmp_path)
    cancel, reads = threading.Event(), []

    def slow(self: WeightReader, header: TensorHeader, first: int, out: Tensor) -> None:
        reads.append(header)
        cancel.set()
        time.sleep(0.2)

    monkeypatch.setattr(parallel_reader, "num_threads", lambda: 3)
    monkeypatch.setattr(WeightReader, "read_part", slow)
    with pytest.raises(LoadCancelledError, match="cancelled"):
        read_pieces(pieces, cancel=cancel)
    assert len(reads) <= 2 * 3


def test_there_are_at_least_two_readers_and_not_more_than_help(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 2), (2, 2), (6, 6), (64, 8)):
        monkeypatch.setattr(parallel_reader, "core_counts", lambda cores=cores: (cores, cores))
        assert num_threads() == threads


def test_nothing_to_read_is_read_at_once() -> None:
    read_pieces([])
    empty = TensorHeader("t", Path("missing"), "F32", (0, 4), 0, 0, FileVersion(0, 0))
    assert list(split_read(empty, torch.empty(0, 4))) == []
