"""The sum of two tensors, as a kernel of the chain that passes are (see dependent). Decides nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch, without_modes
from localmoe.kernels.gpu.sizes import cdiv

_BLOCK = 1024


@without_modes
def add(a: Tensor, b: Tensor, *, scale: float = 1.0) -> Tensor:
    """a + scale * b of one shape and dtype, both contiguous; the product is rounded, and the sum."""
    assert a.shape == b.shape and a.dtype == b.dtype, f"{a.shape} {a.dtype}, {b.shape} {b.dtype}"
    assert a.is_contiguous() and b.is_contiguous(), f"strides {a.stride()}, {b.stride()}"
    out = torch.empty_like(a)
    if out.numel():
        launch(
            _add, (cdiv(out.numel(), _BLOCK),),
            a, b, out, out.numel(), scale, SCALED=scale != 1.0, BLOCK=_BLOCK,
            **after_previous(a.device), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _add(a, b, out, count, scale, SCALED: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    wait_for_previous(DEPENDENT, SMALL=True)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    added = tl.load(b + at, mask=at < count).to(tl.float32)
    if SCALED:
        added = (added * scale).to(out.dtype.element_ty).to(tl.float32)
    total = tl.load(a + at, mask=at < count).to(tl.float32) + added
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)
