"""Device code of one tile of a routed expert's products, of records in any form (experts.records), read where
they are and, if they are to stay, written to their slot on the way. Dimension letters: H hidden, I
intermediate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localmoe.kernels.gpu import bf12_weights as bf12
from localmoe.kernels.gpu import coded_weights as coded
from localmoe.kernels.gpu.forms import BF12, MXFP4, PLAIN
from localmoe.kernels.gpu.mxfp4_weights import code_places, decode, scale_places


@triton.jit
def _gate_up_tile(
    x, x_stride, rows, ok, w, to_up, keep, nb,
    H: tl.constexpr, I: tl.constexpr, TRANSPOSED: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """gate and up, float32 (BM, BN) each; with KEEP the weights are written to `keep` as they are read.
    to_up: how far up's rows are behind gate's. Without GATED both are the same."""
    WIDTH: tl.constexpr = 2 * BN if INTERLEAVED else BN
    COLUMNS: tl.constexpr = 2 * I if INTERLEAVED else I
    ROWS: tl.constexpr = 2 * I if GATED else I
    advance: tl.constexpr = ROWS if TRANSPOSED else 1  # from a column of the sum to the next
    kept_up: tl.constexpr = I if TRANSPOSED else I * H
    n = nb * WIDTH + tl.arange(0, WIDTH)
    inside = n < COLUMNS
    # rows of weights past the end read the first and are not stored; as columns they are masked, since the
    # compiler must see that they lie side by side
    n_read = n if TRANSPOSED else tl.where(inside, n, 0)
    k = tl.arange(0, BK)
    x_at = x + rows[:, None] * x_stride + k[None, :]
    if TRANSPOSED:
        at = k[:, None] * ROWS + n_read[None, :]
        kept = inside[None, :] & (k >= 0)[:, None]
    else:
        at = n_read[:, None] * H + k[None, :]
        kept = inside[:, None] & (k >= 0)[None, :]
    gate = tl.zeros([BM, WIDTH], tl.float32)
    up = tl.zeros([BM, WIDTH], tl.float32)
    for start in range(0, H, BK):
        if H % BK == 0 and not TRANSPOSED:
            a = tl.load(x_at + start, mask=ok[:, None], other=0.0)
            g = tl.load(w + at + start * advance, eviction_policy="evict_first")
            if GATED and not INTERLEAVED:
                u = tl.load(w + to_up + at + start * advance, eviction_policy="evict_first")
        else:
            in_k = start + k < H
            a = tl.load(x_at + start, mask=ok[:, None] & in_k[None, :], other=0.0)
            kept = inside[None, :] & in_k[:, None] if TRANSPOSED else inside[:, None] & in_k[None, :]
            g = tl.load(w + at + start * advance, mask=kept, other=0.0, eviction_policy="evict_first")
            if GATED and not INTERLEAVED:
                u = tl.load(
                    w + to_up + at + start * advance, mask=kept, other=0.0, eviction_policy="evict_first"
                )
        if KEEP:
            tl.store(keep + at + start * advance, g, mask=kept)
            if GATED and not INTERLEAVED:
                tl.store(keep + kept_up + at + start * advance, u, mask=kept)
        gate = tl.dot(a, g if TRANSPOSED else tl.trans(g), gate)
        if GATED and not INTERLEAVED:
            up = tl.dot(a, u if TRANSPOSED else tl.trans(u), up)
    if INTERLEAVED:
        gate, up = tl.split(tl.reshape(gate, (BM, BN, 2)))
    if not GATED:
        up = gate
    return gate, up


@triton.jit
def _mxfp4_tile(
    a_at, ok, words, keep, first_row, skipped, to_scales, SCALES: tl.constexpr, END: tl.constexpr,
    C: tl.constexpr, KEEP: tl.constexpr, PTX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Products with rows first_row on, before END, of a matrix of C columns in MXFP4: float32 (BM, BN). With
    KEEP what is read is written to its slot. a_at: pointers to the other factor's first BK columns.
    skipped: columns that are left out, a multiple of BK. to_scales: words from codes to scales; SCALES: the
    same in a slot."""
    n = first_row + tl.arange(0, BN)
    inside = n < END
    n_read = tl.where(inside, n, 0)
    at, scale_at = code_places(n_read, C, BK), scale_places(n_read, C)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(skipped, C, BK):
        a = tl.load(a_at + start, mask=ok[:, None], other=0.0)
        codes = tl.load(words + at + start * 2, eviction_policy="evict_first")
        scales = tl.load(words + to_scales + scale_at + start // 128 * 16, eviction_policy="evict_first")
        if KEEP:
            tl.store(keep + at + start * 2, codes, mask=inside[:, None])
            tl.store(keep + SCALES + scale_at + start // 128 * 16, scales, mask=inside)
        acc = tl.dot(a, tl.trans(decode(codes, scales, start, BK, PTX)), acc)
    return acc


@triton.jit
def _bf12_gate_up(
    a_rows, ok, words, to_up, record, keep, strip, R: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    GATED: tl.constexpr, KEEP: tl.constexpr, PTX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Products with a strip of 16 rows of gate and of up, matrices (R, C) in BF12: float32 (BM, BN) each,
    without GATED twice the same.
    With KEEP what is read is written to its slot. a_rows: pointers (BM,) to rows of the other factor. to_up:
    words from gate's codes to up's; what lies beside the codes is read of `record`. S: strays that a strip
    may have."""
    UP: tl.constexpr = R * C // 8 * 3
    SIDE: tl.constexpr = (3 if GATED else 2) * UP  # behind the codes of all matrices
    BESIDE: tl.constexpr = R + R // 8 * S
    n = strip * BN + tl.arange(0, BN)
    at = bf12.code_places(n, C)
    side, kept = record + SIDE, keep + SIDE
    p, v = bf12.load_strays(side, kept, strip, 0, R, S, KEEP)
    if GATED:
        q, w = bf12.load_strays(side + BESIDE, kept + BESIDE, strip, 0, R, S, KEEP)
    a_at = a_rows[:, None] + tl.arange(0, BK)[None, :]
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for start in range(0, C, BK):
        a = tl.load(a_at + start, mask=ok[:, None], other=0.0)
        here, there = words + at + start * 6, keep + at + start * 6
        x, y, z = bf12.load_words(here, there, KEEP)
        gate = bf12.dot(a, tl.trans(bf12.decode(x, y, z, BK, PTX)), gate, PTX)
        if GATED:
            x, y, z = bf12.load_words(here + to_up, there + UP, KEEP)
            up = bf12.dot(a, tl.trans(bf12.decode(x, y, z, BK, PTX)), up, PTX)
    gate = bf12.scaled(gate, side, kept, n, KEEP)
    if GATED:
        up = bf12.scaled(up, side + BESIDE, kept + BESIDE, n, KEEP)
    gate = bf12.add_strays(gate, p, v, a_rows, ok, side, kept, strip, 0, R, S, KEEP, PTX)
    if GATED:
        up = bf12.add_strays(up, q, w, a_rows, ok, side + BESIDE, kept + BESIDE, strip, 0, R, S, KEEP, PTX)
    else:
        up = gate
    return gate, up


@triton.jit
def _bf12_down(
    a_rows, ok, words, keep, strip, skipped, SIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    S: tl.constexpr, KEEP: tl.constexpr, PTX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Likewise with a strip of one matrix. skipped: columns that are left out, a multiple of BK. SIDE: words
    from its codes to what lies beside."""
    n = strip * BN + tl.arange(0, BN)
    at = bf12.code_places(n, C)
    side, kept = words + SIDE, keep + SIDE
    p, v = bf12.load_strays(side, kept, strip, 0, R, S, KEEP)
    a_at = a_rows[:, None] + tl.arange(0, BK)[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(skipped, C, BK):
        a = tl.load(a_at + start, mask=ok[:, None], other=0.0)
        x, y, z = bf12.load_words(words + at + start * 6, keep + at + start * 6, KEEP)
        acc = bf12.dot(a, tl.trans(bf12.decode(x, y, z, BK, PTX)), acc, PTX)
    acc = bf12.scaled(acc, side, kept, n, KEEP)
    return bf12.add_strays(acc, p, v, a_rows, ok, side, kept, strip, skipped, R, S, KEEP, PTX)


@triton.jit
def gate_up(
    x, x_stride, rows, ok, w, behind, record, keep, nb,
    H: tl.constexpr, I: tl.constexpr, FORM: tl.constexpr, TRANSPOSED: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, KEEP: tl.constexpr, PTX: tl.constexpr, STRAYS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """As `_gate_up_tile`, of a record in any form. behind: elements from gate's weights to up's, or in MXFP4
    from both's codes to their scales. record: all of it, where `w` may be a part elsewhere. STRAYS: of a
    strip in BF12."""
    if FORM == BF12:
        gate, up = _bf12_gate_up(
            x + rows * x_stride, ok, w, behind, record, keep, nb, I, H, STRAYS, GATED, KEEP, PTX, BM, BN, BK
        )
    elif FORM == MXFP4:
        tl.static_assert(GATED)  # see records.RecordLayout.fits_mxfp4
        a_at = x + rows[:, None] * x_stride + tl.arange(0, BK)[None, :]
        S: tl.constexpr = 3 * I * H // 8  # behind both matrices' codes
        if INTERLEAVED:
            both = _mxfp4_tile(
                a_at, ok, w, keep, nb * 2 * BN, 0, behind, S, 2 * I, H, KEEP, PTX, BM, 2 * BN, BK
            )
            gate, up = tl.split(tl.reshape(both, (BM, BN, 2)))
        else:
            gate = _mxfp4_tile(a_at, ok, w, keep, nb * BN, 0, behind, S, I, H, KEEP, PTX, BM, BN, BK)
            up = _mxfp4_tile(a_at, ok, w, keep, I + nb * BN, 0, behind, S, 2 * I, H, KEEP, PTX, BM, BN, BK)
    elif FORM != PLAIN:
        gate, up = coded.gate_up(
            x + rows * x_stride, ok, w, behind, record, keep, nb, I, H, FORM, GATED, KEEP, PTX, BM, BN, BK
        )
    else:
        gate, up = _gate_up_tile(
            x, x_stride, rows, ok, w, behind, keep, nb, H, I, TRANSPOSED, GATED, INTERLEAVED, KEEP, BM, BN, BK
        )
    return gate, up


@triton.jit
def _down_tile(
    inner, pair, ok, w, keep, nb, skipped, SPLIT: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, TRANSPOSED: tl.constexpr, KEEP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = nb * BN + tl.arange(0, BN)
    inside = n < H
    n_read = n if TRANSPOSED else tl.where(inside, n, 0)
    k = tl.arange(0, BK)
    a_at = inner + pair[:, None] * I + k[None, :]
    advance: tl.constexpr = H if TRANSPOSED else 1
    if TRANSPOSED:
        at = k[:, None] * H + n_read[None, :]
        kept = inside[None, :] & (k >= 0)[:, None]
    else:
        at = n_read[:, None] * I + k[None, :]
        kept = inside[:, None] & (k >= 0)[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for step in range(0, I, BK):
        start = step + skipped
        if I % BK == 0 and not TRANSPOSED and not SPLIT:
            a = tl.load(a_at + start, mask=ok[:, None], other=0.0)
            b = tl.load(w + at + start * advance, eviction_policy="evict_first")
        else:
            in_k = start + k < I
            a = tl.load(a_at + start, mask=ok[:, None] & in_k[None, :], other=0.0)
            kept = inside[None, :] & in_k[:, None] if TRANSPOSED else inside[:, None] & in_k[None, :]
            b = tl.load(w + at + start * advance, mask=kept, other=0.0, eviction_policy="evict_first")
        if KEEP:
            tl.store(keep + at + start * advance, b, mask=kept)
        acc = tl.dot(a, b if TRANSPOSED else tl.trans(b), acc)
    return acc


@triton.jit
def down(
    inner, pair, ok, w, keep, nb, skipped, SPLIT: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, FORM: tl.constexpr, TRANSPOSED: tl.constexpr, GATED: tl.constexpr,
    KEEP: tl.constexpr, PTX: tl.constexpr, STRAYS: tl.constexpr, MORE_STRAYS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """As `_down_tile`, of a record in any form. STRAYS: of a strip of gate or up in BF12; MORE_STRAYS: of
    down."""
    if FORM == BF12:
        # behind its codes and what lies beside gate and up
        SIDE: tl.constexpr = I * H // 8 * 3 + (2 if GATED else 1) * (I + I // 8 * STRAYS)
        acc = _bf12_down(
            inner + pair * I, ok, w, keep, nb, skipped, SIDE, H, I, MORE_STRAYS, KEEP, PTX, BM, BN, BK
        )
    elif FORM == MXFP4:
        a_at = inner + pair[:, None] * I + tl.arange(0, BK)[None, :]
        W: tl.constexpr = I * H // 8 + 2 * I * ((H + 127) // 128)  # behind its codes and gate_up's scales
        acc = _mxfp4_tile(a_at, ok, w, keep, nb * BN, skipped, W, W, H, I, KEEP, PTX, BM, BN, BK)
    elif FORM != PLAIN:
        acc = coded.down(inner + pair * I, ok, w, keep, nb, skipped, H, I, FORM, GATED, KEEP, PTX, BM, BN, BK)
    else:
        acc = _down_tile(inner, pair, ok, w, keep, nb, skipped, SPLIT, H, I, TRANSPOSED, KEEP, BM, BN, BK)
    return acc
