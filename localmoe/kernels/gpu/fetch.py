"""Fetch words from memory of the host by a kernel. Decides nothing."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.launch import RepeatedLaunch
from localmoe.kernels.gpu.sizes import cdiv

_BLOCK = 256  # words of a program
_INT32 = 2**31  # Triton takes numbers from there on for int64


def fetch(address: int, out: Tensor) -> None:
    """Fill `out`, int64 (N,) and contiguous, with the N words at an address that the device can read."""
    assert out.is_contiguous(), f"strides {out.stride()}"
    count = out.numel()
    if count:
        kind = (out.device.index, address < _INT32, out.data_ptr() % 16 == 0)
        _launch_fetch(kind, (cdiv(count, _BLOCK), 1, 1), address, out, count, BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["address", "count"])
def _fetch(address, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = address.to(tl.int64).to(tl.pointer_type(tl.int64))
    # never from a cache: the host writes there
    tl.store(out + at, tl.load(source + at, mask=at < count, cache_modifier=".cv"), mask=at < count)


_launch_fetch = RepeatedLaunch(_fetch, num_warps=2)
