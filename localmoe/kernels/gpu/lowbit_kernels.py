"""Triton kernels of low-bit experts: gate_up with its activation, and down with the weighted sum.

Kernels alone: what they are launched on and with which tiles is decided in gpu.lowbit_experts, the layout of
the codes in kernels.lowbit_rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localmoe.kernels.gpu.activations import apply_activation
from localmoe.kernels.gpu.dependent import wait_for_previous


@triton.constexpr_function
def _code_bit(j: int, width: int) -> int:
    """Bit of the mantissa that code j of a word is moved to.

    Codes that share a shift: 3 of 4 bits (2 + 3 + 3 of a word: higher up than 3 + 3 + 2), 4 of 2 bits, 8 of
    1 bit, and each of 8 bits has its own, as two would end too low for float32.
    """
    per = {8: 1, 4: 3, 2: 4, 1: 8}[width]
    lowest, number = (11, j + 1) if width == 4 else (15, j)
    return lowest + width * (number % per)


@triton.jit
def _code_as_float(word, j: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, PTX: tl.constexpr):
    """m + UNIT * code, code being the j-th of WIDTH bits in word, for the m of `_base`; UNIT is 1 or 4.

    The code is put into the mantissa of a float32 whose exponent makes its last bit count UNIT, so nothing
    is converted. m is at most 2^12 units: what float32 then loses is far less than a code's own error.
    """
    BIT: tl.constexpr = _code_bit(j, WIDTH)
    LEFT: tl.constexpr = BIT - WIDTH * j  # the shift that does it
    MASK: tl.constexpr = ((1 << WIDTH) - 1) << BIT
    EXPONENT: tl.constexpr = (150 - BIT + (2 if UNIT == 4 else 0)) << 23
    moved = word << LEFT if LEFT >= 0 else word >> -LEFT
    if PTX:  # one instruction, where the compiler would make two of two constants
        asm: tl.constexpr = "lop3.b32 $0, $1, $2, $3, 0xEA;"  # ($1 & $2) | $3
        bits = tl.inline_asm_elementwise(asm, "=r,r,r,r", [moved, MASK, EXPONENT], tl.int32, True, 1)
    else:
        bits = (moved & MASK) | EXPONENT
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _base(j: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    """What `_code_as_float` gives for code 0."""
    BIT: tl.constexpr = _code_bit(j, WIDTH)
    return (1 << (23 - BIT)) * UNIT


@triton.jit
def _codebook_value(word, j: tl.constexpr, codebook):
    """The codebook's value of the j-th 4 bits of word; codebook: pointers that broadcast to word. Its 64
    bytes lie in one line of the cache, in banks of their own, so a warp's reads never collide."""
    return tl.load(codebook + ((word >> (4 * j)) & 15), eviction_policy="evict_last")


@triton.jit
def _load(pointers, mask, UNMASKED: tl.constexpr):
    """Values that are read once, 0 where masked; unmasked loads need no register cleared before them."""
    if UNMASKED:
        values = tl.load(pointers, eviction_policy="evict_first")
    else:
        values = tl.load(pointers, mask, 0, eviction_policy="evict_first")
    return values


