"""Root-mean-square norm of rows, with or without a residual sum before it. Decides nothing.

One program a row and a block that depends on the row's length alone, so bits do not depend on the row count.
"""

from __future__ import annotations

from typing import overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch, without_modes
from localmoe.kernels.gpu.sizes import next_power_of_2


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: None = None,
    *,
    weight_offset: float = 0.0,
    scale: float = 1.0,
    factor: float = 1.0,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor,
    *,
    weight_offset: float = 0.0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]: ...


@without_modes
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    *,
    weight_offset: float = 0.0,
    scale: float = 1.0,
    factor: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Norm over the last dimension, as kernels.dense.reference_rms_norm.

    Args:
        x: (..., D) bfloat16, float16 or float32, of which two leading dimensions may have strides of their
            own (the heads of a fused projection need no copy).
        weight: (D,) of x.dtype or float32; None: ones.
        residual: like x, its strides may differ; x + residual is rounded to x.dtype before it is normed.
        scale: of x before it is added to that, rounded.
        factor: of what comes out, rounded before and behind.
        weight_offset: 1 for Gemma's factor 1 + weight, applied before the rounding.

    Returns:
        The normed rows, of x's shape and dtype and contiguous; with a residual also x + residual.
    """
    length = x.shape[-1]
    assert weight is None or (weight.shape == (length,) and weight.is_contiguous()), "one factor a column"
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    block = next_power_of_2(length)
    if y.numel():
        launch(
            _rms_norm, (y.numel() // length,),
            x, residual, weight, y, total, eps, scale, factor, length,
            *row_strides(x), *row_strides(x if residual is None else residual),
            OFFSET=weight_offset, SCALED=scale != 1.0, BEHIND=factor != 1.0, BLOCK=block,
            **after_previous(x.device),
            num_warps=1 if block <= 256 else 4 if block <= 4096 else 8,
            enable_fp_fusion=False,
        )  # fmt: skip
    return y if residual is None else (y, total)


def row_strides(x: Tensor) -> tuple[int, int, int, int]:
    """(inner, outer stride, inner stride, column stride) of the rows of (..., D), row r lying at
    r // inner * outer stride + r % inner * inner stride.

    Strides of dimensions of size 1 are kept where there is room: what Triton knows of their alignment shapes
    the order of a row's sum, which must not change with the number of rows.
    """
    dims = list(zip(x.shape[:-1], x.stride()[:-1], strict=True))
    while len(dims) > 2:
        at = next((i for i in range(len(dims) - 1) if _merge(*dims[i : i + 2]) is not None), None)
        assert at is not None, f"rows of shape {tuple(x.shape)} and strides {x.stride()} need a third stride"
        dims[at : at + 2] = [_merge(*dims[at : at + 2]) or (0, 0)]
    dims = dims or [(1, 0)]
    return dims[-1][0], dims[0][1], dims[-1][1], x.stride(-1)


def _merge(outer: tuple[int, int], inner: tuple[int, int]) -> tuple[int, int] | None:
    """Two (size, stride) dimensions as one, or None."""
    if outer[0] == 1:
        return inner
    if inner[0] == 1:
        return outer
    return (outer[0] * inner[0], inner[1]) if outer[1] == inner[0] * inner[1] else None


@triton.jit(do_not_specialize=["x_inner", "r_inner"])
def _rms_norm(
    x, residual, weight, y, total, eps, by, behind, length,
    x_inner, x_outer_stride, x_inner_stride, x_col, r_inner, r_outer_stride, r_inner_stride, r_col,
    OFFSET: tl.constexpr, SCALED: tl.constexpr, BEHIND: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT, SMALL=True)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < length
    x_at = x + (row // x_inner) * x_outer_stride + (row % x_inner) * x_inner_stride
    value = tl.load(x_at + d * x_col, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = y.dtype.element_ty
    if residual is not None:
        r_at = residual + (row // r_inner) * r_outer_stride + (row % r_inner) * r_inner_stride
        added = tl.load(r_at + d * r_col, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            value = (value * by).to(dtype).to(tl.float32)
        rounded = (value + added).to(dtype)
        tl.store(total + row * length + d, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / length + eps)
    normed = value * scale
    if weight is not None:
        factor = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
        # Llama rounds before it multiplies; Gemma, with an offset, only after
        normed = normed.to(dtype).to(tl.float32) * factor if OFFSET == 0.0 else normed * (OFFSET + factor)
    if BEHIND:
        normed = normed.to(dtype).to(tl.float32) * behind
    tl.store(y + row * length + d, normed.to(dtype), mask=inside)
