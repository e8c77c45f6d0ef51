"""Attention of a tile of rows: over one chunk or section of the cache, and over all of it. Launches nothing.

Chunks are merged in order into sections of CHUNKS of them, and sections in order, here as by attention_merge.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localmoe.kernels.gpu.attention_chunks import attend_chunk, attend_section, finish, merge, no_state
from localmoe.kernels.gpu.attention_merge import first_part, sink_logit
from localmoe.kernels.gpu.dependent import wait_for_previous


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


@triton.jit(do_not_specialize=["rows", "slots"])
def attend_split(
    query, key, value, start, partial_peak, partial_total, partial_acc, rows, heads, group, slots, capacity,
    q_head, q_row, q_col, key_head, key_row, key_col, value_head, value_row, value_col,
    scale, softcap, window,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, BM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    tile, slot, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # tiles of a chunk side by side
    first_position = tl.load(start).to(tl.int32)
    begin = (first_part(first_position, window, CHUNK * CHUNKS, WINDOWED) + slot) * CHUNK * CHUNKS
    first = first_position + tile * BM // group
    last = first_position + tl.minimum((tile * BM + BM - 1) // group, rows - 1)
    wanted = begin <= last
    if WINDOWED:
        wanted = wanted & (begin + CHUNK * CHUNKS > first - window + 1)
    if wanted:
        q, token, q_of, row_ok = _load_rows(
            query, tile, head, rows, group, q_head, q_row, q_col, D, D_PAD, BM
        )
        key += head.to(tl.int64) * key_head
        value += head.to(tl.int64) * value_head
        if CHUNKS == 1:
            peak, total, acc = attend_chunk(
                q, key, value, begin, first_position + token, first_position + token, row_ok,
                first_position + rows, capacity,
                key_row, key_col, value_row, value_col, scale, softcap, window,
                D, DV, D_PAD, DV_PAD, CHUNK, SOFTCAP, WINDOWED, False,
            )  # fmt: skip
        else:
            seen = tl.maximum(begin // CHUNK, first_part(first, window, CHUNK, WINDOWED))
            peak, total, acc = attend_section(
                q, key, value, seen, tl.minimum(begin // CHUNK + CHUNKS, last // CHUNK + 1),
                first_position + token, row_ok, first_position + rows, capacity,
                key_row, key_col, value_row, value_col, scale, softcap, window,
                D, DV, D_PAD, DV_PAD, CHUNK, SOFTCAP, WINDOWED,
            )  # fmt: skip
        at = (token * heads + q_of).to(tl.int64) * slots + slot
        dv = tl.arange(0, DV_PAD)
        tl.store(partial_peak + at, peak, mask=row_ok)
        tl.store(partial_total + at, total, mask=row_ok)
        tl.store(partial_acc + at[:, None] * DV + dv[None, :], acc, mask=row_ok[:, None] & (dv < DV)[None, :])


@triton.jit
def _go_on(
    done, section, none, q, key, value, chunk, position, last, row_ok, live, capacity,
    key_row, key_col, value_row, value_col, scale, softcap, window,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Both states after one more chunk."""
    found = attend_chunk(
        q, key, value, chunk * CHUNK, position, last, row_ok, live, capacity,
        key_row, key_col, value_row, value_col, scale, softcap, window,
        D, DV, D_PAD, DV_PAD, CHUNK, SOFTCAP, WINDOWED, WHOLE,
    )  # fmt: skip
    section = merge(*section, *found)
    if (chunk + 1) % CHUNKS == 0:
        done = merge(*done, *section)
        section = none
    return done, section


@triton.jit(do_not_specialize=["rows"])
def attend_loop(
    query, key, value, start, until, sinks, out, rows, heads, group, capacity,
    q_head, q_row, q_col, key_head, key_row, key_col, value_head, value_row, value_col,
    scale, softcap, window,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, BM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest rows first
    first_position = tl.load(start).to(tl.int32)
    q, token, q_of, row_ok = _load_rows(query, tile, head, rows, group, q_head, q_row, q_col, D, D_PAD, BM)
    last = first_position + tl.minimum((tile * BM + BM - 1) // group, rows - 1)
    first = first_position + tile * BM // group
    key += head.to(tl.int64) * key_head
    value += head.to(tl.int64) * value_head
    none = no_state(tl.zeros([BM], tl.float32), tl.zeros([BM, DV_PAD], tl.float32))
    done, section = none, none  # state after all sections before this one, and of this one
    position, live = first_position + token, first_position + rows
    upper = position
    if until is not None:  # rows of pictures see further than their own place
        upper = first_position + tl.load(until + token, mask=row_ok, other=0)
        last = tl.max(upper, 0)
    begin, end = first_part(first, window, CHUNK, WINDOWED), last // CHUNK + 1
    if not WINDOWED:
        whole_end = (first + 1) // CHUNK
        for chunk in tl.range(begin, whole_end, num_stages=2):  # the next one is on its way
            done, section = _go_on(
                done, section, none, q, key, value, chunk, position, upper, row_ok, live, capacity,
                key_row, key_col, value_row, value_col, scale, softcap, window,
                D, DV, D_PAD, DV_PAD, CHUNK, CHUNKS, SOFTCAP, WINDOWED, True,
            )  # fmt: skip
        begin = whole_end
    for chunk in tl.range(begin, end, num_stages=2 if WINDOWED else 1):
        done, section = _go_on(
            done, section, none, q, key, value, chunk, position, upper, row_ok, live, capacity,
            key_row, key_col, value_row, value_col, scale, softcap, window,
            D, DV, D_PAD, DV_PAD, CHUNK, CHUNKS, SOFTCAP, WINDOWED, False,
        )  # fmt: skip
    peak, total, acc = merge(*done, *section)
    sink = 0.0 if sinks is None else sink_logit(sinks + q_of, row_ok)
    result = finish(peak, total, acc, sink, sinks is not None)
    dv = tl.arange(0, DV_PAD)
    at = (token * heads + q_of).to(tl.int64)[:, None] * DV + dv[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=row_ok[:, None] & (dv < DV)[None, :])
