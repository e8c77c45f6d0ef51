"""Products of each head's part of a row with the head's own 16-bit weights; a row's bits do not depend on the
other rows, as in `linear`. Decides nothing about where weights lie.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.configs import head_tile_config
from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch
from localmoe.kernels.gpu.sizes import cdiv


def head_linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x[:, h] W[h]^T for every head h, summed in float32 and rounded once.

    Args:
        x: (T, heads, K) bfloat16 or float16, any strides. weight: (heads, N, K) of its dtype, any strides.
        out: (T, heads, N), contiguous, to write to.

    Returns:
        (T, heads, N), contiguous.
    """
    rows, heads, depth = x.shape
    columns = weight.shape[1]
    assert weight.shape == (heads, columns, depth) and weight.dtype == x.dtype, f"{weight.shape}, {x.shape}"
    if out is None:
        out = torch.empty((rows, heads, columns), dtype=x.dtype, device=x.device)
    together = weight.stride(1) == 1
    config = head_tile_config(depth, rows, columns_together=together)
    launch(
        _head_linear, (cdiv(rows, config.block_m), cdiv(columns, config.block_n), heads),
        x, weight, out, rows, *x.stride(), *weight.stride(), COLUMNS_TOGETHER=together,
        N=columns, K=depth, BM=config.block_m, BN=config.block_n, BK=config.block_k,
        **after_previous(x.device), num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _head_linear(
    x, weight, y, rows, x_row, x_head, x_col, weight_head, weight_row, weight_col,
    COLUMNS_TOGETHER: tl.constexpr, DEPENDENT: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    head, heads = tl.program_id(2), tl.num_programs(2)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    in_rows = (m < rows)[:, None]
    x_at = x + head * x_head + m[:, None].to(tl.int64) * x_row + k[None, :] * x_col
    w_at = weight + head.to(tl.int64) * weight_head
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        a = tl.load(x_at + start * x_col, mask=in_rows & (start + k < K)[None, :], other=0.0)
        if COLUMNS_TOGETHER:  # a tile as it lies in memory
            inside = (start + k < K)[:, None] & (n < N)[None, :]
            b = tl.load(w_at + (start + k)[:, None] * weight_col + n[None, :], mask=inside, other=0.0)
        else:
            inside = (n < N)[:, None] & (start + k < K)[None, :]
            w = tl.load(
                w_at + n[:, None] * weight_row + (start + k)[None, :] * weight_col, mask=inside, other=0.0
            )
            b = tl.trans(w)
        acc = tl.dot(a, b, acc)
    at = y + (m[:, None].to(tl.int64) * heads + head) * N + n[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), mask=in_rows & (n < N)[None, :])