@triton.jit
def _row_products(
    words, top_bits, scales, codebook, x, columns, row_mask, x_mask, acc,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, NL: tl.constexpr, DEPTH: tl.constexpr,
    ALL_ROWS: tl.constexpr, INDEXED: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """acc plus the products of whole rows with x, one partial sum a vector of the step.

    words, top_bits, scales: pointers (1, KB, R) to the start of each row; x, codebook: pointers (1, KB, 1);
    masks of the same shapes as words and x; acc: (NL, KB, R) float32. TABLE: codes stand for the values of
    codebook, which is read in any case then; else it is not. INDEXED: stored column j is that of
    x[columns[j]], columns being a scalar pointer; else columns is not read. Triton deals threads out to the
    dimensions of a load from the left, after the one that is contiguous: vectors come first, so that
    neighbours read neighbouring memory, and rows last, so that a thread uses its activations for many of
    them.
    """
    C: tl.constexpr = 4 if BITS == 8 else (8 if BITS == 4 else 16)  # codes a word
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    PER_GROUP: tl.constexpr = GROUP // C  # words
    V: tl.constexpr = 4 if PER_GROUP % 4 == 0 else 2  # words a thread loads at once
    GROUP_VECTORS: tl.constexpr = PER_GROUP // V
    VECTORS: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP * GROUP_VECTORS  # in a row
    ZERO: tl.constexpr = 1 << (BITS - 1)
    WHOLE: tl.constexpr = VECTORS % (NL * DEPTH) == 0
    lane = tl.arange(0, NL)[:, None, None]
    step = tl.arange(0, V)[None, None, None, :]
    for start in range(0, VECTORS, NL * DEPTH):
        loaded = ()
        loaded_top = ()
        for d in tl.static_range(DEPTH):
            vector = start + d * NL + lane
            at = vector[:, :, :, None] * V + step
            mask = (row_mask if WHOLE else row_mask & (vector < VECTORS))[:, :, :, None]
            read = _load(words[:, :, :, None] + at, mask, WHOLE and ALL_ROWS)
            loaded = loaded + (read,)  # type: ignore[assignment]
            if BITS == 3:
                read = _load(top_bits[:, :, :, None] + at, mask, WHOLE and ALL_ROWS).to(tl.int32)
                loaded_top = loaded_top + (read,)  # type: ignore[assignment]
        for d in tl.static_range(DEPTH):
            vector = start + d * NL + lane
            group = vector // GROUP_VECTORS
            mask = row_mask if WHOLE else row_mask & (vector < VECTORS)
            scale = _load(scales + group, mask, WHOLE and ALL_ROWS).to(tl.float32)
            column = (group * GROUP + vector % GROUP_VECTORS * V)[:, :, :, None] + step
            dot = tl.zeros([1, 1, 1, 1], tl.float32)
            offset = tl.zeros([1, 1, 1, 1], tl.float32)  # what dot has too much, the same for all rows
            for j in tl.static_range(C):
                mask = x_mask[:, :, :, None]
                if not WHOLE or COLUMNS % GROUP != 0:
                    mask = mask & (column + j * PER_GROUP < COLUMNS)
                if INDEXED:
                    from_x = x[:, :, :, None] + tl.load(columns + column + j * PER_GROUP, mask, 0)
                else:
                    from_x = x[:, :, :, None] + column + j * PER_GROUP
                value = tl.load(from_x, mask, 0.0).to(tl.float32)
                if TABLE:
                    dot += value * _codebook_value(loaded[d], j, codebook[:, :, :, None])
                else:
                    dot += value * _code_as_float(loaded[d], j, WIDTH, 1, PTX)
                    offset += value * (_base(j, WIDTH, 1) + ZERO)
                if BITS == 3:
                    dot += value * _code_as_float(loaded_top[d], j, 1, 4, PTX)
                    offset += value * _base(j, 1, 4)
            acc += (tl.sum(dot, 3) - tl.sum(offset, 3)) * scale
    return acc


@triton.jit
def gate_up_kernel(
    x, index, words, top_bits, scales, codebooks, columns, bias, gated,
    K: tl.constexpr, E: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, BIASED: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, CLAMP: tl.constexpr,
    BN: tl.constexpr, NL: tl.constexpr, DEPTH: tl.constexpr, INDEXED: tl.constexpr, TABLE: tl.constexpr,
    GATED: tl.constexpr, PTX: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """gated (T K, I) = act(gate) * up of BN hidden values of one pair: rows n of gate and I + n of up, or,
    without GATED, rows n of both.

    x (T, H), index (T, K), codebooks (E, 16), read if TABLE, columns (E, H), read if INDEXED, bias (E, 2I).
    A pair with no expert writes nothing.
    """
    wait_for_previous(DEPENDENT)
    INNER: tl.constexpr = ROWS // 2 if GATED else ROWS
    LINES: tl.constexpr = 2 * BN if GATED else BN
    C: tl.constexpr = 4 if BITS == 8 else (8 if BITS == 4 else 16)
    GROUPS: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP
    pair = tl.program_id(1)
    expert = tl.load(index + pair)
    if expert >= 0 and expert < E:
        line = tl.arange(0, LINES)
        n = tl.program_id(0) * BN + line % BN
        row = (line // BN * INNER + n)[None, None, :]
        row_mask = (n < INNER)[None, None, :]
        begin = expert * ROWS  # int64
        stride: tl.constexpr = GROUPS * (GROUP // C)
        acc = _row_products(
            words + begin * stride + row * stride,
            top_bits + begin * stride + row * stride,
            scales + begin * GROUPS + row * GROUPS,
            codebooks + expert * 16 + tl.zeros([1, 1, 1], tl.int32),
            x + (pair // K) * COLUMNS + tl.zeros([1, 1, 1], tl.int32), columns + expert * COLUMNS,
            row_mask, tl.full([1, 1, 1], True, tl.int1), tl.zeros([NL, 1, LINES], tl.float32),
            COLUMNS, GROUP, BITS, NL, DEPTH, INNER % BN == 0, INDEXED, TABLE, PTX,
        )  # fmt: skip
        sums = tl.sum(tl.reshape(acc, [NL, LINES]), 0)
        if BIASED:
            sums += tl.load(bias + begin + line // BN * INNER + n, n < INNER, 0.0).to(tl.float32)
        if GATED:
            gate, up = tl.split(tl.trans(tl.reshape(sums, [2, BN])))
        else:
            gate, up = sums, sums
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        value = apply_activation(gate, up, KIND, ALPHA, CLAMP)
        tl.store(gated + pair.to(tl.int64) * INNER + n, value.to(gated.dtype.element_ty), n < INNER)


@triton.jit
def down_kernel(
    gated, index, weights, words, top_bits, scales, codebooks, bias, out,
    K: tl.constexpr, E: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, BIASED: tl.constexpr, KB: tl.constexpr,
    BN: tl.constexpr, NL: tl.constexpr, DEPTH: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out (T, H): BN values of one token, the weighted sum of its experts, KB at a time in their order.

    gated (T K, I), index and weights (T, K), codebooks (E, 16), read if TABLE, bias (E, H). Without an
    expert, gated is not read.
    """
    C: tl.constexpr = 4 if BITS == 8 else (8 if BITS == 4 else 16)
    GROUPS: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP
    wait_for_previous(DEPENDENT)
    stride: tl.constexpr = GROUPS * (GROUP // C)
    token = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([NL, KB, BN], tl.float32)
    biases = tl.zeros([KB, BN], tl.float32)
    for first in range(0, K, KB):
        k = first + tl.arange(0, KB)
        expert = tl.load(index + token * K + k)
        known = (expert >= 0) & (expert < E)
        weight = tl.where(known, tl.load(weights + token * K + k).to(tl.float32), 0.0)
        row = (expert * ROWS)[None, :, None] + n[None, None, :]  # int64
        row_mask = known[None, :, None] & (n < ROWS)[None, None, :]
        acc = _row_products(
            words + row * stride, top_bits + row * stride, scales + row * GROUPS,
            codebooks + (tl.where(known, expert, 0) * 16)[None, :, None],
            gated + ((token * K + k).to(tl.int64) * COLUMNS)[None, :, None], words,
            row_mask, known[None, :, None], tl.zeros([NL, KB, BN], tl.float32),
            COLUMNS, GROUP, BITS, NL, DEPTH, False, False, TABLE, PTX,
        )  # fmt: skip
        total += acc * weight[None, :, None]
        if BIASED:
            at = (expert * ROWS)[:, None] + n[None, :]
            mask = known[:, None] & (n < ROWS)[None, :]
            biases += tl.load(bias + at, mask, 0.0).to(tl.float32) * weight[:, None]
    value = tl.sum(tl.reshape(total, [NL * KB, BN]), 0)
    if BIASED:
        value += tl.sum(biases, 0)
    tl.store(out + token.to(tl.int64) * ROWS + n, value.to(out.dtype.element_ty), n < ROWS)
