"""Causal attention of a few or many rows over a KV cache whose live length is read on the device. Decides how
the work is cut, and no masking rule beyond causality and a window.

The cache is read in chunks at multiples of a fixed number of positions. Few rows: one program a chunk writes
a partial result, and a second kernel merges a row's chunks in order (flash decoding, Dao et al. 2023). Many
rows: one program loops over the chunks. Both do the same arithmetic in the same order, so a row's bits depend
on neither the other rows, nor on the way, nor on the length that the launch was sized for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.gpu.attention_chunks import attend_chunk, finish, merge

CHUNK = 128  # positions; half as many for heads wider than 128, to fit a chunk's keys and values on chip
SPLIT_ROWS = 80  # most rows for which a program a chunk pays
MAX_PARTIAL_BYTES = 32 << 20
_SPLIT_TILE, _LOOP_TILE = 16, 32  # rows of a tile: tokens x query heads of one KV head
_MERGES_AT_ONCE = 8  # chunks whose loads are in flight together
_LOG2_E = 1.4426950408889634


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    start: Tensor,
    *,
    scale: float,
    max_length: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Row i, at position start + i, over positions up to its own; semantics of dense.reference_attention.

    Args:
        query: (1, heads, T, D), bfloat16 or float16, any strides; heads a multiple of kv_heads.
        key_cache: (1, kv_heads, C, D). value_cache: (1, kv_heads, C, Dv). D and Dv up to 256.
        start: int64 (1,) on the device.
        max_length: at least start + T, at most C; sizes the grid. What lies beyond start + T costs little.
        window: positions that a row sees, its own among them; None for all.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: (heads,) logit of a further position of value zero.

    Returns:
        (T, heads, Dv), contiguous, of query's dtype.
    """
    _, heads, rows, dim = query.shape
    value_dim = value_cache.shape[3]
    assert query.dtype == key_cache.dtype == value_cache.dtype, f"{query.dtype}, {key_cache.dtype}"
    assert heads % key_cache.shape[1] == 0 and max(dim, value_dim) <= 256, f"{heads} heads of {dim}"
    assert rows <= max_length <= key_cache.shape[2], f"{max_length} of {key_cache.shape[2]} positions"
    assert window is None or window > 0, f"window {window}"
    slots = num_slots(rows, max_length, window, chunk_positions(dim, value_dim))
    out = torch.empty((rows, heads, value_dim), dtype=query.dtype, device=query.device)
    partial_bytes = 4 * rows * heads * slots * (value_dim + 2)
    if rows <= SPLIT_ROWS and partial_bytes <= MAX_PARTIAL_BYTES:
        _split(query, key_cache, value_cache, start, out, scale, slots, window, softcap, sinks)
    else:
        _loop(query, key_cache, value_cache, start, out, scale, window, softcap, sinks)
    return out


def chunk_positions(dim: int, value_dim: int) -> int:
    """Cache positions a chunk, which a head's width alone decides."""
    return CHUNK if max(dim, value_dim) <= 128 else CHUNK // 2


