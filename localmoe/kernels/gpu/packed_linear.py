"""Products of few rows with a large weight in BF12: exact ones, whose row bits do not depend on the other
rows, and one-row ones. Decides neither which weights are packed nor which of the two a caller wants.

Exact: as of kernels.gpu.linear, rows are padded to tensor-core tiles and K is summed in order by one program,
64 columns in a turn whatever the number of rows; scales are powers of two, strays are added behind the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.bf12_tiles import TILE_ROWS, stray_room
from localmoe.kernels.gpu import bf12_weights as bf12
from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch
from localmoe.kernels.gpu.routed_experts import takes_ptx
from localmoe.kernels.gpu.sizes import cdiv
from localmoe.kernels.packed_weight import PackedWeight, whole_strips


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of x, strips of sixteen weight rows, columns of a turn, warps, stages of the pipeline."""

    rows: int
    strips: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class OneRow:
    """Rows of a strip that a program takes, columns of a turn, warps."""

    rows: int
    depth: int
    warps: int


# Measured on an H100 (benchmarks/packed_linear.py). Two warps keep 32 rows on mma.m16n8k16, as one keeps 16.
_FEW, _WINDOW = Tile(16, 2, 64, 2, 5), Tile(32, 2, 64, 2, 5)
_ONE_ROW = OneRow(4, 2048, 4)  # elsewhere a third of a turn is masked, and the exact product is faster


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """x W^T + bias, summed in float32 and rounded once; a row's bits do not depend on the other rows.

    Args:
        x: (T, K) bfloat16. weight: (N, K). bias: (N,).
        out_dtype: float32, or by default x.dtype.
        tile: other blocks; the bits of a row depend on its depth.

    Returns:
        (T, N), contiguous.
    """
    x, rows = _checked(x, weight), x.shape[0]
    if tile is None:
        tile = _FEW if rows <= _FEW.rows else _WINDOW
    y = torch.empty((rows, weight.rows), dtype=out_dtype or x.dtype, device=x.device)
    grid = cdiv(rows, tile.rows), cdiv(weight.rows, TILE_ROWS * tile.strips)
    launch(
        _packed_linear, grid,
        x, weight.codes, weight.side, bias, y, rows,
        N=weight.rows, R=whole_strips(weight.rows), K=weight.columns, S=stray_room(weight.columns),
        BM=tile.rows, STRIPS=tile.strips, BK=tile.depth, STAGES=tile.stages, PTX=takes_ptx(x),
        **after_previous(x.device), num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def packed_row(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    blocks: OneRow | None = None,
) -> Tensor:
    """`packed_linear` of one row, where that is faster in another order of summation: x (1, K) -> (1, N)."""
    assert x.shape[0] == 1, f"{x.shape[0]} rows"
    if blocks is None and weight.columns % _ONE_ROW.depth:
        return packed_linear(x, weight, bias, out_dtype=out_dtype)
    x, blocks = _checked(x, weight), blocks or _ONE_ROW
    y = torch.empty((1, weight.rows), dtype=out_dtype or x.dtype, device=x.device)
    launch(
        _packed_row, (cdiv(weight.rows, blocks.rows),),
        x, weight.codes, weight.side, bias, y,
        N=weight.rows, R=whole_strips(weight.rows), K=weight.columns, S=stray_room(weight.columns),
        BN=blocks.rows, BK=blocks.depth, PTX=takes_ptx(x), **after_previous(x.device), num_warps=blocks.warps,
    )  # fmt: skip
    return y


def _checked(x: Tensor, weight: PackedWeight) -> Tensor:
    assert x.shape[1] == weight.columns, f"{x.shape[1]} columns, not {weight.columns}"
    assert x.dtype == torch.bfloat16, f"{x.dtype}"
    return x.contiguous()


@triton.jit
def _words_at(n, K: tl.constexpr, BK: tl.constexpr):
    """Where the first plane's words (N, BK / 8) of rows n are, of columns 0 to BK."""
    word = tl.arange(0, BK // 8)
    strip = n // 16 * (K // 64 * 384) + n % 16 * 8
    return strip[:, None] + (word // 8 * 384 + word % 8)[None, :]


@triton.jit
def _planes(words, first, K: tl.constexpr, BK: tl.constexpr):
    """Three planes' words of BK columns, those past the end zero. words: pointers of columns `first` on."""
    if K % BK == 0:
        a, b, c = bf12.load_words(words, words, False)
    else:
        there = (first + tl.arange(0, BK // 8) * 8 < K)[None, :]
        a = tl.load(words, mask=there, other=0, eviction_policy="evict_first")
        b = tl.load(words + bf12.SECOND, mask=there, other=0, eviction_policy="evict_first")
        c = tl.load(words + bf12.UPPER, mask=there, other=0, eviction_policy="evict_first")
    return a, b, c


@triton.jit(do_not_specialize=["rows"])  # a row count makes no other kernel: it only masks
def _packed_linear(
    x, codes, side, bias, y, rows,
    N: tl.constexpr, R: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BM: tl.constexpr,
    STRIPS: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """R: N up to whole strips. S: strays that a strip may have."""
    wait_for_previous(DEPENDENT)
    BN: tl.constexpr = 16 * STRIPS
    m = tl.program_id(0) * BM + tl.arange(0, BM)  # row tiles of one weight tile run side by side
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = m < rows
    n_read = tl.where(n < R, n, 0)  # a strip past the end reads the first rows and is not stored
    k = tl.arange(0, BK)
    x_rows = x + m.to(tl.int64) * K
    words = codes + _words_at(n_read, K, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            a = tl.load(x_rows[:, None] + (start + k)[None, :], mask=ok[:, None], other=0.0)
        else:
            inside = ok[:, None] & (start + k < K)[None, :]
            a = tl.load(x_rows[:, None] + (start + k)[None, :], mask=inside, other=0.0)
        first, second, upper = _planes(words + start * 6, start, K, BK)
        acc = bf12.dot(a, tl.trans(bf12.decode(first, second, upper, BK, PTX)), acc, PTX)
    acc = acc * tl.load(side + n_read).to(tl.float32, bitcast=True)[None, :]
    for s in tl.static_range(STRIPS):
        strip = tl.program_id(1) * STRIPS + s
        part = 0
        left = strip * 16 < R
        while left:  # strays lie in the first places
            places, values = bf12.load_strays(side, side, strip, part, R, S, False)
            there = places >= 0
            column = places & 0xFFFF
            stray = tl.load(x_rows[:, None] + column[None, :], mask=ok[:, None] & there[None, :], other=0.0)
            here = ((places >> 16) + 16 * s)[:, None] == tl.arange(0, BN)[None, :]
            weights = tl.where(here & there[:, None], values[:, None], 0.0).to(stray.dtype)
            acc = bf12.dot(stray, weights, acc, PTX)
            part += 1
            left = (part < S // 16) & (tl.min(places, 0) >= 0)
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=ok[:, None] & (n < N)[None, :])


@triton.jit
def _packed_row(
    x, codes, side, bias, y,
    N: tl.constexpr, R: tl.constexpr, K: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PTX: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    n = tl.program_id(0) * BN + tl.arange(0, BN)  # of one strip
    strip = tl.program_id(0) * BN // 16
    places, values = bf12.load_strays(side, side, strip, 0, R, S, False)
    words = codes + _words_at(n, K, BK)
    k = tl.arange(0, BK)
    sums = tl.zeros([BN, BK], tl.float32)
    for start in tl.static_range(0, K, BK):
        a = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        first, second, upper = _planes(words + start * 6, start, K, BK)
        sums += a[None, :] * bf12.decode(first, second, upper, BK, PTX).to(tl.float32)
    total = tl.sum(sums, 1) * tl.load(side + n).to(tl.float32, bitcast=True)
    part = 0
    left = True
    while left:
        stray = tl.load(x + (places & 0xFFFF), mask=places >= 0, other=0.0).to(tl.float32)
        here = (places[None, :] >= 0) & ((places >> 16)[None, :] == (n % 16)[:, None])
        total += tl.sum(tl.where(here, (stray * values)[None, :], 0.0), 1)
        part += 1
        left = (part < S // 16) & (tl.min(places, 0) >= 0)
        if left:
            places, values = bf12.load_strays(side, side, strip, part, R, S, False)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + n, total.to(y.dtype.element_ty), mask=n < N)
