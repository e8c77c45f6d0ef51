"""One row of a causal convolution, in a program of a larger kernel: its inputs come from the pass, from a log
or from a draft (see state_places), and what later passes convolve with is kept. Launches nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def convolve(
    at, other, channel, weight, bias, log, draft_raw, kept_raw, before, known, kept, row, rows, x_row,
    C: tl.constexpr, TAPS: tl.constexpr, PRODUCT: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """A row of some channels, rounded to their dtype before an activation and after it.

    at: where row 0 of the channels begins; with PRODUCT, each is multiplied with what lies at `other`.
    channel: of weight (C, TAPS), bias (C,), and of the rows of logs.
    before: the TAPS - 1 rows before row 0, which count if `known`.
    kept: the row before which state is kept aside.
    """
    dtype: tl.constexpr = at.dtype.element_ty
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        source = row + tap - (TAPS - 1)
        if source >= 0:
            value = tl.load(at + source.to(tl.int64) * x_row)
            if PRODUCT:
                factor = tl.load(other + source.to(tl.int64) * x_row)
                value = (value.to(tl.float32) * factor.to(tl.float32)).to(dtype)
        else:
            value = tl.load(before + (source + TAPS - 1) * C + channel)
            value = tl.where(known, value, 0.0).to(dtype)
        total += value.to(tl.float32) * tl.load(weight + channel * TAPS + tap).to(tl.float32)
        if tap < TAPS - 1:
            if row == kept:
                tl.store(kept_raw + tap * C + channel, value)
        if KIND == 0:
            if tap == TAPS - 1 or row == 0:  # this row, and before the first one those before it
                tl.store(log + (row + tap) * C + channel, value)
        if KIND == 1:
            if tap == TAPS - 1:
                if row >= rows - (TAPS - 1):
                    tl.store(log + (row - rows + TAPS - 1) * C + channel, value)
        if KIND == 2:
            if tap > 0:
                tl.store(draft_raw + (tap - 1) * C + channel, value)
    if BIAS:
        total += tl.load(bias + channel).to(tl.float32)
    rounded = total.to(dtype)
    if SILU:
        wide = rounded.to(tl.float32)
        rounded = (wide * tl.sigmoid(wide)).to(dtype)
    return rounded
