"""Device functions of attention in latent space: a part of the cache against a tile of rows (token, head).
Launches nothing.

All heads share a position's latent vector and its rotated key, so a tile's rows are heads and tokens alike,
and what is loaded serves first as keys and then as values. A part begins from nothing and runs through its
positions in order, so that its state is a function of the row and the part alone: positions that a row does
not see add exact zeros to it. Latent vectors are handled as two halves, whose products are independent.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localmoe.kernels.gpu.attention_chunks import finite


@triton.jit
def load_latent_rows(
    query, rope_query, r, row_ok, heads, token_stride, head_stride,
    RANK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
):  # fmt: skip
    """Halves of the rows' queries in latent space (BM, HALF), and their rotated queries (BM, ROPE_PAD)."""
    d = tl.arange(0, HALF)[None, :]
    e = tl.arange(0, ROPE_PAD)[None, :]
    at = query + r[:, None].to(tl.int64) * RANK + d
    low = tl.load(at, mask=row_ok[:, None] & (d < RANK), other=0.0)
    high = tl.load(at + HALF, mask=row_ok[:, None] & (HALF + d < RANK), other=0.0)
    rope_at = (r // heads)[:, None].to(tl.int64) * token_stride + (r % heads)[:, None] * head_stride + e
    return low, high, tl.load(rope_query + rope_at, mask=row_ok[:, None] & (e < ROPE), other=0.0)


@triton.jit
def attend_part(
    low, high, turned, latent, rope, begin, position, row_ok, live, latent_row, rope_row, scale,
    RANK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    PART: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows at positions `position` over the cache positions begin .. begin + PART - 1; those from `live` on
    are never read.

    Args:
        low, high, turned: from load_latent_rows.
        latent, rope: the caches, rows of RANK and ROPE numbers.
        scale: of a score, with log2(e) in it.

    Returns:
        peak (BM,), the largest score in units of log2; total (BM, 16), in each column the sum of
        2^(score - peak); the sums of latent vectors with those weights, in halves (BM, HALF).
    """
    d = tl.arange(0, HALF)[None, :]
    e = tl.arange(0, ROPE_PAD)[None, :]
    ones = tl.full([TILE, 16], 1.0, low.dtype)
    peak = tl.full([low.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([low.shape[0], 16], tl.float32)
    acc_low = tl.zeros([low.shape[0], HALF], tl.float32)
    acc_high = tl.zeros([low.shape[0], HALF], tl.float32)
    for first in tl.range(0, PART, TILE):  # the next tiles are on their way while this one is used
        p = begin + first + tl.arange(0, TILE)
        there = (p < live)[:, None]
        at = latent + p[:, None].to(tl.int64) * latent_row + d
        rope_at = rope + p[:, None].to(tl.int64) * rope_row + e
        if RANK == 2 * HALF:
            c_low = tl.load(at, mask=there, other=0.0)
            c_high = tl.load(at + HALF, mask=there, other=0.0)
        else:
            c_low = tl.load(at, mask=there & (d < RANK), other=0.0)
            c_high = tl.load(at + HALF, mask=there & (HALF + d < RANK), other=0.0)
        if ROPE == ROPE_PAD:
            k = tl.load(rope_at, mask=there, other=0.0)
        else:
            k = tl.load(rope_at, mask=there & (e < ROPE), other=0.0)
        # scaled before they are added: three chains of products run side by side
        score = tl.dot(low, tl.trans(c_low)) * scale + tl.dot(high, tl.trans(c_high)) * scale
        score += tl.dot(turned, tl.trans(k)) * scale
        score = tl.where((p[None, :] <= position[:, None]) & row_ok[:, None], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        old = tl.exp2(peak - finite(new_peak))[:, None]
        share = tl.exp2(score - finite(new_peak)[:, None]).to(low.dtype)
        peak = new_peak
        total = tl.dot(share, ones, total * old)
        acc_low = tl.dot(share, c_low, acc_low * old)
        acc_high = tl.dot(share, c_high, acc_high * old)
    return peak, total, acc_low, acc_high
