"""A linear layer's weight in BF12 (kernels.bf12_tiles), one piece of a device's memory, packed strip by strip
in RAM as it is read. Multiplies nothing; see gpu.packed_linear.

Letters: N output features, R the same up to whole strips of 16 rows, C input features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localmoe.kernels.bf12_tiles import (
    TILE_COLUMNS,
    TILE_ROWS,
    WORD_BYTES,
    Bf12Matrix,
    code_bytes,
    num_bytes,
)

_MOST_COLUMNS = 1 << 15  # a stray's column has 16 bits
_MOST_WORDS = 1 << 31  # of codes: kernels count them in 32 bits


def can_be_packed(rows: int, columns: int) -> bool:
    """Whether a weight (N, C) can be kept so, as far as its shape tells: rows are filled up, columns not."""
    fits = columns % TILE_COLUMNS == 0 and 0 < columns <= _MOST_COLUMNS
    return fits and code_bytes(whole_strips(rows), columns) // WORD_BYTES < _MOST_WORDS


def whole_strips(rows: int) -> int:
    """R of N."""
    return -(-rows // TILE_ROWS) * TILE_ROWS


def packed_bytes(rows: int, columns: int) -> int:
    """Of a weight (N, C), all of it."""
    return num_bytes(whole_strips(rows), columns)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight (N, C) on a device.

    Attributes:
        memory: int32 (words,): tiles, and behind them what lies beside.
        rows, columns: N, C.
    """

    memory: Tensor
    rows: int
    columns: int

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> PackedWeight:
        """Nothing has been written to it yet."""
        words = packed_bytes(rows, columns) // WORD_BYTES
        return cls(torch.empty(words, dtype=torch.int32, device=device), rows, columns)

    @classmethod
    def stand_in(cls, rows: int, columns: int, device: torch.device) -> PackedWeight:
        """Takes no memory: only kernels that are compiled may be given it."""
        words = packed_bytes(rows, columns) // WORD_BYTES
        return cls(torch.zeros(1, dtype=torch.int32, device=device).expand(words), rows, columns)

    @property
    def codes(self) -> Tensor:
        """int32: the tiles."""
        return self.memory[: self._code_words]

    @property
    def side(self) -> Tensor:
        """int32: scales, places and values of strays."""
        return self.memory[self._code_words :]

    @property
    def _code_words(self) -> int:
        return code_bytes(whole_strips(self.rows), self.columns) // WORD_BYTES

    @property
    def _matrix(self) -> Bf12Matrix:
        codes, side = (part.view(torch.uint8) for part in (self.codes, self.side))
        return Bf12Matrix.at(codes, side, whole_strips(self.rows), self.columns)

    def put(self, first_row: int, weights: Tensor) -> None:
        """Write rows from `first_row`, a multiple of 16, on: whole strips, or all that are left. Threads may
        write different rows at once.

        Args:
            weights: bfloat16 (M, C), in RAM.

        Raises:
            UnpackableError: there is no room for a strip's strays, or numba does not work here.
        """
        count = len(weights)
        assert count % TILE_ROWS == 0 or first_row + count == self.rows, f"rows {first_row}, {count}"
        rows = whole_strips(count)
        if rows > count:  # rows of zeros, which nobody looks at
            weights = torch.cat((weights, weights.new_zeros(rows - count, self.columns)))
        packed = PackedWeight.empty(rows, self.columns, torch.device("cpu"))._matrix
        packed.put(0, weights)
        first = first_row // TILE_ROWS
        for to, part in zip(self._matrix.by_strip, packed.by_strip, strict=True):
            to[first : first + len(part)].copy_(part)

    def take(self) -> Tensor:
        """bfloat16 (N, C), where it lies."""
        return self._matrix.take()[: self.rows]
