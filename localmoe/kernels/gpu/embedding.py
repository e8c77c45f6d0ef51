"""Rows of an input embedding that lies in the host's memory, read over the link by the kernel itself. Decides
nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch, without_modes
from localmoe.kernels.gpu.record_sources import record_at
from localmoe.kernels.gpu.sizes import cdiv, next_power_of_2

_BLOCK = 1024  # columns of a program


@without_modes
def read_rows(ids: Tensor, address: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of a table (rows, columns) of `dtype`, 16 bits, at an address of the host that the device can read
    and that is a whole number of 16 bytes.

    Args:
        ids: int64 (T,), contiguous; what names no row reads the first or the last one.

    Returns:
        (T, columns), on the ids' device.
    """
    assert ids.is_contiguous() and ids.dtype == torch.int64, f"{ids.dtype}, strides {ids.stride()}"
    out = torch.empty(ids.shape[0], columns, dtype=dtype, device=ids.device)
    if out.numel():
        block = min(_BLOCK, next_power_of_2(columns))
        launch(
            _read_rows, (ids.shape[0], cdiv(columns, block)),
            ids, address, out, ROWS=rows, H=columns, BLOCK=block, **after_previous(ids.device), num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["address"])
def _read_rows(
    ids, address, out, ROWS: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    wait_for_previous(DEPENDENT, SMALL=True)
    token = tl.program_id(0).to(tl.int64)
    row = tl.minimum(tl.maximum(tl.load(ids + token), 0), ROWS - 1)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    table = record_at(out, address.to(tl.int64))
    tl.store(out + token * H + h, tl.load(table + row * H + h, mask=h < H), mask=h < H)