def num_slots(rows: int, max_length: int, window: int | None, chunk: int) -> int:
    """Most chunks that `rows` consecutive rows can see within max_length positions."""
    slots = -(-max_length // chunk)
    return slots if window is None else min(slots, -(-(window + rows - 2) // chunk) + 1)


def _scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """(factor on a product q k, factor on the tanh) that give scores in units of log2."""
    return (scale * _LOG2_E, 0.0) if softcap is None else (scale / softcap, softcap * _LOG2_E)


def _split(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: Tensor,
    out: Tensor,
    scale: float,
    slots: int,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    _, heads, rows, dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[3]
    group, chunk = heads // kv_heads, chunk_positions(dim, value_dim)
    extremes = torch.empty((2, rows * heads, slots), dtype=torch.float32, device=query.device)
    sums = torch.empty((rows * heads, slots, value_dim), dtype=torch.float32, device=query.device)
    value_pad = triton.next_power_of_2(value_dim)
    _attend_split[(slots, triton.cdiv(rows * group, _SPLIT_TILE), kv_heads)](
        query, key, value, start, extremes[0], extremes[1], sums, rows, heads, group, slots,
        *query.stride()[1:], *key.stride()[1:], *value.stride()[1:],
        *_scales(scale, softcap), window or 0,
        D=dim, DV=value_dim, D_PAD=triton.next_power_of_2(dim), DV_PAD=value_pad, CHUNK=chunk,
        SOFTCAP=softcap is not None, WINDOWED=window is not None, BM=_SPLIT_TILE,
        num_warps=4, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    _merge_split[(rows * heads,)](
        extremes[0], extremes[1], sums, start, sinks, out, heads, slots, window or 0,
        DV=value_dim, DV_PAD=value_pad, CHUNK=chunk, WINDOWED=window is not None, AT_ONCE=_MERGES_AT_ONCE,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: Tensor,
    out: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    _, heads, rows, dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[3]
    group = heads // kv_heads
    _attend_loop[(kv_heads, triton.cdiv(rows * group, _LOOP_TILE))](
        query, key, value, start, sinks, out, rows, heads, group,
        *query.stride()[1:], *key.stride()[1:], *value.stride()[1:],
        *_scales(scale, softcap), window or 0,
        D=dim, DV=value_dim, D_PAD=triton.next_power_of_2(dim), DV_PAD=triton.next_power_of_2(value_dim),
        CHUNK=chunk_positions(dim, value_dim), SOFTCAP=softcap is not None, WINDOWED=window is not None,
        BM=_LOOP_TILE, num_warps=8, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _first_chunk(position, window, CHUNK: tl.constexpr, WINDOWED: tl.constexpr):
    """The first chunk that the row at `position` sees."""
    return tl.maximum(position - window + 1, 0) // CHUNK if WINDOWED else position * 0


@triton.jit
def _sink(at, there):
    """Extra logits in units of log2."""
    return tl.load(at, mask=there, other=0.0).to(tl.float32) * 1.4426950408889634


@triton.jit
def _load_rows(
    query, tile, head, rows, group, q_head, q_row, q_col,
    D: tl.constexpr, D_PAD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """A tile of the rows (token, query head of this KV head): q (BM, D_PAD), token, query head, in range."""
    r = tile * BM + tl.arange(0, BM)
    token = r // group
    q_of = head * group + r % group
    row_ok = token < rows
    d = tl.arange(0, D_PAD)
    at = q_of[:, None].to(tl.int64) * q_head + token[:, None].to(tl.int64) * q_row + d[None, :] * q_col
    q = tl.load(query + at, mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    return q, token, q_of, row_ok


@triton.jit
def _attend_split(
    query, key, value, start, partial_peak, partial_total, partial_acc, rows, heads, group, slots,
    q_head, q_row, q_col, key_head, key_row, key_col, value_head, value_row, value_col,
    scale, softcap, window,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    slot, tile, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_position = tl.load(start).to(tl.int32)
    begin = (_first_chunk(first_position, window, CHUNK, WINDOWED) + slot) * CHUNK
    first = first_position + tile * BM // group
    last = first_position + tl.minimum((tile * BM + BM - 1) // group, rows - 1)
    wanted = begin <= last
    if WINDOWED:
        wanted = wanted & (begin + CHUNK > first - window + 1)
    if wanted:
        q, token, q_of, row_ok = _load_rows(
            query, tile, head, rows, group, q_head, q_row, q_col, D, D_PAD, BM
        )
        peak, total, acc = attend_chunk(
            q, key + head.to(tl.int64) * key_head, value + head.to(tl.int64) * value_head, begin,
            first_position + token, row_ok, first_position + rows,
            key_row, key_col, value_row, value_col, scale, softcap, window,
            D, DV, D_PAD, DV_PAD, CHUNK, SOFTCAP, WINDOWED,
        )  # fmt: skip
        at = (token * heads + q_of).to(tl.int64) * slots + slot
        dv = tl.arange(0, DV_PAD)
        tl.store(partial_peak + at, peak, mask=row_ok)
        tl.store(partial_total + at, total, mask=row_ok)
        tl.store(partial_acc + at[:, None] * DV + dv[None, :], acc, mask=row_ok[:, None] & (dv < DV)[None, :])


@triton.jit
def _load_parts(
    partial_peak, partial_total, partial_acc, at, slot, end, dv, DV: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """Peaks, totals and sums of the chunks in slots slot .. slot + AT_ONCE - 1; nothing from `end` on."""
    peaks, totals, accs = tl.tuple([]), tl.tuple([]), tl.tuple([])
    for i in tl.static_range(AT_ONCE):
        there = slot + i < end  # only these were written
        peaks += (tl.load(partial_peak + at + slot + i, mask=there, other=float("-inf")),)
        totals += (tl.load(partial_total + at + slot + i, mask=there, other=0.0),)
        found = tl.load(partial_acc + (at + slot + i) * DV + dv, mask=there & (dv < DV), other=0.0)
        accs += (found,)
    return peaks, totals, accs


@triton.jit
def _merge_split(
    partial_peak, partial_total, partial_acc, start, sinks, out, heads, slots, window,
    DV: tl.constexpr, DV_PAD: tl.constexpr, CHUNK: tl.constexpr, WINDOWED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first_position = tl.load(start).to(tl.int32)
    position = first_position + row // heads
    base = _first_chunk(first_position, window, CHUNK, WINDOWED)  # the chunk of slot 0
    slot = _first_chunk(position, window, CHUNK, WINDOWED) - base
    end = position // CHUNK + 1 - base
    at = row.to(tl.int64) * slots
    dv = tl.arange(0, DV_PAD)
    peak = first_position * 0.0 + float("-inf")
    total = first_position * 0.0
    acc = tl.zeros([DV_PAD], tl.float32)
    found = _load_parts(partial_peak, partial_total, partial_acc, at, slot, end, dv, DV, AT_ONCE)
    while slot < end:  # the next chunks are on their way while these are merged
        slot += AT_ONCE
        next_found = _load_parts(partial_peak, partial_total, partial_acc, at, slot, end, dv, DV, AT_ONCE)
        for i in tl.static_range(AT_ONCE):
            peak, total, acc = merge(peak, total, acc, found[0][i], found[1][i], found[2][i])
        found = next_found
    sink = 0.0 if sinks is None else _sink(sinks + row % heads, row >= 0)
    result = finish(peak, total, acc, sink, sinks is not None)
    tl.store(out + row.to(tl.int64) * DV + dv, result.to(out.dtype.element_ty), mask=dv < DV)


@triton.jit
def _attend_loop(
    query, key, value, start, sinks, out, rows, heads, group,
    q_head, q_row, q_col, key_head, key_row, key_col, value_head, value_row, value_col,
    scale, softcap, window,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest rows first
    first_position = tl.load(start).to(tl.int32)
    q, token, q_of, row_ok = _load_rows(query, tile, head, rows, group, q_head, q_row, q_col, D, D_PAD, BM)
    last = first_position + tl.minimum((tile * BM + BM - 1) // group, rows - 1)
    chunk = _first_chunk(first_position + tile * BM // group, window, CHUNK, WINDOWED)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DV_PAD], tl.float32)
    while chunk * CHUNK <= last:
        chunk_peak, chunk_total, chunk_acc = attend_chunk(
            q, key + head.to(tl.int64) * key_head, value + head.to(tl.int64) * value_head, chunk * CHUNK,
            first_position + token, row_ok, first_position + rows,
            key_row, key_col, value_row, value_col, scale, softcap, window,
            D, DV, D_PAD, DV_PAD, CHUNK, SOFTCAP, WINDOWED,
        )  # fmt: skip
        peak, total, acc = merge(peak, total, acc, chunk_peak, chunk_total, chunk_acc)
        chunk += 1
    sink = 0.0 if sinks is None else _sink(sinks + q_of, row_ok)
    result = finish(peak, total, acc, sink, sinks is not None)
    dv = tl.arange(0, DV_PAD)
    at = (token * heads + q_of).to(tl.int64)[:, None] * DV + dv[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=row_ok[:, None] & (dv < DV)[None, :])
