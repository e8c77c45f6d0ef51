"""BF12: bfloat16 weights in twelve bits, without loss, and how such a matrix lies in memory.

A trained matrix uses few of bfloat16's 256 exponents: within a row, those of the largest weights and 14 below
are enough for all but one weight in some thousands. So a weight is a sign, seven bits of mantissa and four
bits that count from a power of two of its row; 0 is zero. Weights that this leaves out are kept beside,
whole: the strays. What is read of a matrix is three quarters of what it was, and the numbers are the same.

A tile, 16 rows of 64 columns, is one piece of memory, tiles follow each other down a strip of 16 rows. It has
three planes of words of 32 bits, eight to a row, each for eight columns: the lower bytes of the first four
columns, those of the last four, and the upper bits of all. Put together, the bytes of a weight are a bfloat16
whose exponent is the four bits: 2^-112 times, and a power of two of its row's, what the weight is.

Letters: R rows (output features), C columns (input features).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localmoe.kernels.compiled_loops import optional_loops

TILE_ROWS = 16
TILE_COLUMNS = 64
PLANES = 3
WORD_BYTES = 4
TILE_WORDS = TILE_ROWS * TILE_COLUMNS * PLANES // 8
UP = 2.0**112  # from a weight's bytes, taken for a bfloat16, to the weight in units of its row's scale
_PLANE_ROW_BYTES = TILE_COLUMNS // 2
# There is room for more than one in so many: a normal distribution has one in 6,000 to 7,000, Student's with
# three degrees of freedom one in 1,200 to 2,000 (benchmarks/packing_strays.py).
_WEIGHTS_A_STRAY = 512
_STRAYS_AT_ONCE = 16  # that a GPU reads
NOWHERE = -1  # place of a stray that is none; it and those behind it in a strip are not looked at


class UnpackableError(Exception):
    """A matrix cannot be packed: its model keeps its 16 bits. lasting: it is the matrix that does not allow
    it."""

    def __init__(self, reason: str, *, lasting: bool = True) -> None:
        super().__init__(reason)
        self.lasting = lasting


def can_be_tiled(rows: int, columns: int) -> bool:
    """Whether a matrix is made of whole tiles, and its places fit into 16 bits each."""
    return rows % TILE_ROWS == 0 and columns % TILE_COLUMNS == 0 and max(rows, columns) <= 1 << 15


def code_bytes(rows: int, columns: int) -> int:
    """Of a matrix's tiles."""
    return rows * columns * 12 // 8


def stray_room(columns: int) -> int:
    """Strays that a strip may have, a multiple of 16; a handful more than its share, for narrow strips."""
    wanted = TILE_ROWS * columns // _WEIGHTS_A_STRAY + _STRAYS_AT_ONCE
    return -(-wanted // _STRAYS_AT_ONCE) * _STRAYS_AT_ONCE


def side_words(rows: int, columns: int) -> int:
    """Words of what lies beside a matrix's tiles: scales, places, values."""
    return rows + 2 * rows // TILE_ROWS * stray_room(columns)


def num_bytes(rows: int, columns: int) -> int:
    """Of a matrix, all of it."""
    return code_bytes(rows, columns) + WORD_BYTES * side_words(rows, columns)


@dataclass(frozen=True, slots=True)
class Bf12Matrix:
    """A matrix (R, C) in memory, of any device.

    Attributes:
        codes: uint8 (R / 16, C / 64, 3, 16, 32).
        scales: float32 (R,), powers of two.
        places: int32 (R / 16, S), of the strays of each strip: row in it << 16 | column, row by row.
        values: float32 (R / 16, S), what is there.
    """

    codes: Tensor
    scales: Tensor
    places: Tensor
    values: Tensor

    @classmethod
    def at(cls, codes: Tensor, side: Tensor, rows: int, columns: int) -> Bf12Matrix:
        """In flat bytes: `code_bytes`, and four times `side_words`."""
        strips, room = rows // TILE_ROWS, stray_room(columns)
        sizes = [WORD_BYTES * words for words in (rows, strips * room, strips * room)]
        scales, places, values = side.split(sizes)
        return cls(
            codes.view(strips, columns // TILE_COLUMNS, PLANES, TILE_ROWS, _PLANE_ROW_BYTES),
            scales.view(torch.float32),
            places.view(torch.int32).view(strips, room),
            values.view(torch.float32).view(strips, room),
        )

    @property
    def rows(self) -> int:
        """R."""
        return self.codes.shape[0] * TILE_ROWS

    @property
    def columns(self) -> int:
        """C."""
        return self.codes.shape[1] * TILE_COLUMNS

    @property
    def by_strip(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of it, strips first."""
        return self.codes, self.scales.view(-1, TILE_ROWS), self.places, self.values

    def put(self, first_row: int, weights: Tensor) -> None:
        """Write rows from `first_row`, a multiple of 16, on; in RAM.

        Args:
            weights: bfloat16 (N, C), N a multiple of 16.

        Raises:
            UnpackableError: there is no room for a strip's strays, or numba does not work here.
        """
        assert first_row % TILE_ROWS == 0 == len(weights) % TILE_ROWS, f"rows {first_row}, {len(weights)}"
        try:
            loops = _loops()
        except Exception as error:  # numba's compiler may fail in any way
            raise UnpackableError(f"numba fails: {error!r}", lasting=False) from error
        if loops is None:
            raise UnpackableError("numba does not work here", lasting=False)
        codes, words = self.codes.numpy().view(np.uint32), weights.view(torch.int16).numpy().view(np.uint16)
        bits = self.values.view(torch.int32).numpy()
        if not loops.pack_rows(first_row, words, codes, self.scales.numpy(), self.places.numpy(), bits):
            room = self.places.shape[1]
            raise UnpackableError(f"more than {room} of 16 x {self.columns} weights have rare exponents")

    def take(self) -> Tensor:
        """bfloat16 (R, C), where the matrix lies."""
        loops = None if self.codes.device.type != "cpu" else _loops()
        if loops is None:
            return self._take_by_pytorch()
        weights = torch.empty(self.rows, self.columns, dtype=torch.bfloat16)
        tensors = (self.codes, self.scales.view(torch.int32), self.places, self.values.view(torch.int32))
        loops.unpack_rows(*(tensor.numpy() for tensor in tensors), weights.view(torch.int16).numpy())
        return weights

    def _take_by_pytorch(self) -> Tensor:
        first, second, upper = (plane.unflatten(-1, (8, 4)) for plane in self.codes.unbind(2))
        lower = torch.stack((first, second), dim=-2)  # (strips, tiles, 16, 8 words, 2, 4)
        signs = torch.stack((upper & 0x80, upper << 1 & 0x80), dim=-2)
        uppers = signs | torch.stack((upper, upper >> 3), dim=-2) & 7
        small = torch.stack((lower, uppers), dim=-1).flatten(-4).view(torch.bfloat16)
        units = small.transpose(1, 2).reshape(self.rows, self.columns).float()
        weights = units.mul_(UP).mul_(self.scales[:, None]).to(torch.bfloat16)
        strips, slots = (self.places != NOWHERE).long().cumprod(1).nonzero(as_tuple=True)
        places = self.places[strips, slots].long()
        bits = self.values.view(torch.int32)[strips, slots] >> 16  # a NaN's too
        rows = strips * TILE_ROWS + (places >> 16)
        weights.view(torch.int16)[rows, places & 0xFFFF] = bits.to(torch.int16)
        return weights


def _loops() -> Any:
    return optional_loops("localmoe.kernels.bf12_loops", "Packed weights are unpacked")
