"""One expert's products for a few tokens, block by block of its weights; compiled, and called without
Python's lock. A block is one thread's piece of work; who takes which is the worker's business.

Weights are read from memory once, straight from the expert's record in 16 bits: the products are exact, sums
are float32, and gate and up are rounded to 16 bits where the GPU's kernels round them. Sums run in another
order than there. Dimension letters: H hidden, I intermediate.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from localmoe.kernels.cpu.atoms import compiled, kept, value
from localmoe.kernels.cpu.column_tiles import COLUMNS, columns_1, columns_2, columns_4
from localmoe.kernels.cpu.column_tiles import MOST_TOKENS as MOST_COLUMN_TOKENS
from localmoe.kernels.cpu.dot_tiles import MOST_TOKENS, dots_1, dots_2, dots_4
from localmoe.kernels.cpu.processor import HAS_BF16_DOTS

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai")  # in the order of the codes below
# sums may be cut into vectors; infinities and NaNs keep their meaning
_FAST = {"reassoc", "contract", "nsz"}


def activations_kind(is_bfloat: bool, transposed: bool) -> type[np.generic]:
    """What a job's activations are kept as: words where they are bfloat16 and the processor multiplies such
    words as they are."""
    return np.uint16 if is_bfloat and not transposed and HAS_BF16_DOTS else np.float32


@compiled
def dots(
    weights: Any, a: int, b: int, step: int, ahead: int, x: Any, rows: Any, length: int, out: Any
) -> None:
    """out[r, i] = sum over k < length of row r * x[rows[i], k], for all i; the four rows of weights are
    those at the addresses a, a + step, b, b + step. ahead: see dot_tiles."""
    base, pitch, at, into = x.ctypes.data, x.strides[0], rows.ctypes.data, out.ctypes.data
    count, i = rows.shape[0], 0
    while i + 4 <= count and MOST_TOKENS >= 4:
        dots_4(weights, x, a, b, step, ahead, base, pitch, at + 4 * i, length, into + 4 * i, out.strides[0])
        i, ahead = i + 4, 0
    while i + 2 <= count:
        dots_2(weights, x, a, b, step, ahead, base, pitch, at + 4 * i, length, into + 4 * i, out.strides[0])
        i, ahead = i + 2, 0
    if i < count:
        dots_1(weights, x, a, b, step, ahead, base, pitch, at + 4 * i, length, into + 4 * i, out.strides[0])


@njit(nogil=True, fastmath=_FAST, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def add_scaled(into: Any, row: Any, factor: Any) -> None:
    """into += row * factor, of vectors of equal length."""
    for j in range(into.shape[0]):
        into[j] += value(row[j]) * factor


@compiled
def columns(
    weights: Any, width: int, first: int, count: int, x: Any, rows: Any, length: int, into: Any
) -> None:
    """into[i, j] = sum over k < length of x[rows[i], k] * weights[k, first + j] for j < count, of a matrix of
    `width` columns (16-bit words or float32), for as many rows as one of the tiles takes."""
    base, pitch, at, tokens = x.ctypes.data, x.strides[0], rows.ctypes.data, rows.shape[0]
    out, size, j = into.ctypes.data, weights.itemsize, 0
    stride = size * width
    while j + COLUMNS <= count:
        here = weights.ctypes.data + size * (first + j)
        if tokens == 4:
            columns_4(weights, here, stride, base, pitch, at, length, out + 4 * j, into.strides[0])
        elif tokens == 2:
            columns_2(weights, here, stride, base, pitch, at, length, out + 4 * j, into.strides[0])
        else:
            columns_1(weights, here, stride, base, pitch, at, length, out + 4 * j, into.strides[0])
        j += COLUMNS
    if j < count:
        for i in range(tokens):
            for c in range(j, count):  # numba compiles an assignment of slices for seconds
                into[i, c] = np.float32(0)
        for k in range(length):
            start = k * width + first
            for i in range(tokens):
                add_scaled(into[i, j:count], weights[start + j : start + count], x[rows[i], k])


@compiled
def some(left: int) -> int:
    """How many of `left` tokens the next of the tiles over columns takes."""
    if left >= 4 and MOST_COLUMN_TOKENS >= 4:
        return 4
    return 2 if left >= 2 else 1


@compiled
def activate(gate: Any, up: Any, kind: int, alpha: Any, limit: Any) -> Any:
    """act(gate) * up in float32, as kernels.activations.Activation.apply."""
    one = np.float32(1)
    if gate > limit:
        gate = limit
    if up > limit:
        up = limit
    elif up < -limit:
        up = -limit
    if kind == 0:
        return gate / (one + np.float32(math.exp(-gate))) * up
    if kind == 1:
        return (
            gate * np.float32(0.5) * (one + np.float32(math.erf(gate * np.float32(0.7071067811865476)))) * up
        )
    if kind == 2:
        z = np.float32(0.7978845608028654) * (gate + np.float32(0.044715) * gate * gate * gate)
        return gate / (one + np.float32(math.exp(np.float32(-2) * z))) * up
    if kind == 3:
        return max(gate, np.float32(0)) * up
    return gate / (one + np.float32(math.exp(-gate * alpha))) * (up + one)


@compiled
def gate_up_columns(
    weights: Any, bias: Any, hidden: int, inner: int, matrices: int, interleaved: bool, kind: int, alpha: Any,
    limit: Any, first: int, last: int, x: Any, rows: Any, pairs: Any, out: Any, scratch: Any, like: Any,
) -> None:  # fmt: skip
    """As gate_up_rows, of words (H, 2I) or (H, I)."""
    size, n = last - first, 0
    to_up = size if matrices == 2 else 0
    while n < rows.shape[0]:
        together = some(rows.shape[0] - n)
        these = rows[n : n + together]
        for part in range(1 if interleaved else matrices):
            begin, count = (2 * first, 2 * size) if interleaved else (part * inner + first, size)
            columns(weights, matrices * inner, begin, count, x, these, hidden, scratch[:, part * size :])
        for t in range(together):
            for j in range(size):
                gate = scratch[t, 2 * j] if interleaved else scratch[t, j]
                up = scratch[t, 2 * j + 1] if interleaved else scratch[t, to_up + j]
                finish(
                    gate, up, first + j, (matrices - 1) * inner, bias, interleaved, kind, alpha, limit, out,
                    pairs[n + t], first + j, like,
                )  # fmt: skip
        n += together


@compiled
def gate_up_rows(
    weights: Any, bias: Any, hidden: int, inner: int, matrices: int, interleaved: bool, kind: int, alpha: Any,
    limit: Any, first: int, last: int, after: int, x: Any, rows: Any, pairs: Any, out: Any, scratch: Any,
    like: Any,
) -> None:  # fmt: skip
    """out[pair, i] = act(gate) * up, rounded to the kind of `like`, for inner columns first <= i < last.

    Args:
        after: the inner column that is likely to be read next.
        weights: 16-bit words of gate_up, (2I, H). bias: numbers (2I,) of the activations' kind, or empty.
        matrices: 2; 1 without a gate, where there are I rows, each of which is gate and up at once.
        x: (T, H), 16-bit words where dot_tiles wants them, else float32. rows, pairs: int32 (n,), each pair's
            token and its row of `out`.
        out: (P, I) of x's kind.
        scratch: float32 (4, at least n and 2 * (last - first)).
        like: a number of the kind that the model computes in, see atoms.kept.
    """
    base, row = weights.ctypes.data, 2 * hidden  # bytes of a row
    step, to_up = (2 * row, row) if interleaved else (row, inner * row)
    together = 2 if matrices == 2 else 4
    for i in range(first, last, together):
        left = last - i
        one = 1 if left > 1 else 0
        if matrices == 1:  # of fewer than four rows some are done twice
            one = 1 if left > 2 else 0
            to_up = row * (2 if left > 3 else min(left - 1, 1))
        at = base + i * step
        ahead = together * step if left > together else (after - i) * step
        dots(weights, at, at + to_up, one * step, ahead, x, rows, hidden, scratch)
        for n in range(rows.shape[0]):
            if matrices == 2:
                for r in range(1 + one):
                    finish(
                        scratch[r, n], scratch[2 + r, n], i + r, inner, bias, interleaved, kind, alpha, limit,
                        out, pairs[n], i + r, like,
                    )  # fmt: skip
            else:
                for r in range(4):
                    j, both = i + r // 2 * (to_up // row) + r % 2 * one, scratch[r, n]
                    finish(
                        both, both, j, 0, bias, False, kind, alpha, limit, out, pairs[n], j, like
                    )  # fmt: skip


@compiled
def activated(
    gate: Any, up: Any, i: int, to_up: int, bias: Any, interleaved: bool, kind: int, alpha: Any, limit: Any
) -> Any:
    """Inner column i of a pair from its two sums, in float32. to_up: from gate's biases to up's."""
    if bias.shape[0] > 0:
        gate += value(bias[2 * i if interleaved else i])
        up += value(bias[2 * i + 1 if interleaved else to_up + i])
    return activate(gate, up, kind, alpha, limit)


@compiled
def finish(
    gate: Any, up: Any, i: int, to_up: int, bias: Any, interleaved: bool, kind: int, alpha: Any, limit: Any,
    out: Any, pair: int, at: int, like: Any,
) -> None:  # fmt: skip
    """The same, rounded, into out[pair, at]. like: see gate_up_rows."""
    out[pair, at] = kept(activated(gate, up, i, to_up, bias, interleaved, kind, alpha, limit), like, out)


@compiled
def down_columns(
    weights: Any, bias: Any, hidden: int, share: int, first: int, last: int, x: Any, pairs: Any, out: Any,
    scratch: Any,
) -> None:  # fmt: skip
    """As down_rows, of words (I, H)."""
    n = 0
    while n < pairs.shape[0]:
        together = some(pairs.shape[0] - n)
        columns(weights, hidden, first, last - first, x, pairs[n : n + together], share, scratch)
        for t in range(together):
            for h in range(first, last):
                out[pairs[n + t], h] = scratch[t, h - first]
        n += together
    add_bias(bias, first, last, pairs, out)


@compiled
def down_rows(
    weights: Any, bias: Any, inner: int, share: int, first: int, last: int, after: int, x: Any, pairs: Any,
    out: Any, scratch: Any,
) -> None:  # fmt: skip
    """out[pair, h] = sum over i < share of x[pair, i] * down[h, i], float32, for first <= h < last.

    Args:
        after: the row that is likely to be read next.
        weights: 16-bit words of down, (H, I), or float32. bias: numbers (H,) of the activations' kind, or
            empty.
        x: (P, I), what gate_up put out. pairs: int32 (n,), rows of x and `out`.
        scratch: float32 (4, at least n and last - first).
    """
    row = weights.itemsize * inner  # bytes
    for h in range(first, last, 4):  # rows go in fours; of fewer some are done twice
        left = last - h
        one = 1 if left > 2 else 0
        other = 2 if left > 3 else min(left - 1, 1)
        at = weights.ctypes.data + h * row
        ahead = 4 * row if left > 4 else (after - h) * row
        dots(weights, at, at + other * row, one * row, ahead, x, pairs, share, scratch)
        for n in range(pairs.shape[0]):
            for r in range(4):
                out[pairs[n], h + other * (r // 2) + one * (r % 2)] = scratch[r, n]
    add_bias(bias, first, last, pairs, out)


@compiled
def add_bias(bias: Any, first: int, last: int, pairs: Any, out: Any) -> None:
    """Add columns first <= h < last of `bias`, unless it is empty, to each pair's row of `out`."""
    for n in range(pairs.shape[0] if bias.shape[0] > 0 else 0):
        for h in range(first, last):
            out[pairs[n], h] += value(bias[h])
