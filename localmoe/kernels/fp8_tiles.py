"""How a matrix of eight-bit floats (E4M3) lies in memory, so that a tile of a product is one piece of it:
16 rows of 64 columns after another, down a strip of 16 rows. Scales, one for a row's 128 columns, lie in
strips too. Decodes nothing.

A code's exponent and mantissa, put where those of a bfloat16 end and begin, are its value times 2^-120.

Letters: R rows (output features), C columns (input features), G = C / 128, rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE_ROWS = 16
TILE_COLUMNS = 64
SCALE_COLUMNS = 128  # that share a scale; the last ones may be fewer
WORD_BYTES = 4
UP = 2.0**120  # from a code's bits, taken for a bfloat16, to its value
_NONE = 127  # a code without its sign that is no number


def can_be_tiled(rows: int, columns: int) -> bool:
    """Whether a matrix is made of whole tiles."""
    return rows % TILE_ROWS == 0 and columns % TILE_COLUMNS == 0


def code_bytes(rows: int, columns: int) -> int:
    """Of a matrix's codes."""
    return rows * columns


def scale_bytes(rows: int, columns: int) -> int:
    """Of its scales."""
    return rows * -(-columns // SCALE_COLUMNS) * WORD_BYTES


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix (R, C) in memory.

    Attributes:
        codes: uint8 (R / 16, C / 64, 16, 64).
        scales: float32 (R / 16, G, 16).
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def at(cls, codes: Tensor, scales: Tensor, rows: int, columns: int) -> Fp8Matrix:
        """In flat bytes: `code_bytes` and `scale_bytes`."""
        strips, groups = rows // TILE_ROWS, -(-columns // SCALE_COLUMNS)
        return cls(
            codes.view(strips, columns // TILE_COLUMNS, TILE_ROWS, TILE_COLUMNS),
            scales.view(torch.float32).view(strips, groups, TILE_ROWS),
        )

    @property
    def rows(self) -> int:
        """R."""
        return self.codes.shape[0] * TILE_ROWS

    @property
    def columns(self) -> int:
        """C."""
        return self.codes.shape[1] * TILE_COLUMNS

    def put(self, first_row: int, codes: Tensor, scales: Tensor) -> bool:
        """Write rows from `first_row`, a multiple of 16, on; in RAM. False: some are no numbers, which codes
        here do not tell.

        Args:
            codes: uint8 (N, C), N a multiple of 16.
            scales: float32 (N, G).
        """
        strips = slice(first_row // TILE_ROWS, (first_row + len(codes)) // TILE_ROWS)
        tiles = codes.view(-1, TILE_ROWS, self.columns // TILE_COLUMNS, TILE_COLUMNS)
        self.codes[strips].copy_(tiles.transpose(1, 2))
        self.scales[strips].copy_(scales.view(-1, TILE_ROWS, scales.shape[1]).transpose(1, 2))
        return int(codes.bitwise_and(_NONE).amax()) < _NONE  # a comparison of each takes twenty times as long

    def take(self) -> tuple[Tensor, Tensor]:
        """uint8 (R, C) codes and float32 (R, G) scales, as `put` takes them."""
        codes = self.codes.transpose(1, 2).reshape(self.rows, self.columns)
        return codes, self.scales.transpose(1, 2).reshape(self.rows, -1)
