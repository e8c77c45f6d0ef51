"""How a matrix in MXFP4 lies in memory, so that a tile of a product is one piece of it: 16 rows of 64 columns
after another, down a strip of 16 rows. A word of 32 bits has eight columns, those of even number in its lower
half: so its halves hold the pairs that lie side by side once they are 16-bit numbers. Scales, one for 32
columns, lie in strips too, four to a word. Decodes nothing.

Letters: R rows (output features), C columns (input features).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localmoe.kernels.compiled_loops import optional_loops

TILE_ROWS = 16
TILE_COLUMNS = 64
WORD_COLUMNS = 128  # that a word of four scales is for; the last one may be half empty
_BLOCK = 32  # columns that share a scale
_TILE_ROW_BYTES = TILE_COLUMNS // 2
_WORD_BYTES = 4


def can_be_tiled(rows: int, columns: int) -> bool:
    """Whether a matrix is made of whole tiles."""
    return rows % TILE_ROWS == 0 and columns % TILE_COLUMNS == 0


def code_bytes(rows: int, columns: int) -> int:
    """Of a matrix's codes."""
    return rows * columns // 2


def scale_bytes(rows: int, columns: int) -> int:
    """Of its scales, whole words."""
    return rows * -(-columns // WORD_COLUMNS) * _WORD_BYTES


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """A matrix (R, C) in memory.

    Attributes:
        codes: uint8 (R / 16, C / 64, 16, 32).
        scales: uint8 (R / 16, words, 16, 4), exponents of two, 127 more than they are.
        columns: C.
    """

    codes: Tensor
    scales: Tensor
    columns: int

    @classmethod
    def at(cls, codes: Tensor, scales: Tensor, rows: int, columns: int) -> Mxfp4Matrix:
        """In flat memory of `code_bytes` and `scale_bytes`."""
        strips, words = rows // TILE_ROWS, -(-columns // WORD_COLUMNS)
        return cls(
            codes.view(strips, columns // TILE_COLUMNS, TILE_ROWS, _TILE_ROW_BYTES),
            scales.view(strips, words, TILE_ROWS, _WORD_BYTES),
            columns,
        )

    @property
    def rows(self) -> int:
        """R."""
        return self.codes.shape[0] * TILE_ROWS

    def put(self, first_row: int, codes: Tensor, scales: Tensor) -> None:
        """Write rows from `first_row`, a multiple of 16, on; in RAM.

        Args:
            codes: uint8 (N, C / 2), two columns a byte, the first in its lower bits.
            scales: uint8 (N, C / 32).
        """
        strips = slice(first_row // TILE_ROWS, (first_row + len(codes)) // TILE_ROWS)
        put_tiles(codes, scales, self.codes[strips], self.scales[strips])

    def take(self) -> tuple[Tensor, Tensor]:
        """uint8 (R, C / 2) codes and (R, C / 32) scales, as `put` takes them."""
        scales = self.scales.transpose(1, 2).reshape(self.rows, -1)
        return take_codes(self.codes), scales[:, : self.columns // _BLOCK]


def put_tiles(codes: Tensor, scales: Tensor, tiles: Tensor, words: Tensor) -> None:
    """uint8 (N, C / 2) and (N, G), both as published -> (N / 16, C / 64, 16, 32), contiguous, and
    (N / 16, .., 16, 4) with four scales a word."""
    loops = _loops()
    if loops is not None:
        loops.put_tiles(*(tensor.numpy() for tensor in (codes, scales, tiles, words)))
        return
    tiles.copy_(_halves(codes.view(-1, TILE_ROWS, tiles.shape[1], _TILE_ROW_BYTES)).transpose(1, 2))
    whole = scales.shape[1] // _WORD_BYTES
    by_strip = scales.view(-1, TILE_ROWS, scales.shape[1])
    by_word = by_strip[:, :, : whole * _WORD_BYTES].unflatten(2, (whole, _WORD_BYTES))
    words[:, :whole].copy_(by_word.transpose(1, 2))
    rest = scales.shape[1] - whole * _WORD_BYTES
    if rest:
        words[:, whole, :, :rest].copy_(by_strip[:, :, -rest:])


def take_codes(tiles: Tensor) -> Tensor:
    """uint8 (N, C / 2) of codes, as `put_tiles` takes them."""
    return _pairs(tiles.transpose(1, 2)).reshape(len(tiles) * TILE_ROWS, -1)


def _loops() -> Any:
    return optional_loops("localmoe.kernels.mxfp4_loops", "MXFP4 is put into tiles")


def _halves(codes: Tensor) -> Tensor:
    """uint8 (.., 4 W) of pairs of neighbours -> each word's columns of even number, then those of odd."""
    words = codes.unflatten(-1, (-1, 2, 2))  # word, half of its columns, byte
    first, second = words[..., 0], words[..., 1]
    even = first & 15 | second << 4
    odd = first >> 4 | second & 240
    return torch.stack((even, odd), dim=-2).flatten(-3)


def _pairs(codes: Tensor) -> Tensor:
    """Undoes `_halves`."""
    words = codes.unflatten(-1, (-1, 2, 2))
    even, odd = words[..., 0, :], words[..., 1, :]
    first = even & 15 | odd << 4
    second = even >> 4 | odd & 240
    return torch.stack((first, second), dim=-1).flatten(-3)
