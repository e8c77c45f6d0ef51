"""What lies between the parts of a decoder layer whose parts have a norm before and behind them, with a dense
MLP beside the routed experts (Gemma 4): norms and sums of a row in one program. Decides nothing.

One program a row and a block that depends on the row's length alone, so bits do not depend on the row count.
Each norm rounds as kernels.gpu.norm does without an offset: before it multiplies, and behind.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch, without_modes
from localmoe.kernels.gpu.sizes import next_power_of_2


@without_modes
def enter_feed_forward(
    mixed: Tensor,
    residual: Tensor,
    behind: Tensor,
    before: tuple[Tensor, Tensor, Tensor],
    eps: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum behind attention, and three norms of it.

    Args:
        mixed, residual: (T, H), contiguous, bfloat16 or float16.
        behind: (H,) of the norm of `mixed`.
        before: (H,) each, of the dense MLP's, the experts' and the router's.
        scale: of what the last one gives, rounded again.

    Returns:
        residual + norm(mixed), and that sum's norms for the MLP, the experts and the router.
    """
    rows, length = _checked(mixed, residual)
    total, dense, routed, scores = (torch.empty_like(mixed) for _ in range(4))
    if rows:
        launch(
            _enter, (rows,),
            mixed, residual, behind, *before, total, dense, routed, scores, eps, scale, length,
            BLOCK=next_power_of_2(length), **after_previous(mixed.device), num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
    return total, dense, routed, scores


@without_modes
def leave_feed_forward(
    dense: Tensor,
    routed: Tensor,
    residual: Tensor,
    behind: tuple[Tensor, Tensor, Tensor],
    eps: float,
    factor: Tensor,
) -> Tensor:
    """(residual + norm(norm(dense) + norm(routed))) * factor.

    Args:
        dense, routed, residual: as of enter_feed_forward.
        behind: (H,) each, of the dense MLP's norm, the experts' and their sum's.
        factor: (1,).
    """
    rows, length = _checked(dense, routed, residual)
    out = torch.empty_like(residual)
    if rows:
        launch(
            _leave, (rows,),
            dense, routed, residual, *behind, factor, out, eps, length,
            BLOCK=next_power_of_2(length), **after_previous(dense.device), num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _checked(*tensors: Tensor) -> torch.Size:
    first = tensors[0]
    assert all(t.shape == first.shape and t.dtype == first.dtype for t in tensors), "of one shape and dtype"
    assert first.dim() == 2 and all(t.is_contiguous() for t in tensors), "rows one after another"
    return first.shape


@triton.jit
def _normed(value, length, eps, dtype: tl.constexpr):
    """Of a row in float32, rounded."""
    return (value * tl.rsqrt(tl.sum(value * value, 0) / length + eps)).to(dtype).to(tl.float32)


@triton.jit
def _times(value, weight, d, inside, dtype: tl.constexpr):
    return (value * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _enter(
    mixed, residual, behind, before_dense, before_routed, before_scores, total, dense, routed, scores,
    eps, scale, length, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT, SMALL=True)
    dtype: tl.constexpr = total.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * length
    d = tl.arange(0, BLOCK)
    inside = d < length
    at = row + d
    value = tl.load(mixed + at, mask=inside, other=0.0).to(tl.float32)
    value = _times(_normed(value, length, eps, dtype), behind, d, inside, dtype)
    value = (tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + value).to(dtype)
    tl.store(total + at, value, mask=inside)
    value = _normed(value.to(tl.float32), length, eps, dtype)
    tl.store(dense + at, _times(value, before_dense, d, inside, dtype).to(dtype), mask=inside)
    tl.store(routed + at, _times(value, before_routed, d, inside, dtype).to(dtype), mask=inside)
    value = _times(value, before_scores, d, inside, dtype) * scale
    tl.store(scores + at, value.to(dtype), mask=inside)


@triton.jit
def _leave(
    dense, routed, residual, behind_dense, behind_routed, behind, factor, out,
    eps, length, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT, SMALL=True)
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * length
    d = tl.arange(0, BLOCK)
    inside = d < length
    at = row + d
    value = tl.load(dense + at, mask=inside, other=0.0).to(tl.float32)
    value = _times(_normed(value, length, eps, dtype), behind_dense, d, inside, dtype)
    other = tl.load(routed + at, mask=inside, other=0.0).to(tl.float32)
    value += _times(_normed(other, length, eps, dtype), behind_routed, d, inside, dtype)
    value = _times(_normed(value.to(dtype).to(tl.float32), length, eps, dtype), behind, d, inside, dtype)
    value = (tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + value).to(dtype)
    value = value.to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(out + at, value.to(dtype), mask=inside)
