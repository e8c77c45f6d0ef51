"""What is read of weight files in one piece, and reads cut into such pieces. Reads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from localmoe.experts.records import PackedMatrix
from localmoe.hub.checkpoint import TensorHeader
from localmoe.kernels.bf12_tiles import TILE_ROWS as STRIP
from localmoe.kernels.bf12_tiles import UnpackableError
from localmoe.kernels.fp8_tiles import SCALE_COLUMNS, Fp8Matrix
from localmoe.kernels.int4_tiles import Int4Matrix
from localmoe.kernels.mxfp4_tiles import TILE_ROWS, Mxfp4Matrix
from localmoe.kernels.nvfp4_tiles import Nvfp4Matrix
from localmoe.model.packed_head import PackedHead
from localmoe.model.weight_reader import file_bytes, is_four_bits, shares_columns, stored_dtype
from localmoe.quant.mxfp4 import BLOCK, BLOCK_BYTES

PIECE_BYTES = 16 << 20  # at most, of a read straight into its place: cancelling waits for one a thread
STAGED_BYTES = 4 << 20  # at most, of a read through a buffer, of which each thread has one
DECODED_BYTES = 1 << 20  # at most, of weights that are made of MXFP4 at once: they stay in a core's cache
PACKED_BYTES = 1 << 20  # the same of weights that are packed


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
        return file_bytes(self.header, self.target.numel())


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
    is kept in BF12, FP8, NVFP4 or INT4."""

    header: TensorHeader
    first_element: int
    target: PackedMatrix | PackedHead
    first_row: int
    num_rows: int
    layer: int | None

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return file_bytes(self.header, self.num_rows * self.target.columns)


AnyPiece: TypeAlias = Piece | BlocksPiece | PackedPiece


def split_read(
    header: TensorHeader, target: Tensor, first_element: int = 0, layer: int | None = None
) -> Iterator[Piece]:
    """A read as pieces of whole rows (of dimension 0), as few as the limits on their size allow; of integers
    of four bits one, as no thread can read a part of them.

    Raises:
        CheckpointError: localmoe does not read this dtype.
    """
    stored = stored_dtype(header)
    flat = target.view(-1) if target.is_contiguous() else target
    row = flat[0].numel() if flat.numel() else 1
    limit = PIECE_BYTES if is_direct(flat, stored) else STAGED_BYTES
    rows = max(1, len(flat) if header.integers is not None else limit // (row * stored.itemsize))
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
    header: TensorHeader, first_element: int, target: PackedMatrix | PackedHead, layer: int | None
) -> Iterator[PackedPiece]:
    """A read of a matrix that is packed on the way.

    Raises:
        CheckpointError: localmoe does not read this dtype.
        UnpackableError: it is to be kept in FP8, NVFP4 or INT4, and not stored so.
    """
    if isinstance(target, Fp8Matrix) and not shares_columns(header):
        raise UnpackableError(f"{header.name} is not stored in FP8 with scales of {SCALE_COLUMNS} columns")
    if isinstance(target, Nvfp4Matrix) and not is_four_bits(header):
        raise UnpackableError(f"{header.name} is not stored in NVFP4")
    if isinstance(target, Int4Matrix) and header.integers is None:
        raise UnpackableError(f"{header.name} is not stored in INT4")
    if header.integers is not None:
        yield PackedPiece(header, first_element, target, 0, target.rows, layer)  # rows lie across each other
        return
    rows = max(1, PIECE_BYTES // (target.columns * stored_dtype(header).itemsize) // STRIP) * STRIP
    for start in range(0, target.rows, rows):
        count = min(rows, target.rows - start)
        yield PackedPiece(header, first_element + start * target.columns, target, start, count, layer)


def is_direct(target: Tensor, stored: torch.dtype) -> bool:
    """Whether what is stored so can be read straight into its place."""
    return target.device.type == "cpu" and target.dtype == stored and target.is_contiguous()
