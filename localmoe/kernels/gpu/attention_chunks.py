"""Device functions of chunked attention: one chunk of cache positions, and the merge of chunks in order.
Launches nothing.

A chunk's partial result (peak, total, acc) of a row is a function of that row and that chunk alone: steps of
the tensor cores in a fixed order, an exact maximum, and a total that is itself a product with ones, so that
neither the tile's height nor the layout over warps touches a bit. Kernels that use these run without fused
multiply-add, so they round alike wherever they are inlined.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_chunk(
    q, key, value, begin, position, last, row_ok, live, capacity, key_row, key_col, value_row, value_col,
    scale, softcap, window,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows q (BM, D_PAD) at positions `position`, which see up to `last`, over the cache positions
    begin .. begin + CHUNK - 1.

    Positions from `live` on are never read. With a window, a cache of `capacity` positions, whole chunks,
    may be a ring: position p lies at p % capacity, and what rows see has not been overwritten. Scores are in
    units of log2: scale and softcap come multiplied by log2(e) where that is needed. WHOLE: all rows that
    count see all of the chunk, which changes no bit of them.

    Returns:
        peak (BM,), the largest score, -inf where a row sees none of the chunk; total (BM,), the sum of
        2^(score - peak), 0 there; acc (BM, DV_PAD), the values summed with those weights, 0 there.
    """
    p = begin + tl.arange(0, CHUNK)
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    there = (p < live)[:, None] | WHOLE
    at = ((begin % capacity + tl.arange(0, CHUNK)) if WINDOWED else p)[:, None].to(tl.int64)
    k = tl.load(key + at * key_row + d[None, :] * key_col, mask=there & (d < D)[None, :], other=0.0)
    v = tl.load(value + at * value_row + dv[None, :] * value_col, mask=there & (dv < DV)[None, :], other=0.0)
    score = tl.dot(q, tl.trans(k)) * scale
    if SOFTCAP:
        score = softcap * _tanh(score)
    if not WHOLE:
        seen = (p[None, :] <= last[:, None]) & row_ok[:, None]
        if WINDOWED:
            seen = seen & (p[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
    peak = tl.max(score, 1)
    share = tl.exp2(score - finite(peak)[:, None]).to(v.dtype)
    ones = tl.full([CHUNK, 16], 1.0, v.dtype)
    return peak, tl.max(tl.dot(share, ones), 1), tl.dot(share, v)  # all 16 columns of the former are alike


@triton.jit
def attend_section(
    q, key, value, chunk, end, position, row_ok, live, capacity, key_row, key_col, value_row, value_col,
    scale, softcap, window,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """State of the rows q after the chunks chunk .. end - 1 of one section."""
    zeros = tl.zeros([q.shape[0]], tl.float32)
    peak, total, acc = no_state(zeros, tl.zeros([q.shape[0], DV_PAD], tl.float32))
    for at in tl.range(chunk, end, num_stages=2):  # the next one's keys and values are on their way
        chunk_peak, chunk_total, chunk_acc = attend_chunk(
            q, key, value, at * CHUNK, position, position, row_ok, live, capacity,
            key_row, key_col, value_row, value_col, scale, softcap, window,
            D, DV, D_PAD, DV_PAD, CHUNK, SOFTCAP, WINDOWED, False,
        )  # fmt: skip
        peak, total, acc = merge(peak, total, acc, chunk_peak, chunk_total, chunk_acc)
    return peak, total, acc


@triton.jit
def no_state(zeros, acc):
    """State before the first chunk: of the rows of `zeros`, with sums in the shape of the zeros `acc`."""
    return zeros + float("-inf"), zeros, acc


@triton.jit
def merge(peak, total, acc, chunk_peak, chunk_total, chunk_acc):
    """State after one more chunk; one that a row does not see (-inf, 0, 0) changes no bit of it.

    peak, total, chunk_peak, chunk_total are of the rows, acc and chunk_acc of (rows, DV_PAD), or of one row.
    """
    new_peak = tl.maximum(peak, chunk_peak)
    subtracted = finite(new_peak)
    old = tl.exp2(peak - subtracted)
    new = tl.exp2(chunk_peak - subtracted)
    return new_peak, total * old + chunk_total * new, _by_row(acc, old) + _by_row(chunk_acc, new)


@triton.jit
def finish(peak, total, acc, sink, SINKS: tl.constexpr):
    """Attention output from the state after all chunks; `sink` is the extra logit in units of log2."""
    if SINKS:
        new_peak = tl.maximum(peak, sink)
        old = tl.exp2(peak - new_peak)
        total = total * old + tl.exp2(sink - new_peak)
        acc = _by_row(acc, old)
    total = tl.where(total > 0.0, total, 1.0)  # rows of padding have seen nothing
    return acc / (total[:, None] if len(acc.shape) == 2 else total)


@triton.jit
def _by_row(acc, factor):
    return acc * (factor[:, None] if len(acc.shape) == 2 else factor)


@triton.jit
def finite(peak):
    """0 in place of -inf, so that differences of hidden scores are -inf rather than NaN."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _tanh(x):
    decay = tl.exp2(tl.abs(x) * -2.8853900817779268)  # e^(-2|x|)
    size = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0.0, -size, size)
