"""Add a gated shared expert to the routed ones: routed + sigmoid(x . w) * shared, in one kernel. Decides
nothing.

One program a row, so a row's bits do not depend on the others.
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
def add_gated(routed: Tensor, shared: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """routed + sigmoid(x w^T) * shared, summed in float32; gate and product are rounded as PyTorch would.

    Args:
        routed, shared, x: (T, H) of one dtype, contiguous. weight: (1, H).

    Returns:
        (T, H) of their dtype.
    """
    rows, hidden = x.shape
    assert weight.shape == (1, hidden) and routed.shape == shared.shape == x.shape, f"{weight.shape}"
    assert routed.is_contiguous() and shared.is_contiguous() and x.is_contiguous()
    out = torch.empty_like(x)
    block = next_power_of_2(hidden)
    launch(
        _add_gated, (rows,),
        routed, shared, x, weight, out, hidden,
        BLOCK=block, **after_previous(x.device), num_warps=8 if block > 1024 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["hidden"])
def _add_gated(routed, shared, x, weight, out, hidden, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    wait_for_previous(DEPENDENT, SMALL=True)
    h = tl.arange(0, BLOCK)
    inside = h < hidden
    at = tl.program_id(0).to(tl.int64) * hidden + h
    dtype: tl.constexpr = x.dtype.element_ty
    terms = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    terms *= tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(tl.sum(terms, 0).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    product = (gate * tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    total = tl.load(routed + at, mask=inside, other=0.0).to(tl.float32) + product
    tl.store(out + at, total.to(dtype), mask=inside)
