"""Weights published as four-bit floats (E2M1: sign, two bits of exponent, one of mantissa), two to a byte,
with a scale (E4M3) for 16 columns and one for the tensor: what they are. A weight is its code's value times
the product of its scales, in 32 bits, rounded to bfloat16. Reads no file.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localmoe.kernels.nvfp4_tiles import GROUP
from localmoe.quant.float8 import decode_into, values

# of a sign, two bits of exponent and one of mantissa
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack(codes: Tensor) -> Tensor:
    """uint8 (n,) of pairs, the first one in the lower bits -> uint8 (2 n,), the same numbers as E4M3."""
    return torch.from_numpy(np.take(_pairs(), codes.numpy()).view(np.uint8))


def scales_of(scales: Tensor, factor: float) -> Tensor:
    """float32 of E4M3 scales, of any shape, and the tensor's."""
    return values()[scales.long()] * factor


def decode_rows(codes: Tensor, scales: Tensor, factors: Tensor) -> Tensor:
    """bfloat16 (R, C) of codes, uint8 (R, C / 2), scales, uint8 (R, C / 16), and factors, float32 (R,)."""
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    out = torch.empty(rows * columns, dtype=torch.bfloat16)
    found = (values()[scales.long()] * factors[:, None])[None].contiguous()
    decode_into(unpack(codes.reshape(-1)), found, 0, columns, rows, (1, GROUP), out)
    return out.view(rows, columns)


@cache
def _pairs() -> NDArray[np.uint16]:
    """uint16 (256,): of a byte's two codes those of E4M3, the first one below."""
    numbers = torch.tensor([*_MAGNITUDES, *(-number for number in _MAGNITUDES)])
    codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint16)
    byte = np.arange(256)
    pairs: NDArray[np.uint16] = codes[byte & 15] | codes[byte >> 4] << 8
    return pairs
