"""Weights published as eight-bit floats (E4M3: sign, four bits of exponent, three of mantissa) with scales:
what 16-bit weights they are. A weight is its code's value times its scale, in 32 bits, rounded to bfloat16,
which is what transformers makes of it where it computes with 16 bits. Reads no file.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from localmoe.kernels.compiled_loops import optional_loops
from localmoe.kernels.fp8_tiles import SCALE_COLUMNS


def decode_into(
    codes: Tensor, scales: Tensor, first: int, columns: int, rows: int, block: tuple[int, int], out: Tensor
) -> None:
    """Of a tensor's weights those from `first` on, row after row.

    Args:
        codes: uint8 (n,), theirs.
        scales: float32 (M, R, C) of the tensor's M matrices.
        columns, rows: of a matrix.
        block: rows and columns that share a scale.
        out: bfloat16 (n,) in RAM, contiguous.
    """
    loops = _loops()
    if loops is None:
        out.copy_(_decoded(codes, scales, first, columns, rows, block))
        return
    bits = out.view(torch.int16).numpy()
    loops.decode_rows(codes.numpy(), scales.numpy(), first, columns, rows, *block, bits)


def decode_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 (R, C) of codes, uint8 (R, C), and scales of 128 columns each, float32 (R, C / 128)."""
    out = torch.empty(codes.numel(), dtype=torch.bfloat16)
    rows, columns = codes.shape
    flat = codes.contiguous().view(-1)
    decode_into(flat, scales[None].contiguous(), 0, columns, rows, (1, SCALE_COLUMNS), out)
    return out.view(rows, columns)


def _loops() -> Any:
    return optional_loops("localmoe.quant.float8_loops", "FP8 is decoded")


def _decoded(
    codes: Tensor, scales: Tensor, first: int, columns: int, rows: int, block: tuple[int, int]
) -> Tensor:
    places = torch.arange(first, first + len(codes))
    line, column = places // columns, places % columns
    found = scales[line // rows, line % rows // block[0], column // block[1]]
    return (values()[codes.long()] * found).to(torch.bfloat16)


@cache
def values() -> Tensor:
    """float32 (256,), of each code; of two it is no number."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
