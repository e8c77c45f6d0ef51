"""Fetch words from memory of the host by a kernel. Decides nothing."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.launch import launch

_BLOCK = 256  # words of a program


def fetch(address: int, out: Tensor) -> None:
    """Fill `out`, int64 (N,) and contiguous, with the N words at an address that the device can read."""
    assert out.is_contiguous(), f"strides {out.stride()}"
    if out.numel():
        launch(
            _fetch, (triton.cdiv(out.numel(), _BLOCK),), address, out, out.numel(), BLOCK=_BLOCK, num_warps=2
        )


@triton.jit(do_not_specialize=["address", "count"])
def _fetch(address, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = address.to(tl.int64).to(tl.pointer_type(tl.int64))
    # never from a cache: the host writes there
    tl.store(out + at, tl.load(source + at, mask=at < count, cache_modifier=".cv"), mask=at < count)
