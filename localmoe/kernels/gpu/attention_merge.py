"""Merges the partial results that attention kernels wrote, a row's parts in order. Decides neither how the
cache is cut into parts nor which launch writes them.

A row's chunks are merged in order into its sections, and its sections in order: two levels at fixed positions
of the cache. A part is a chunk (GROUP of them to a section) or a whole section (GROUP 1); the bits are the
same, and the same as those of a program that does both levels in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.attention_chunks import finish, merge, no_state
from localmoe.kernels.gpu.dependent import after_previous, wait_for_previous
from localmoe.kernels.gpu.launch import launch
from localmoe.kernels.gpu.sizes import cdiv, next_power_of_2

_AT_ONCE = 16  # most parts whose loads are in flight together; the next ones are on their way meanwhile
_COLUMNS = 128  # values of a row that one program merges


def merge_parts(
    parts: tuple[Tensor, Tensor, Tensor],
    start: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    *,
    first_row: int = 0,
    heads: int,
    part: int,
    group: int,
    window: int | None,
) -> None:
    """Attention output of R rows (token, head), the first of them the pass's row first_row.

    Args:
        parts: float32 peaks (R, slots) in units of log2, totals (R, slots) and sums (R, slots, Dv).
        start: int64 (1,), the position of token 0.
        sinks: (heads,) logit of a further position of value zero.
        out: (R, Dv) in all, contiguous.
        part: positions a part. group: parts a section.
        window: positions that a row sees; slot 0 is the part of the first position that token 0 sees.
    """
    peaks, totals, sums = parts
    rows, slots, dim = sums.shape
    columns = min(_COLUMNS, next_power_of_2(dim))
    launch(
        _merge_parts, (rows, cdiv(dim, columns)),
        peaks, totals, sums, start, sinks, out, first_row, heads, slots, window or 0,
        DV=dim, COLUMNS=columns, PART=part, GROUP=group, WINDOWED=window is not None,
        AT_ONCE=max(group, next_power_of_2(min(slots, _AT_ONCE))),
        **after_previous(out.device), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def first_part(position, window, PART: tl.constexpr, WINDOWED: tl.constexpr):
    """The first part that the row at `position` sees."""
    return tl.maximum(position - window + 1, 0) // PART if WINDOWED else position * 0


@triton.jit
def sink_logit(at, there):
    """Extra logits in units of log2."""
    return tl.load(at, mask=there, other=0.0).to(tl.float32) * 1.4426950408889634


@triton.jit
def _load_parts(peaks, totals, sums, at, slot, begin, end, dv, DV: tl.constexpr, AT_ONCE: tl.constexpr):
    """Peaks, totals and sums of AT_ONCE slots from `slot` on; nothing before `begin` and from `end` on."""
    found_peaks, found_totals, found_sums = tl.tuple([]), tl.tuple([]), tl.tuple([])
    for i in tl.static_range(AT_ONCE):
        there = (slot + i >= begin) & (slot + i < end)  # only these were written
        found_peaks += (tl.load(peaks + at + slot + i, mask=there, other=float("-inf")),)
        found_totals += (tl.load(totals + at + slot + i, mask=there, other=0.0),)
        found = tl.load(sums + (at + slot + i) * DV + dv, mask=there & (dv < DV), other=0.0)
        found_sums += (found,)
    return found_peaks, found_totals, found_sums


@triton.jit(do_not_specialize=["first_row", "slots"])
def _merge_parts(
    peaks, totals, sums, start, sinks, out, first_row, heads, slots, window,
    DV: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr,
    WINDOWED: tl.constexpr, AT_ONCE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT, SMALL=True)
    here = tl.program_id(0).to(tl.int64)
    row = first_row + tl.program_id(0)
    dv = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first_position = tl.load(start).to(tl.int32)
    position = first_position + row // heads
    base = first_part(first_position, window, PART, WINDOWED)  # the part of slot 0
    seen = first_part(position, window, PART, WINDOWED)
    slot = seen // GROUP * GROUP - base  # a section's beginning
    begin = seen - base
    end = position // PART + 1 - base
    at = here * slots
    peak, total, acc = no_state(first_position * 0.0, dv * 0.0)
    found = _load_parts(peaks, totals, sums, at, slot, begin, end, dv, DV, AT_ONCE)
    while slot < end:  # the next parts are on their way while these are merged
        slot += AT_ONCE
        next_found = _load_parts(peaks, totals, sums, at, slot, begin, end, dv, DV, AT_ONCE)
        for i in tl.static_range(0, AT_ONCE, GROUP):
            if GROUP == 1:
                peak, total, acc = merge(peak, total, acc, found[0][i], found[1][i], found[2][i])
            else:
                of_section = no_state(first_position * 0.0, dv * 0.0)
                for j in tl.static_range(i, i + GROUP):
                    of_section = merge(
                        of_section[0], of_section[1], of_section[2], found[0][j], found[1][j], found[2][j]
                    )
                peak, total, acc = merge(peak, total, acc, of_section[0], of_section[1], of_section[2])
        found = next_found
    sink = 0.0 if sinks is None else sink_logit(sinks + row % heads, row >= 0)
    result = finish(peak, total, acc, sink, sinks is not None)
    tl.store(out + here * DV + dv, result.to(out.dtype.element_ty), mask=dv < DV)
