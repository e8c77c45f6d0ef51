"""How a matrix of integers of four bits lies in memory: codes as in MXFP4 (kernels.mxfp4_tiles); beside them,
strip after strip of 16 rows, a word for each row and span of columns, of 128 or 32: a float32 scale, the
lowest bits of which, zeros in scales of 16 bits, are the zero point. Decodes nothing.

Letters: R rows (output features), C columns (input features), S spans, C / 128 or C / 32, rounded up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from localmoe.kernels.mxfp4_tiles import (
    TILE_COLUMNS,
    TILE_ROWS,
    can_be_tiled,
    code_bytes,
    put_tiles,
    take_codes,
)
from localmoe.kernels.weight_forms import WeightForm

__all__ = ["SPANS", "TILE_COLUMNS", "TILE_ROWS", "Int4Matrix", "can_be_tiled", "code_bytes", "side_bytes"]

SPANS: Mapping[WeightForm, int] = MappingProxyType({WeightForm.INT4: 128, WeightForm.INT4_32: 32})
WORD_BYTES = 4
ZERO_BITS = 31  # of a word, those of the zero point
MIDDLE = 8  # that codes are less than what they are meant to be, of a zero point in the middle


def side_bytes(rows: int, columns: int, span: int) -> int:
    """Of a matrix's scales and zero points."""
    return rows * -(-columns // span) * WORD_BYTES


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """A matrix (R, C) in memory.

    Attributes:
        codes: uint8 (R / 16, C / 64, 16, 32).
        words: int32 (R / 16, S, 16).
        span: columns that a word is for.
    """

    codes: Tensor
    words: Tensor
    span: int

    @classmethod
    def at(cls, codes: Tensor, side: Tensor, rows: int, columns: int, span: int) -> Int4Matrix:
        """In flat bytes: `code_bytes` and `side_bytes`."""
        strips, tiles = rows // TILE_ROWS, columns // TILE_COLUMNS
        return cls(
            codes.view(strips, tiles, TILE_ROWS, TILE_COLUMNS // 2),
            side.view(torch.int32).view(strips, -1, TILE_ROWS),
            span,
        )

    @property
    def rows(self) -> int:
        """R."""
        return self.codes.shape[0] * TILE_ROWS

    @property
    def columns(self) -> int:
        """C."""
        return self.codes.shape[1] * TILE_COLUMNS

    def put(self, first_row: int, codes: Tensor, scales: Tensor, zeros: Tensor) -> bool:
        """Write rows from `first_row`, a multiple of 16, on; in RAM. False: scales are not finite, or have
        more bits than a word has room for.

        Args:
            codes: uint8 (N, C / 2), N a multiple of 16; two columns a byte, the first in its lower bits.
            scales: float32 (N, S). zeros: uint8 (N, S), 0 to 16.
        """
        strips = slice(first_row // TILE_ROWS, (first_row + len(codes)) // TILE_ROWS)
        tiles = self.codes[strips]
        none = torch.empty(len(codes), 0, dtype=torch.uint8)
        put_tiles(codes, none, tiles, torch.empty(len(tiles), 0, TILE_ROWS, WORD_BYTES, dtype=torch.uint8))
        bits = scales.contiguous().view(torch.int32)
        words = (bits | zeros).view(-1, TILE_ROWS, scales.shape[1])
        self.words[strips].copy_(words.transpose(1, 2))
        return not int((bits & ZERO_BITS).amax()) and bool(scales.isfinite().all())

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """uint8 (R, C / 2) codes, float32 (R, S) scales and uint8 (R, S) zero points, as `put` takes them."""
        words = self.words.transpose(1, 2).reshape(self.rows, -1)
        scales = (words & ~ZERO_BITS).view(torch.float32)
        return take_codes(self.codes), scales, (words & ZERO_BITS).to(torch.uint8)
