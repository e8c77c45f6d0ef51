"""A layer that is but a short convolution, over the rows of a pass. See kernels.short_conv for what is
computed, state_places for where its state stands: the rows that later ones look at.

One program a row and some channels, so a row's bits do not depend on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.convolve import convolve
from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch, without_modes
from localmoe.kernels.gpu.state_memory import StateMemory
from localmoe.kernels.gpu.state_places import DRAFT, FRESH, GOES_ON, KEPT, PROMPT, READ, REPLAY, WRITE
from localmoe.kernels.recurrent_shapes import ConvShape

_WIDEST = 256  # channels of one program


@without_modes
def short_conv(
    projected: Tensor, weight: Tensor, bias: Tensor | None, shape: ConvShape, memory: StateMemory,
    places: Tensor, live: Tensor, kind: int,
) -> Tensor:  # fmt: skip
    """Run the rows of a pass behind those that a layer's log holds, and note them there.

    Args:
        projected: (T, 3 C): B, C and x. weight: (C, taps), contiguous. bias: (C,).
        memory: of the layer. kind: of state_places; a draft has one row.
        live: int64 (1,), rows that count in a window. Others give zeros: what later layers make of padding
            has to be finite.

    Returns:
        (T, C).
    """
    rows, channels = projected.shape[0], shape.channels
    assert rows <= memory.rows or kind == PROMPT, f"{rows} rows in a log of {memory.rows}"
    assert rows >= shape.taps - 1 or kind != PROMPT, f"a prompt of {rows} tokens"
    assert rows == 1 or kind != DRAFT, f"a draft of {rows} tokens"
    assert weight.shape == (channels, shape.taps) and weight.is_contiguous()
    assert projected.shape[1] == 3 * channels and projected.stride(1) == 1
    out = torch.empty(rows, channels, dtype=projected.dtype, device=projected.device)
    block = min(_WIDEST, channels & -channels)
    raw = memory.raw
    launch(
        _short_conv, (rows, channels // block),
        projected, weight, weight if bias is None else bias, raw, memory.draft_raw, memory.kept_raw, places,
        live, out, rows, projected.stride(0), raw.stride(0),
        C=channels, BLOCK=block, TAPS=shape.taps, BIAS=bias is not None, KIND=kind,
        **after_previous(projected.device), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "x_row"])
def _short_conv(
    projected, weight, bias, raw, draft_raw, kept_raw, places, live, out, rows, x_row, raw_half,
    C: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read, write = tl.load(places + READ), tl.load(places + WRITE)
    before = raw + read * raw_half + tl.load(places + REPLAY) * C
    known = tl.load(places + FRESH) == 0
    kept = tl.load(places + KEPT) if KIND != 2 else -1
    if KIND == 2:
        before = tl.where(tl.load(places + GOES_ON) != 0, draft_raw, before)
        write = read  # drafts leave the log alone
    mixed = convolve(
        projected + channel, projected + 2 * C + channel, channel, weight, bias, raw + write * raw_half,
        draft_raw, kept_raw, before, known, kept, row, rows, x_row, C, TAPS, True, BIAS, False, KIND,
    )  # fmt: skip
    factor = tl.load(projected + row.to(tl.int64) * x_row + C + channel)
    found = (mixed.to(tl.float32) * factor.to(tl.float32)).to(mixed.dtype)
    if KIND == 0:
        found = tl.where(row < tl.load(live), found, tl.zeros_like(found))
    tl.store(out + row.to(tl.int64) * C + channel, found)
