"""Device code that reads tiles of a matrix in BF12 (kernels.bf12_tiles), makes bfloat16 weights of them in
units of their row's scale, and multiplies with strays. Decides nothing.

Dimension letters: C columns, N rows of a block, M rows of the other factor.
"""

from __future__ import annotations

import triton
import triton.language as tl

_STRIP = tl.constexpr(16)  # rows
_WORDS = tl.constexpr(8)  # of a row in a plane of a tile
_TILE = tl.constexpr(384)  # words
SECOND = tl.constexpr(128)  # words from a tile's first plane to its second
UPPER = tl.constexpr(256)  # to its third
# Bytes of both are put together to words of 16 bits, whose exponent is four bits, and these are raised by
# 2^112; -0 adds nothing to any zero.
_PAIRS = tl.constexpr(
    "{ .reg .b32 a, b, up, none; mov.b32 up, 0x77807780; mov.b32 none, 0x80008000;"
    " and.b32 a, $6, 0x87878787; prmt.b32 b, $4, a, 0x5140; fma.rn.bf16x2 $0, b, up, none;"
    " prmt.b32 b, $4, a, 0x7362; fma.rn.bf16x2 $1, b, up, none;"
    " shl.b32 a, $6, 1; and.b32 a, a, 0x80808080; shr.b32 b, $6, 3; lop3.b32 a, b, 0x07070707, a, 0xEA;"
    " prmt.b32 b, $5, a, 0x5140; fma.rn.bf16x2 $2, b, up, none;"
    " prmt.b32 b, $5, a, 0x7362; fma.rn.bf16x2 $3, b, up, none; }"
)


@triton.jit
def code_places(n, C: tl.constexpr):
    """Where the first plane's words (N, 8) of rows n are, of columns 0 to 64; those of columns from c on, a
    multiple of 64, are 6 c words further."""
    at = n // _STRIP * (C // 64 * _TILE) + n % _STRIP * _WORDS
    return at[:, None] + tl.arange(0, _WORDS)[None, :]


@triton.jit
def _float_pair(lower, upper, byte: tl.constexpr):
    """As _PAIRS, in plain code: bits of two weights, the one in the lower half first. upper: with sign and
    exponent where a bfloat16's upper byte has them."""
    first = ((lower >> (8 * byte)) & 255) | ((upper >> (8 * byte)) & 255) << 8
    second = ((lower >> (8 * byte + 8)) & 255) | ((upper >> (8 * byte + 8)) & 255) << 8
    first = (first << 16).to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2^112
    second = (second << 16).to(tl.float32, bitcast=True) * 5.192296858534828e33
    low = (first.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return low | (second.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def decode(first, second, upper, BK: tl.constexpr, PTX: tl.constexpr):
    """bfloat16 (N, BK) of words of the three planes, int32 (N, BK / 8) each."""
    if PTX:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            _PAIRS, "=r,=r,=r,=r,r,r,r", [first, second, upper],
            (tl.int32, tl.int32, tl.int32, tl.int32), True, 1,
        )  # fmt: skip
    else:
        a = upper & -2021161081  # 0x87 in each byte
        b = ((upper << 1) & -2139062144) | ((upper >> 3) & 0x07070707)  # 0x80 in each byte of the first
        p0, p1 = _float_pair(first, a, 0), _float_pair(first, a, 2)
        p2, p3 = _float_pair(second, b, 0), _float_pair(second, b, 2)
    rows: tl.constexpr = first.shape[0]
    pairs = tl.reshape(tl.join(tl.join(p0, p2), tl.join(p1, p3)), (rows, BK // 2))
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.interleave(low, high)


@triton.jit
def load_words(words, keep, KEEP: tl.constexpr):
    """Words of the three planes that begin at pointers `words`. With KEEP they are written to pointers
    `keep`."""
    first = tl.load(words, eviction_policy="evict_first")
    second = tl.load(words + SECOND, eviction_policy="evict_first")
    upper = tl.load(words + UPPER, eviction_policy="evict_first")
    if KEEP:
        tl.store(keep, first)
        tl.store(keep + SECOND, second)
        tl.store(keep + UPPER, upper)
    return first, second, upper


@triton.jit
def load_strays(
    side, kept_side, strip, part, R: tl.constexpr, S: tl.constexpr, KEEP: tl.constexpr
):  # fmt: skip
    """Places and values (16,) of the part-th sixteen strays of a strip, of which there are S at most; a place
    is negative where there is none. side: int32, what lies beside a matrix of R rows. With KEEP what is read
    is written behind `kept_side`."""
    at = R + strip * S + part * 16 + tl.arange(0, 16)
    places, values = tl.load(side + at), tl.load(side + R // 16 * S + at)
    if KEEP:
        tl.store(kept_side + at, places)
        tl.store(kept_side + R // 16 * S + at, values)
    return places, values.to(tl.float32, bitcast=True)


@triton.jit
def add_strays(
    acc, places, values, a_rows, ok, side, kept_side, strip, skipped, R: tl.constexpr, S: tl.constexpr,
    KEEP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """acc (M, 16) and what a strip's strays add, of which these are the first. a_rows: pointers (M,) to rows
    of the other factor; ok: those that there are. skipped: columns that are left out."""
    acc = _add(acc, places, values, a_rows, ok, skipped, PTX)
    part = 1
    while (part < S // 16) & (tl.min(places, 0) >= 0):  # they lie in the first places
        places, values = load_strays(side, kept_side, strip, part, R, S, KEEP)
        acc = _add(acc, places, values, a_rows, ok, skipped, PTX)
        part += 1
    return acc


@triton.jit
def _add(acc, places, values, a_rows, ok, skipped, PTX: tl.constexpr):
    column = places & 0xFFFF
    there = (places >= 0) & (column >= skipped)
    a = tl.load(a_rows[:, None] + column[None, :], mask=ok[:, None] & there[None, :], other=0.0)
    here = ((places >> 16)[:, None] == tl.arange(0, 16)[None, :]) & there[:, None]
    return dot(a, tl.where(here, values[:, None], 0.0).to(a.dtype), acc, PTX)


@triton.jit
def scaled(acc, side, kept_side, n, KEEP: tl.constexpr):
    """Sums (M, N) of rows n times these rows' scales."""
    scales = tl.load(side + n)
    if KEEP:
        tl.store(kept_side + n, scales)
    return acc * scales.to(tl.float32, bitcast=True)[None, :]


@triton.jit
def dot(a, b, acc, PTX: tl.constexpr):
    """acc + a b. Triton's interpreter would multiply the bits of bfloat16 numbers."""
    if PTX:
        acc = tl.dot(a, b, acc)
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return acc
