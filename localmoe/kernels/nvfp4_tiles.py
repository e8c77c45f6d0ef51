"""How a matrix in NVFP4 lies in memory: codes as in MXFP4 (kernels.mxfp4_tiles); beside them, strip after
strip of 16 rows, scales (E4M3), one for 16 columns and four to a word, and behind these a factor for each
row, which has the scale of the whole tensor. Decodes nothing.

Letters: R rows (output features), C columns (input features).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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

__all__ = ["GROUP", "TILE_COLUMNS", "TILE_ROWS", "Nvfp4Matrix", "can_be_tiled", "code_bytes", "side_bytes"]

GROUP = 16  # columns that share a scale
_WORD = TILE_COLUMNS // GROUP  # scales, those of a tile's row
WORD_BYTES = 4
_NONE = 0x7F  # the code of a scale that is no number


def side_bytes(rows: int, columns: int) -> int:
    """Of a matrix's scales and factors."""
    return rows * (columns // TILE_COLUMNS + 1) * WORD_BYTES


@dataclass(frozen=True, slots=True)
class Nvfp4Matrix:
    """A matrix (R, C) in memory.

    Attributes:
        codes: uint8 (R / 16, C / 64, 16, 32).
        scales: uint8 (R / 16, C / 64, 16, 4).
        factors: float32 (R / 16, 16).
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor

    @classmethod
    def at(cls, codes: Tensor, side: Tensor, rows: int, columns: int) -> Nvfp4Matrix:
        """In flat bytes: `code_bytes` and `side_bytes`."""
        strips, tiles = rows // TILE_ROWS, columns // TILE_COLUMNS
        words = side.view(strips, (tiles + 1) * TILE_ROWS * WORD_BYTES)
        scales, factors = words[:, : -TILE_ROWS * WORD_BYTES], words[:, -TILE_ROWS * WORD_BYTES :]
        return cls(
            codes.view(strips, tiles, TILE_ROWS, TILE_COLUMNS // 2),
            scales.unflatten(1, (tiles, TILE_ROWS, _WORD)),
            factors.view(torch.float32),
        )

    @property
    def rows(self) -> int:
        """R."""
        return self.codes.shape[0] * TILE_ROWS

    @property
    def columns(self) -> int:
        """C."""
        return self.codes.shape[1] * TILE_COLUMNS

    def put(self, first_row: int, codes: Tensor, scales: Tensor, factor: float) -> bool:
        """Write rows from `first_row`, a multiple of 16, on; in RAM. False: scales are no numbers, or less
        than zero, or the factor is not finite, which kernels do not tell.

        Args:
            codes: uint8 (N, C / 2), N a multiple of 16; two columns a byte, the first in its lower bits.
            scales: uint8 (N, C / 16).
        """
        strips = slice(first_row // TILE_ROWS, (first_row + len(codes)) // TILE_ROWS)
        put_tiles(codes, scales, self.codes[strips], self.scales[strips])
        self.factors[strips].fill_(factor)
        return int(scales.amax()) < _NONE and math.isfinite(factor)

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """uint8 (R, C / 2) codes and (R, C / 16) scales, as `put` takes them, and float32 (R,) factors."""
        scales = self.scales.transpose(1, 2).reshape(self.rows, -1)
        return take_codes(self.codes), scales, self.factors.reshape(-1)
