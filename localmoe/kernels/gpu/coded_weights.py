"""Device code that multiplies with matrices in FP8, NVFP4 or INT4, tile by tile, each with what scales it;
what a tile is, fp8_weights, nvfp4_weights and int4_weights know. Decides nothing.

Dimension letters: R rows and C columns of a matrix, N rows of a block, M rows of the other factor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localmoe.kernels.gpu import fp8_weights as fp8
from localmoe.kernels.gpu import int4_weights as int4
from localmoe.kernels.gpu import nvfp4_weights as nvfp4
from localmoe.kernels.gpu.forms import FP8, INT4_32, NVFP4
from localmoe.kernels.gpu.mxfp4_weights import code_places

_ROWS = tl.constexpr(16)  # of a strip, each with a word for a span of columns


@triton.jit
def _places(n, C: tl.constexpr, FORM: tl.constexpr, BK: tl.constexpr):
    """Where the words of codes of rows n are, of columns 0 to BK, and those of what is beside them."""
    if FORM == FP8:
        codes, beside = fp8.code_places(n, C), fp8.scale_places(n, C)
    elif FORM == NVFP4:
        codes, beside = code_places(n, C, 64), nvfp4.scale_places(n, C)
    else:
        SPAN: tl.constexpr = 32 if FORM == INT4_32 else 128
        codes, beside = code_places(n, C, BK), int4.scale_places(n, C, SPAN)
    return codes, beside


@triton.jit
def _add(
    acc, a, words, keep, beside, kept_beside, start, PART: tl.constexpr, FORM: tl.constexpr,
    KEEP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """acc (M, N) and products with columns from `start` on, of INT4_32 with half of a tile's, the first or
    the second. words, beside: pointers to those of column 0. With KEEP what is read is written to `keep` and
    `kept_beside`."""
    SPAN: tl.constexpr = 64 if FORM == NVFP4 else 32 if FORM == INT4_32 else 128
    step, span = start * (4 if FORM == FP8 else 2) + 4 * PART, start // SPAN + PART
    codes = tl.load(words + step, eviction_policy="evict_first")
    scales = tl.load(beside + span * _ROWS, eviction_policy="evict_first")
    if KEEP:
        tl.store(keep + step, codes)
        tl.store(kept_beside + span * _ROWS, scales)
    if FORM == FP8:
        acc = fp8.add(acc, a, codes, scales, PTX)
    elif FORM == NVFP4:
        acc = nvfp4.add(acc, a, codes, scales, PTX)
    else:
        acc = int4.add(acc, a, codes, scales, PTX)
    return acc


@triton.jit
def gate_up(
    a_rows, ok, words, to_up, record, keep, block, R: tl.constexpr, C: tl.constexpr, FORM: tl.constexpr,
    GATED: tl.constexpr, KEEP: tl.constexpr, PTX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Products with a block of BN rows of gate and of up, matrices (R, C): float32 (BM, BN) each, without
    GATED twice the same. With KEEP what is read is written to its slot. a_rows: pointers (BM,) to rows of the
    other factor. to_up: words from gate's codes to up's; what is beside them is read of `record`. BK: 64."""
    UP: tl.constexpr = R * C // 4 if FORM == FP8 else R * C // 8
    SIDE: tl.constexpr = (3 if GATED else 2) * UP  # behind the codes of all matrices
    spans: tl.constexpr = C // 64 + 1 if FORM == NVFP4 else C // 32 if FORM == INT4_32 else (C + 127) // 128
    BESIDE: tl.constexpr = R * spans
    n = block * BN + tl.arange(0, BN)
    PARTS: tl.constexpr = 2 if FORM == INT4_32 else 1  # of a tile, each with scales of its own
    WIDTH: tl.constexpr = BK // PARTS
    at, beside_at = _places(n, C, FORM, WIDTH)
    beside_at += SIDE
    a_at = a_rows[:, None] + tl.arange(0, WIDTH)[None, :]
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    side, kept = record + beside_at, keep + beside_at
    for start in range(0, C, BK):
        for part in tl.static_range(PARTS):
            a = tl.load(a_at + start + part * WIDTH, mask=ok[:, None], other=0.0)
            gate = _add(gate, a, words + at, keep + at, side, kept, start, part, FORM, KEEP, PTX)
            if GATED:
                up = _add(
                    up, a, words + to_up + at, keep + UP + at, side + BESIDE, kept + BESIDE, start, part,
                    FORM, KEEP, PTX,
                )  # fmt: skip
    if FORM == NVFP4:
        gate = nvfp4.scaled(gate, side, kept, C, KEEP)
        if GATED:
            up = nvfp4.scaled(up, side + BESIDE, kept + BESIDE, C, KEEP)
    if not GATED:
        up = gate
    return gate, up


@triton.jit
def down(
    a_rows, ok, words, keep, block, skipped, H: tl.constexpr, C: tl.constexpr, FORM: tl.constexpr,
    GATED: tl.constexpr, KEEP: tl.constexpr, PTX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Likewise with a block of down, a matrix (H, C). skipped: columns that are left out, in multiples
    of BK."""
    codes: tl.constexpr = H * C // 4 if FORM == FP8 else H * C // 8
    spans: tl.constexpr = H // 64 + 1 if FORM == NVFP4 else H // 32 if FORM == INT4_32 else (H + 127) // 128
    SIDE: tl.constexpr = codes + (2 if GATED else 1) * C * spans  # and what is beside the others
    n = block * BN + tl.arange(0, BN)
    PARTS: tl.constexpr = 2 if FORM == INT4_32 else 1  # of a tile, each with scales of its own
    WIDTH: tl.constexpr = BK // PARTS
    at, beside_at = _places(n, C, FORM, WIDTH)
    beside_at += SIDE
    a_at = a_rows[:, None] + tl.arange(0, WIDTH)[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    side, kept = words + beside_at, keep + beside_at
    for start in range(skipped, C, BK):
        for part in tl.static_range(PARTS):
            a = tl.load(a_at + start + part * WIDTH, mask=ok[:, None], other=0.0)
            acc = _add(acc, a, words + at, keep + at, side, kept, start, part, FORM, KEEP, PTX)
    if FORM == NVFP4:
        acc = nvfp4.scaled(acc, side, kept, C, KEEP)
    return acc
