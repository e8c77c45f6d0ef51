"""Products of few rows with large 16-bit weights: exact ones, whose row bits do not depend on the other rows,
and one-row ones. Decides neither which weights there are nor which of the two a caller wants.

Exact: rows are padded to tensor-core tiles and K is summed in order by one program, so a row meets the same
instructions with 1 or 1024 rows around it. Fused multiply-add is off in the rest, so that the block sizes of
another row count cannot change a rounding either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.activations import Activation
from localmoe.kernels.dense import SILU
from localmoe.kernels.gpu.activations import apply_activation
from localmoe.kernels.gpu.configs import (
    RowConfig,
    TileConfig,
    num_multiprocessors,
    row_config,
    tile_config,
)
from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch, without_modes
from localmoe.kernels.gpu.sizes import cdiv


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: TileConfig | None = None,
) -> Tensor:
    """x W^T + bias, summed in float32 and rounded once; a row's bits do not depend on the other rows.

    Args:
        x: (T, K) bfloat16 or float16, any strides. weight: (N, K) of its dtype, rows contiguous. bias: (N,).
        residual: (T, N), added after the rounding and rounded again, as two PyTorch operations would.
        out_dtype: float32, or by default x.dtype.
        config: blocks other than tile_config's.

    Returns:
        (T, N), contiguous.
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    _check(x, weight, depth)
    if config is None:
        config = tile_config(columns, depth, rows, num_multiprocessors(x.device))
    y = torch.empty((rows, columns), dtype=out_dtype or x.dtype, device=x.device)
    row_tiles = cdiv(rows, config.block_m)
    launch(
        _linear, (row_tiles, cdiv(columns, config.block_n)),
        x, weight, bias, residual, y, rows, columns,
        x.stride(0), x.stride(1), weight.stride(0), *_strides(residual),
        K=depth,
        BM=config.block_m, BN=config.block_n, BK=config.block_k, **after_previous(x.device),
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return y


@without_modes
def linear_gated(
    x: Tensor, weight: Tensor, *, activation: Activation = SILU, config: TileConfig | None = None
) -> Tensor:
    """act(gate) * up of x W^T, in float32 and rounded once; row bits as in `linear`.

    Args:
        x: (T, K) bfloat16 or float16, any strides. weight: (2I, K) = [gate; up], rows contiguous.
        config: blocks other than tile_config's; block_n counts columns of gate alone.

    Returns:
        (T, I), contiguous.
    """
    (rows, depth), inner = x.shape, weight.shape[0] // 2
    _check(x, weight, depth)
    if config is None:
        config = tile_config(inner, depth, rows, num_multiprocessors(x.device), matrices=2)
    y = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    row_tiles = cdiv(rows, config.block_m)
    launch(
        _linear_gated, (row_tiles, cdiv(inner, config.block_n)),
        x, weight, y, rows, inner, x.stride(0), x.stride(1), weight.stride(0),
        KIND=activation.kind, ALPHA=activation.alpha, LIMIT=activation.limit,
        K=depth,
        BM=config.block_m, BN=config.block_n, BK=config.block_k, **after_previous(x.device),
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: RowConfig | None = None,
) -> Tensor:
    """`linear` of one row, faster and in another order of summation: x (1, K) -> (1, N)."""
    (rows, depth), columns = x.shape, weight.shape[0]
    assert rows == 1, f"{rows} rows"
    _check(x, weight, depth)
    if config is None:
        config = row_config(columns, depth, num_multiprocessors(x.device))
    y = torch.empty((1, columns), dtype=out_dtype or x.dtype, device=x.device)
    launch(
        _gemv, (cdiv(columns, config.block_n),),
        x, weight, bias, residual, y, columns, x.stride(1), weight.stride(0), _strides(residual)[1],
        K=depth, BN=config.block_n, BK=config.block_k, **after_previous(x.device), num_warps=config.warps,
    )  # fmt: skip
    return y


def gemv_gated(
    x: Tensor, weight: Tensor, *, activation: Activation = SILU, config: RowConfig | None = None
) -> Tensor:
    """`linear_gated` of one row, faster and in another order of summation: x (1, K) -> (1, I)."""
    (rows, depth), inner = x.shape, weight.shape[0] // 2
    assert rows == 1, f"{rows} rows"
    _check(x, weight, depth)
    if config is None:
        config = row_config(inner, depth, num_multiprocessors(x.device), matrices=2)
    y = torch.empty((1, inner), dtype=x.dtype, device=x.device)
    launch(
        _gemv_gated, (cdiv(inner, config.block_n),),
        x, weight, y, inner, x.stride(1), weight.stride(0),
        KIND=activation.kind, ALPHA=activation.alpha, LIMIT=activation.limit,
        K=depth, BN=config.block_n, BK=config.block_k, **after_previous(x.device), num_warps=config.warps,
    )  # fmt: skip
    return y


def _check(x: Tensor, weight: Tensor, depth: int) -> None:
    assert weight.shape[1] == depth and weight.stride(1) == 1, "weight rows are contiguous and as long as x"
    assert x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16), f"{x.dtype}"


def _strides(residual: Tensor | None) -> tuple[int, int]:
    return (0, 0) if residual is None else (residual.stride(0), residual.stride(1))


