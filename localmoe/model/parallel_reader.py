"""Fill tensors from weight files with several threads, in the order of the files. Does not decide what is
read, nor where it goes.

Reading a tensor straight into memory that nobody has written yet costs the kernel's zeroing of its pages and
a copy out of the page cache; both happen inside the read call, without the interpreter's lock, so threads
share them.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from localmoe.core.errors import LoadCancelledError
from localmoe.hardware.cpu import core_counts
from localmoe.kernels.bf12_tiles import TILE_ROWS as STRIP
from localmoe.kernels.bf12_tiles import UnpackableError
from localmoe.kernels.fp8_tiles import Fp8Matrix
from localmoe.kernels.int4_tiles import Int4Matrix
from localmoe.kernels.nvfp4_tiles import Nvfp4Matrix
from localmoe.model.pieces import (
    PACKED_BYTES,
    STAGED_BYTES,
    AnyPiece,
    BlocksPiece,
    PackedPiece,
    is_direct,
)
from localmoe.model.weight_reader import WeightReader, stored_dtype
from localmoe.quant.mxfp4 import BLOCK_BYTES, decode_into

MAX_THREADS = 8
_POLL_S = 0.05  # between looks at `cancel` while nothing finishes


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
    if is_direct(piece.target, stored):
        reader.read_part(piece.header, piece.first_element, piece.target)
        return staging
    row = math.prod(piece.target.shape[1:])
    step = max(1, STAGED_BYTES // (row * stored.itemsize))
    for first in range(0, len(piece.target), step):
        target = piece.target[first : first + step]
        size = target.numel() * stored.itemsize
        staging = _at_least(size, staging)
        part = staging[:size].view(stored).view(target.shape)
        reader.read_part(piece.header, piece.first_element + first * row, part)
        target.copy_(part)
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
    if isinstance(piece.target, Fp8Matrix):
        return _read_codes(reader, piece, piece.target, staging)
    if isinstance(piece.target, Nvfp4Matrix):
        return _read_fours(reader, piece, piece.target, staging)
    if isinstance(piece.target, Int4Matrix):
        _read_integers(reader, piece, piece.target)
        return staging
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


def _read_codes(reader: WeightReader, piece: PackedPiece, target: Fp8Matrix, staging: Tensor) -> Tensor:
    """Likewise, of codes that stay as they are."""
    columns = target.columns
    step = max(1, PACKED_BYTES // columns // STRIP) * STRIP
    staging = _at_least(step * columns, staging)
    for first in range(0, piece.num_rows, step):
        count = min(step, piece.num_rows - first)
        codes, start = staging[: count * columns], piece.first_element + first * columns
        scales = reader.read_codes(piece.header, start, codes)
        if not target.put(piece.first_row + first, codes.view(count, columns), scales):
            raise UnpackableError(f"{piece.header.name} has weights that are no numbers")
    return staging


def _read_fours(reader: WeightReader, piece: PackedPiece, target: Nvfp4Matrix, staging: Tensor) -> Tensor:
    """Likewise, of codes of four bits."""
    row_bytes = target.columns // 2
    step = max(1, PACKED_BYTES // row_bytes // STRIP) * STRIP
    staging = _at_least(step * row_bytes, staging)
    for first in range(0, piece.num_rows, step):
        count = min(step, piece.num_rows - first)
        codes, start = staging[: count * row_bytes], piece.first_element + first * target.columns
        scales, factor = reader.read_fours(piece.header, start, codes)
        if not target.put(piece.first_row + first, codes.view(count, row_bytes), scales, factor):
            raise UnpackableError(f"{piece.header.name} has scales that are no numbers")
    return staging


def _read_integers(reader: WeightReader, piece: PackedPiece, target: Int4Matrix) -> None:
    """Likewise, of integers of four bits."""
    found = reader.read_integers(piece.header)
    rows = found.some(piece.first_element // target.columns, piece.num_rows)
    spans = rows.by_span(target.span)
    if spans is None:
        raise UnpackableError(f"{piece.header.name} has scales of groups that {target.span} columns are not")
    if not target.put(piece.first_row, rows.codes, *spans):
        raise UnpackableError(f"{piece.header.name} has scales of more than 16 bits, or that are no numbers")


def _at_least(num_bytes: int, staging: Tensor) -> Tensor:
    if staging.numel() >= num_bytes:
        return staging
    return torch.empty(max(num_bytes, STAGED_BYTES), dtype=torch.uint8)
