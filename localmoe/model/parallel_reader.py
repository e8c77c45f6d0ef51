"""Fill tensors from weight files with several threads, in the order of the files. Does not decide what is
read, nor where it goes.

Reading a tensor straight into memory that nobody has written yet costs the kernel's zeroing of its pages and
a copy out of the page cache; both happen inside the read call, without the interpreter's lock, so threads
share them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeAlias

import torch
from torch import Tensor

from localmoe.core.errors import LoadCancelledError
from localmoe.hardware.cpu import core_counts
from localmoe.hub.checkpoint import TensorHeader
from localmoe.kernels.bf12_tiles import TILE_ROWS as STRIP
from localmoe.kernels.bf12_tiles import Bf12Matrix
from localmoe.kernels.mxfp4_tiles import TILE_ROWS, Mxfp4Matrix
from localmoe.model.packed_head import PackedHead
from localmoe.model.weight_reader import WeightReader, stored_dtype
from localmoe.quant.mxfp4 import BLOCK, BLOCK_BYTES, decode_into

MAX_THREADS = 8
PIECE_BYTES = 16 << 20  # at most, of a read straight into its place: cancelling waits for one a thread
STAGED_BYTES = 4 << 20  # at most, of a read through a buffer, of which each thread has one
DECODED_BYTES = 1 << 20  # at most, of weights that are made of MXFP4 at once: they stay in a core's cache
PACKED_BYTES = 1 << 20  # the same of weights that are packed
_POLL_S = 0.05  # between looks at `cancel` while nothing finishes


@dataclass(frozen=True, slots=True)
class Piece:
    """Stored elements from `first_element` on, as many as `target` has and in its order.

    Attributes:
        target: of any device, floating dtype and strides.
        layer: the MoE layer whose records it belongs to; None for a shared weight.
    """

    header: TensorHeader
    first_element: int
    target: Tensor
    layer: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.target.numel() * stored_dtype(self.header).itemsize


@dataclass(frozen=True, slots=True)
class BlocksPiece:
    """Stored blocks of MXFP4 from `first_element`, a byte, on: so many rows of a matrix.

    Attributes:
        target: for weights, of these rows, or a whole matrix that keeps MXFP4.
        first_row: of `target`.
    """

    header: TensorHeader
    scales: TensorHeader
    first_element: int
    target: Tensor | Mxfp4Matrix
    first_row: int
    num_rows: int
    columns: int
    layer: int

    @property
    def num_blocks(self) -> int:
        """Blocks."""
        return self.num_rows * self.columns // BLOCK

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.num_blocks * (BLOCK_BYTES + 1)


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """Stored elements from `first_element` on: so many rows, whole strips or the last ones, of a matrix that
    is kept in BF12."""

    header: TensorHeader
    first_element: int
    target: Bf12Matrix | PackedHead
    first_row: int
    num_rows: int
    layer: int | None

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.num_rows * self.target.columns * stored_dtype(self.header).itemsize


AnyPiece: TypeAlias = Piece | BlocksPiece | PackedPiece


def split_read(
    header: TensorHeader, target: Tensor, first_element: int = 0, layer: int | None = None
) -> Iterator[Piece]:
    """A read as pieces of whole rows (of dimension 0), as few as the limits on their size allow.

    Raises:
        CheckpointError: localmoe does not read this dtype.
    """
    stored = stored_dtype(header)
    flat = target.view(-1) if target.is_contiguous() else target
    row = flat[0].numel() if flat.numel() else 1
    limit = PIECE_BYTES if _is_direct(flat, stored) else STAGED_BYTES
    rows = max(1, limit // (row * stored.itemsize))
    for start in range(0, flat.shape[0], rows):
        yield Piece(header, first_element + start * row, flat[start : start + rows], layer)


def split_blocks(
    blocks: TensorHeader, scales: TensorHeader, target: Tensor | Mxfp4Matrix, first_row: int, layer: int
) -> Iterator[BlocksPiece]:
    """A read of MXFP4 blocks: of rows from `first_row` on, of dimension 0 of the stored matrix and of
    `target`, (N, K) weights or a matrix that keeps MXFP4."""
    if isinstance(target, Tensor):
        total, columns, step, row_bytes = *target.shape, 1, target.shape[1] * target.itemsize
    else:
        total, columns, step, row_bytes = target.rows, target.columns, TILE_ROWS, target.columns
    rows = max(1, DECODED_BYTES // row_bytes // step) * step
    for start in range(0, total, rows):
        count = min(rows, total - start)
        first_byte = (first_row + start) * columns // BLOCK * BLOCK_BYTES
        yield BlocksPiece(blocks, scales, first_byte, target, start, count, columns, layer)


def split_packed(
    header: TensorHeader, first_element: int, target: Bf12Matrix | PackedHead, layer: int | None
) -> Iterator[PackedPiece]:
    """A read of a matrix that is packed on the way.

    Raises:
        CheckpointError: localmoe does not read this dtype.
    """
    rows = max(1, PIECE_BYTES // (target.columns * stored_dtype(header).itemsize) // STRIP) * STRIP
    for start in range(0, target.rows, rows):
        count = min(rows, target.rows - start)
        yield PackedPiece(header, first_element + start * target.columns, target, start, count, layer)


def num_threads() -> int:
    """Readers at a time: one a core, but at least two, as a disk answers several questions faster."""
    return max(2, min(MAX_THREADS, core_counts()[1]))


def read_pieces(
    pieces: Sequence[AnyPiece],
    finished: Callable[[AnyPiece], None] | None = None,
    cancel: threading.Event | None = None,
) -> None:
    """Read all pieces; `finished` is called after each, in the calling thread. No thread outlives the call.

    Raises:
        CheckpointError: a file cannot be read. LoadCancelledError: `cancel` was set. UnpackableError: a
            matrix cannot be packed. Whatever `finished` raises.
    """
    ordered = sorted(pieces, key=lambda piece: (piece.header.file, piece.header.offset, piece.first_element))
    work = _Work(deque(ordered), SimpleQueue(), threading.Event())
    threads = [
        threading.Thread(target=work.run, name="localmoe-reader", daemon=True)
        for _ in range(min(num_threads(), len(ordered)))
    ]
    try:
        for thread in threads:
            thread.start()
        for _ in ordered:
            piece = work.next_result(cancel)
            if finished is not None:
                finished(piece)
    finally:
        work.stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        work.let_go()


@dataclass(frozen=True, slots=True)
class _Work:
    """What the readers share."""

    waiting: deque[AnyPiece]
    results: SimpleQueue[AnyPiece | BaseException]
    stop: threading.Event

    def run(self) -> None:
        """One reader: its own file handle and buffer."""
        try:  # around all of it: one that ended without a word would be waited for
            staging = torch.empty(0, dtype=torch.uint8)
            with WeightReader() as reader:
                while self.waiting and not self.stop.is_set():
                    try:
                        piece = self.waiting.popleft()
                    except IndexError:  # another reader took the last one
                        return
                    staging = _read(reader, piece, staging)
                    self.results.put(piece)
        except BaseException as error:  # raised again by the thread that waits
            self.results.put(error)

    def let_go(self) -> None:
        """Of what nobody waits for: an error's frames would keep all records of a failed load."""
        self.waiting.clear()
        while not self.results.empty():
            self.results.get()

    def next_result(self, cancel: threading.Event | None) -> AnyPiece:
        """The next piece that is read, as long as nothing went wrong."""
        while True:
            if cancel is not None and cancel.is_set():
                raise LoadCancelledError("Loading the model was cancelled.")
            try:
                result = self.results.get(timeout=_POLL_S)
            except Empty:
                continue
            if isinstance(result, BaseException):
                raise result
            return result


