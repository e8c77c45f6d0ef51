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
def no_part(low):
    """State of a part before its first tile; see attend_tile."""
    peak = tl.full([low.shape[0]], float("-inf"), tl.float32)
    zeros = tl.zeros(low.shape, tl.float32)
    return peak, tl.zeros([low.shape[0], 16], tl.float32), zeros, zeros


@triton.jit
def attend_tile(
    state, low, high, turned, latent, rope, begin, position, row_ok, live, latent_row, rope_row, scale,
    RANK: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A part's state after the next tile of its positions, begin .. begin + TILE - 1, for rows at positions
    `position`; cache positions from `live` on are never read.

    Args:
        state: peak (BM,), the largest score in units of log2; total (BM, 16), in each column the sum of
            2^(score - peak); the sums of latent vectors with those weights, in halves (BM, HALF).
        low, high, turned: from load_latent_rows.
        latent, rope: the caches, rows of RANK and ROPE numbers.
        scale: of a score, with log2(e) in it.
        WHOLE: all rows that count see all of the tile, which changes no bit of them.
    """
    peak, total, acc_low, acc_high = state
    d = tl.arange(0, HALF)[None, :]
    e = tl.arange(0, ROPE_PAD)[None, :]
    p = begin + tl.arange(0, TILE)
    there = (p < live)[:, None] | WHOLE
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
    if not WHOLE:
        score = tl.where((p[None, :] <= position[:, None]) & row_ok[:, None], score, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1))
    old = tl.exp2(peak - finite(new_peak))[:, None]
    share = tl.exp2(score - finite(new_peak)[:, None]).to(low.dtype)
    ones = tl.full([TILE, 16], 1.0, low.dtype)
    total = tl.dot(share, ones, total * old)
    acc_low = tl.dot(share, c_low, acc_low * old)
    acc_high = tl.dot(share, c_high, acc_high * old)
    return new_peak, total, acc_low, acc_high
