"""Rows of a weight in BF12 as the bfloat16 numbers that they are: of an output head that is the input
embedding too. Decides nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.bf12_tiles import stray_room
from localmoe.kernels.gpu import bf12_weights as bf12
from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch
from localmoe.kernels.gpu.routed_experts import takes_ptx
from localmoe.kernels.gpu.sizes import cdiv, next_power_of_2
from localmoe.kernels.packed_weight import PackedWeight, whole_strips

_BLOCK = 512  # columns of a program


def packed_rows(ids: Tensor, weight: PackedWeight) -> Tensor:
    """The rows that ids name; what names none reads the first or the last one.

    Args:
        ids: int64 (T,), contiguous. weight: (N, C).

    Returns:
        bfloat16 (T, C), bit by bit what was packed.
    """
    assert ids.is_contiguous() and ids.dtype == torch.int64, f"{ids.dtype}, strides {ids.stride()}"
    out = torch.empty(ids.shape[0], weight.columns, dtype=torch.bfloat16, device=ids.device)
    if out.numel():
        block = min(_BLOCK, next_power_of_2(weight.columns))
        launch(
            _packed_rows, (ids.shape[0], cdiv(weight.columns, block)),
            ids, weight.codes, weight.side, out,
            N=weight.rows, R=whole_strips(weight.rows), C=weight.columns, S=stray_room(weight.columns),
            BLOCK=block, PTX=takes_ptx(out), **after_previous(ids.device), num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _packed_rows(
    ids, codes, side, out, N: tl.constexpr, R: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    BLOCK: tl.constexpr, PTX: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """R: N up to whole strips. S: strays that a strip may have."""
    wait_for_previous(DEPENDENT, SMALL=True)
    token = tl.program_id(0).to(tl.int64)
    row = tl.minimum(tl.maximum(tl.load(ids + token), 0), N - 1).to(tl.int32)
    start = tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    word = tl.arange(0, BLOCK // 8)  # of the first plane; eight columns each
    tile = start // 64 + word // 8
    words = codes + (row // 16 * (C // 64) + tile) * 384 + row % 16 * 8 + word % 8
    there = (start + word * 8 < C)[None, :]
    first = tl.load(words[None, :], mask=there, other=0)
    second = tl.load(words[None, :] + bf12.SECOND, mask=there, other=0)
    upper = tl.load(words[None, :] + bf12.UPPER, mask=there, other=0)
    scale = tl.load(side + row).to(tl.float32, bitcast=True)
    small = tl.reshape(bf12.decode(first, second, upper, BLOCK, PTX), (BLOCK,))
    # a product with a power of two, which the row's scale is, has the same bits but for the exponent
    bits = (small.to(tl.float32) * scale).to(tl.int32, bitcast=True) >> 16
    part = 0
    left = True
    while left:  # strays lie in the first places
        at = R + row // 16 * S + part * 16 + tl.arange(0, 16)
        places = tl.load(side + at)
        strays = tl.load(side + R // 16 * S + at) >> 16
        of_row = (places >= 0) & ((places >> 16) == row % 16)
        here = of_row[:, None] & ((places & 0xFFFF)[:, None] == column[None, :])
        found = tl.max(here.to(tl.int32), 0) > 0
        bits = tl.where(found, tl.sum(tl.where(here, strays[:, None], 0), 0), bits)
        part += 1
        left = (part < S // 16) & (tl.min(places, 0) >= 0)
    values = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(out + token * C + column, values, mask=column < C)