def _read(reader: WeightReader, piece: AnyPiece, staging: Tensor) -> Tensor:
    """Read one piece; returns the buffer to use for the next."""
    if isinstance(piece, BlocksPiece):
        return _read_blocks(reader, piece, staging)
    if isinstance(piece, PackedPiece):
        return _read_packed(reader, piece, staging)
    stored = stored_dtype(piece.header)
    if _is_direct(piece.target, stored):
        reader.read_part(piece.header, piece.first_element, piece.target)
        return staging
    staging = _at_least(piece.num_bytes, staging)
    part = staging[: piece.num_bytes].view(stored).view(piece.target.shape)
    reader.read_part(piece.header, piece.first_element, part)
    piece.target.copy_(part)
    return staging


def _read_blocks(reader: WeightReader, piece: BlocksPiece, staging: Tensor) -> Tensor:
    staging = _at_least(piece.num_bytes, staging)
    end = piece.num_blocks * BLOCK_BYTES
    blocks, scales = staging[:end], staging[end : piece.num_bytes]
    reader.read_part(piece.header, piece.first_element, blocks)
    reader.read_part(piece.scales, piece.first_element // BLOCK_BYTES, scales)
    rows, first = piece.num_rows, piece.first_row
    scales = scales.view(rows, -1)
    if isinstance(piece.target, Tensor):
        decode_into(blocks.view(rows, -1, BLOCK_BYTES), scales, piece.target[first : first + rows])
    else:
        piece.target.put(first, blocks.view(rows, -1), scales)
    return staging


def _read_packed(reader: WeightReader, piece: PackedPiece, staging: Tensor) -> Tensor:
    """Some strips after the other, so that they are packed while a core's cache holds them."""
    stored, columns = stored_dtype(piece.header), piece.target.columns
    row_bytes = columns * stored.itemsize
    rows = max(1, PACKED_BYTES // row_bytes // STRIP) * STRIP
    staging = _at_least(rows * row_bytes, staging)
    for first in range(0, piece.num_rows, rows):
        count = min(rows, piece.num_rows - first)
        part = staging[: count * row_bytes].view(stored).view(count, columns)
        reader.read_part(piece.header, piece.first_element + first * columns, part)
        piece.target.put(piece.first_row + first, part.to(torch.bfloat16))
    return staging


def _at_least(num_bytes: int, staging: Tensor) -> Tensor:
    if staging.numel() >= num_bytes:
        return staging
    return torch.empty(max(num_bytes, STAGED_BYTES), dtype=torch.uint8)


def _is_direct(target: Tensor, stored: torch.dtype) -> bool:
    return target.device.type == "cpu" and target.dtype == stored and target.is_contiguous()