# a row count by itself, or its alignment, makes no other kernel: it only masks
@triton.jit(do_not_specialize=["rows", "columns"])
def _linear(
    x, weight, bias, residual, y, rows, columns, x_row, x_col, weight_row, residual_row, residual_col,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    m = tl.program_id(0) * BM + tl.arange(0, BM)  # row tiles of one weight tile run side by side
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    in_rows = (m < rows)[:, None]
    n_read = tl.where(n < columns, n, 0)  # columns past the end read row 0 and are not stored
    x_at = x + m[:, None].to(tl.int64) * x_row + k[None, :] * x_col
    w_at = weight + n_read[:, None].to(tl.int64) * weight_row + k[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    EVICT: tl.constexpr = "evict_first" if BM < 64 else ""  # a prompt's many row tiles share the weights
    for start in range(0, K, BK):
        if K % BK == 0:
            a = tl.load(x_at + start * x_col, mask=in_rows, other=0.0)
            b = tl.load(w_at + start, eviction_policy=EVICT)
        else:
            in_k = (start + k < K)[None, :]
            a = tl.load(x_at + start * x_col, mask=in_rows & in_k, other=0.0)
            b = tl.load(w_at + start, mask=in_k, other=0.0, eviction_policy=EVICT)
        acc = tl.dot(a, tl.trans(b), acc)
    if bias is not None:
        acc += tl.load(bias + n_read).to(tl.float32)[None, :]
    out = acc.to(y.dtype.element_ty)
    inside = in_rows & (n < columns)[None, :]
    if residual is not None:
        r_at = residual + m[:, None].to(tl.int64) * residual_row + n[None, :] * residual_col
        out = (out.to(tl.float32) + tl.load(r_at, mask=inside, other=0.0).to(tl.float32)).to(out.dtype)
    tl.store(y + m[:, None].to(tl.int64) * columns + n[None, :], out, mask=inside)


@triton.jit(do_not_specialize=["rows", "inner"])
def _linear_gated(
    x, weight, y, rows, inner, x_row, x_col, weight_row,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    in_rows = (m < rows)[:, None]
    n_read = tl.where(n < inner, n, 0)
    x_at = x + m[:, None].to(tl.int64) * x_row + k[None, :] * x_col
    gate_at = weight + n_read[:, None].to(tl.int64) * weight_row + k[None, :]
    up_at = gate_at + inner.to(tl.int64) * weight_row
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    EVICT: tl.constexpr = "evict_first" if BM < 64 else ""
    for start in range(0, K, BK):
        if K % BK == 0:
            a = tl.load(x_at + start * x_col, mask=in_rows, other=0.0)
            g = tl.load(gate_at + start, eviction_policy=EVICT)
            u = tl.load(up_at + start, eviction_policy=EVICT)
        else:
            in_k = (start + k < K)[None, :]
            a = tl.load(x_at + start * x_col, mask=in_rows & in_k, other=0.0)
            g = tl.load(gate_at + start, mask=in_k, other=0.0, eviction_policy=EVICT)
            u = tl.load(up_at + start, mask=in_k, other=0.0, eviction_policy=EVICT)
        gate = tl.dot(a, tl.trans(g), gate)
        up = tl.dot(a, tl.trans(u), up)
    out = apply_activation(gate, up, KIND, ALPHA, LIMIT).to(y.dtype.element_ty)
    at = m[:, None].to(tl.int64) * inner + n[None, :]
    tl.store(y + at, out, mask=in_rows & (n < inner)[None, :])


@triton.jit(do_not_specialize=["columns"])
def _gemv(
    x, weight, bias, residual, y, columns, x_col, weight_row, residual_col,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < columns
    n_read = tl.where(inside, n, 0)
    k = tl.arange(0, BK)
    w_at = weight + n_read[:, None].to(tl.int64) * weight_row + k[None, :]
    acc = tl.zeros([BN, BK], tl.float32)
    for start in tl.static_range(0, K, BK):  # unrolled: all loads of a program can be in flight at once
        in_k = start + k < K
        a = tl.load(x + (start + k) * x_col, mask=in_k, other=0.0).to(tl.float32)
        w = tl.load(w_at + start, mask=in_k[None, :], other=0.0, eviction_policy="evict_first")
        acc += a[None, :] * w.to(tl.float32)
    total = tl.sum(acc, 1)
    if bias is not None:
        total += tl.load(bias + n_read).to(tl.float32)
    out = total.to(y.dtype.element_ty)
    if residual is not None:
        added = tl.load(residual + n * residual_col, mask=inside, other=0.0).to(tl.float32)
        out = (out.to(tl.float32) + added).to(out.dtype)
    tl.store(y + n, out, mask=inside)


@triton.jit(do_not_specialize=["inner"])
def _gemv_gated(
    x, weight, y, inner, x_col, weight_row,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < inner
    k = tl.arange(0, BK)
    gate_at = weight + tl.where(inside, n, 0)[:, None].to(tl.int64) * weight_row + k[None, :]
    up_at = gate_at + inner.to(tl.int64) * weight_row
    gate = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    for start in tl.static_range(0, K, BK):
        in_k = start + k < K
        a = tl.load(x + (start + k) * x_col, mask=in_k, other=0.0).to(tl.float32)[None, :]
        g = tl.load(gate_at + start, mask=in_k[None, :], other=0.0, eviction_policy="evict_first")
        u = tl.load(up_at + start, mask=in_k[None, :], other=0.0, eviction_policy="evict_first")
        gate += a * g.to(tl.float32)
        up += a * u.to(tl.float32)
    out = apply_activation(tl.sum(gate, 1), tl.sum(up, 1), KIND, ALPHA, LIMIT)
    tl.store(y + n, out.to(y.dtype.element_ty), mask=inside)
