"""Weights published as integers of four bits: what lies in words as codes of a row, and which 16-bit weights
these are. A weight is its integer less its zero point, times its scale, in 32 bits, rounded to bfloat16,
which is what transformers makes of it where scales are bfloat16. Reads no file.

Letters: R rows (output features), C columns (input features), G groups of columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.hub.safetensors_header import Packing
from localmoe.quant.float8 import decode_into

MIDDLE = 8  # the zero point of what is symmetric
_ZEROS = 17  # that there may be
_ONES = 0x11111111  # a word with each of its codes
_MIXED = (0, 2, 4, 6, 1, 3, 5, 7)  # of AWQ: what a word's codes belong to, from the lowest bits on


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """Weights of some rows, of which `group` columns side by side share a scale, or those of one place.

    Attributes:
        codes: uint8 (R, C / 2), two columns a byte, the first in its lower bits.
        scales: float32 (R, G). zeros: uint8 (R, G).
        places: int64 (C,), of each column; None: the columns of a group lie side by side.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group: int
    places: Tensor | None = None

    @property
    def columns(self) -> int:
        """C."""
        return 2 * self.codes.shape[1]

    def some(self, first: int, count: int) -> Int4Rows:
        """The same of some rows of these."""
        rows = slice(first, first + count)
        return Int4Rows(self.codes[rows], self.scales[rows], self.zeros[rows], self.group, self.places)

    def by_span(self, span: int) -> tuple[Tensor, Tensor] | None:
        """float32 and uint8 (R, C / span, rounded up): scales and zero points of so many columns side by
        side; None where these have several."""
        if self.places is not None or (self.group % span and self.group < self.columns):
            return None
        places = torch.arange(0, self.columns, span) // self.group
        return self.scales[:, places], self.zeros[:, places]

    def decode(self) -> Tensor:
        """bfloat16 (R, C)."""
        rows, columns = len(self.codes), self.columns
        out = torch.empty(rows * columns, dtype=torch.bfloat16)
        if self.places is None and self.group % 2 == 0:
            zeros = self.zeros.repeat_interleave(self.group // 2, dim=1)[:, : columns // 2]
            at = (zeros.short() << 8) + self.codes
            values = torch.from_numpy(np.take(_pairs(), at.numpy()).view(np.uint8))
            scales, group = self.scales, self.group
        else:
            places = torch.arange(columns) // self.group if self.places is None else self.places
            codes = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).view(rows, columns)
            zeros = self.zeros[:, places]
            values = torch.from_numpy(np.take(_integers(), (zeros.short() << 4) + codes))
            scales, group = self.scales[:, places], 1
        decode_into(values.view(-1), scales[None].contiguous(), 0, columns, rows, (1, group), out)
        return out.view(rows, columns)


def codes_of(words: Tensor, packing: Packing) -> Tensor:
    """int32 as it is stored -> uint8 (R, C / 2), contiguous."""
    if packing is Packing.ROWS:
        return words.view(torch.uint8)
    if packing is Packing.COLUMNS:
        return words.T.contiguous().view(torch.uint8)
    parts = words.view(torch.uint8).view(*words.shape, 4)
    even, odd = parts[0::2], parts[1::2]
    out = torch.empty(words.shape[1], len(_MIXED), len(words) // 2, dtype=torch.uint8)
    out[:, list(_MIXED[0::2])] = (even & 15 | odd << 4).permute(1, 2, 0)
    out[:, list(_MIXED[1::2])] = (even >> 4 | odd & 240).permute(1, 2, 0)
    return out.view(-1, len(words) // 2)


def zeros_of(stored: Tensor | None, packing: Packing, more: int, rows: int, groups: int) -> Tensor:
    """uint8 (R, G) of zero points as they are stored, `more` less than they are: as GPTQModel has it, of a
    word as one number, where a zero point of 0 borrows of its neighbour."""
    if stored is None:
        return torch.full((rows, groups), MIDDLE, dtype=torch.uint8)
    if stored.dtype is torch.int8:
        return (stored.clamp(-MIDDLE, MIDDLE) + MIDDLE).view(torch.uint8)
    parts = (stored + more * _ONES).view(torch.uint8).view(*stored.shape, 4)
    codes = torch.stack((parts & 15, parts >> 4), dim=-1).flatten(-2)
    if packing is Packing.MIXED:
        codes = codes[..., torch.tensor(_MIXED).argsort()]
    by_row = codes.transpose(1, 2).flatten(0, 1) if packing is Packing.ROWS else codes.flatten(1).T
    return by_row[:rows]


@cache
def _integers() -> NDArray[np.uint8]:
    """uint8 (17 * 16,): of a zero point and a code the integer as an eight-bit float, which is exact."""
    zero, code = torch.arange(_ZEROS)[:, None], torch.arange(16)[None]
    found = (code - zero).to(torch.float8_e4m3fn).view(torch.uint8).flatten()
    return np.ascontiguousarray(found.numpy())


@cache
def _pairs() -> NDArray[np.uint16]:
    """uint16 (17 * 256,): likewise of a byte's two codes, the first one below."""
    numbers = _integers().reshape(_ZEROS, 16).astype(np.uint16)
    byte = np.arange(256)
    pairs = numbers[:, byte & 15] | numbers[:, byte >> 4] << 8
    return np.ascontiguousarray(pairs.ravel(), dtype=np.uint16)
