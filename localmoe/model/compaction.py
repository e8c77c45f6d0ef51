"""Closes the holes that loading leaves in PyTorch's allocator. Decides nothing about what is where.

The allocator takes blocks of 20 MiB from the driver for tensors below 10 MiB, and larger ones of whatever
size; what is freed beside a tensor that stays can hold no larger tensor, nor be given back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_SHARED_BLOCK_BYTES = 10 << 20  # tensors from here on get a block of their own, if none of the cached fits
_OWN_BLOCK_BYTES = 24 << 20  # and from here on no block is cached that would fit a little loosely


@torch.no_grad()
def compact(tensors: Iterable[Tensor]) -> None:
    """Move each tensor that shares its memory with nobody to where it leaves no hole, and give the rest back
    to the driver. Before anything remembers their addresses. Tensors on a CPU stay where they are."""
    candidates = [tensor for tensor in tensors if tensor.is_cuda and _is_alone(tensor)]
    if not candidates:
        return
    torch.cuda.empty_cache()
    for tensor in candidates:
        if tensor.nbytes < _SHARED_BLOCK_BYTES:
            tensor.data = tensor.data.clone()
    torch.cuda.empty_cache()
    for tensor in candidates:
        if _SHARED_BLOCK_BYTES <= tensor.nbytes < _OWN_BLOCK_BYTES:
            tensor.data = tensor.data.clone()
            torch.cuda.empty_cache()  # else the next one would take the place of this one, however large


def _is_alone(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes
