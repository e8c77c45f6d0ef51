"""One expert's products for a few tokens, block by block of its weights; compiled, and called without
Python's lock. A block is one thread's piece of work; who takes which is the worker's business.

Weights are read once, straight from the expert's record in 16 bits, and multiplied as float32: the products
are exact, sums are float32, and gate and up are rounded to 16 bits where the GPU's kernels round them. Sums
run in another order than there. Dimension letters: H hidden, I intermediate.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from localmoe.kernels.cpu.atoms import rounded, value

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai")  # in the order of the codes below
# sums may be cut into vectors; infinities and NaNs keep their meaning
_FAST = {"reassoc", "contract", "nsz"}


@njit(nogil=True, fastmath=_FAST, cache=True)
def _dots_1(a: Any, b: Any, x: Any, length: int) -> Any:
    a0 = np.float32(0)
    b0 = np.float32(0)
    for k in range(length):
        a0 += value(a[k]) * x[k]
        b0 += value(b[k]) * x[k]
    return a0, b0


@njit(nogil=True, fastmath=_FAST, cache=True)
def _dots_2(a: Any, b: Any, x: Any, y: Any, length: int) -> Any:
    a0 = a1 = np.float32(0)
    b0 = b1 = np.float32(0)
    for k in range(length):
        p, q = value(a[k]), value(b[k])
        a0 += p * x[k]
        a1 += p * y[k]
        b0 += q * x[k]
        b1 += q * y[k]
    return a0, a1, b0, b1


@njit(nogil=True, fastmath=_FAST, cache=True)
def _dots_4(a: Any, b: Any, x: Any, y: Any, z: Any, w: Any, length: int) -> Any:
    a0 = a1 = a2 = a3 = np.float32(0)
    b0 = b1 = b2 = b3 = np.float32(0)
    for k in range(length):
        p, q = value(a[k]), value(b[k])
        a0 += p * x[k]
        a1 += p * y[k]
        a2 += p * z[k]
        a3 += p * w[k]
        b0 += q * x[k]
        b1 += q * y[k]
        b2 += q * z[k]
        b3 += q * w[k]
    return a0, a1, a2, a3, b0, b1, b2, b3


@njit(nogil=True, fastmath=_FAST, cache=True)
def dots(a: Any, b: Any, x: Any, rows: Any, length: int, into_a: Any, into_b: Any) -> None:
    """into_a[i] = a . x[rows[i]] and the same for b, over the first `length` elements, for all i."""
    i = 0
    count = rows.shape[0]
    while i + 4 <= count:
        r = _dots_4(a, b, x[rows[i]], x[rows[i + 1]], x[rows[i + 2]], x[rows[i + 3]], length)
        into_a[i], into_a[i + 1], into_a[i + 2], into_a[i + 3] = r[0], r[1], r[2], r[3]
        into_b[i], into_b[i + 1], into_b[i + 2], into_b[i + 3] = r[4], r[5], r[6], r[7]
        i += 4
    if i + 2 <= count:
        s = _dots_2(a, b, x[rows[i]], x[rows[i + 1]], length)
        into_a[i], into_a[i + 1] = s[0], s[1]
        into_b[i], into_b[i + 1] = s[2], s[3]
        i += 2
    if i < count:
        t = _dots_1(a, b, x[rows[i]], length)
        into_a[i], into_b[i] = t[0], t[1]


@njit(nogil=True, fastmath=_FAST, cache=True)
def _add_scaled(into: Any, row: Any, factor: Any) -> None:
    for j in range(into.shape[0]):
        into[j] += value(row[j]) * factor


@njit(nogil=True, cache=True)
def columns(
    weights: Any, width: int, first: int, count: int, x: Any, row: int, length: int, into: Any
) -> None:
    """into[j] = sum over k < length of x[row, k] * weights[k, first + j] for j < count, of a matrix of
    `width` columns."""
    into[:count] = np.float32(0)
    for k in range(length):
        at = k * width + first
        _add_scaled(into[:count], weights[at : at + count], x[row, k])


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def gate_up_block(
    weights: Any, bias: Any, hidden: int, inner: int, transposed: bool, interleaved: bool,
    kind: int, alpha: Any, limit: Any, first: int, last: int,
    x: Any, rows: Any, pairs: Any, out: Any, scratch: Any,
) -> None:  # fmt: skip
    """out[pair, i] = act(gate) * up, rounded to 16 bits, for inner columns first <= i < last.

    Args:
        weights: 16-bit words of gate_up, (2I, H), or (H, 2I) if transposed. bias: words (2I,), or empty.
        x: float32 (T, H). rows, pairs: int32 (n,), each pair's token and its row of `out`.
        scratch: float32 (2, at least n) and (2, at least 2 * (last - first)).
    """
    if transposed:
        for n in range(rows.shape[0]):
            if interleaved:
                columns(weights, 2 * inner, 2 * first, 2 * (last - first), x, rows[n], hidden, scratch[0])
            else:
                columns(weights, 2 * inner, first, last - first, x, rows[n], hidden, scratch[0])
                columns(weights, 2 * inner, inner + first, last - first, x, rows[n], hidden, scratch[1])
            for i in range(first, last):
                j = i - first
                gate = scratch[0, 2 * j] if interleaved else scratch[0, j]
                up = scratch[0, 2 * j + 1] if interleaved else scratch[1, j]
                _finish(gate, up, i, inner, bias, interleaved, kind, alpha, limit, out, pairs[n], weights[0])
        return
    for i in range(first, last):
        g = 2 * i if interleaved else i
        u = 2 * i + 1 if interleaved else inner + i
        a, b = weights[g * hidden : (g + 1) * hidden], weights[u * hidden : (u + 1) * hidden]
        dots(a, b, x, rows, hidden, scratch[0], scratch[1])
        for n in range(rows.shape[0]):
            _finish(
                scratch[0, n], scratch[1, n], i, inner, bias, interleaved, kind, alpha, limit, out, pairs[n],
                weights[0],
            )  # fmt: skip


@njit(nogil=True, cache=True)
def _finish(
    gate: Any, up: Any, i: int, inner: int, bias: Any, interleaved: bool, kind: int, alpha: Any, limit: Any,
    out: Any, pair: int, like: Any,
) -> None:  # fmt: skip
    if bias.shape[0] > 0:
        gate += value(bias[2 * i if interleaved else i])
        up += value(bias[2 * i + 1 if interleaved else inner + i])
    out[pair, i] = rounded(activate(gate, up, kind, alpha, limit), like)


@njit(nogil=True, cache=True)
def down_block(
    weights: Any, bias: Any, hidden: int, inner: int, share: int, transposed: bool, first: int, last: int,
    x: Any, pairs: Any, out: Any, scratch: Any,
) -> None:  # fmt: skip
    """out[pair, h] = sum over i < share of x[pair, i] * down[h, i], float32, for first <= h < last; the bias
    comes with the whole sum only (share = I).

    Args:
        weights: 16-bit words of down, (H, I), or (I, H) if transposed. bias: words (H,), or empty.
        x: float32 (P, I). pairs: int32 (n,), rows of x and `out`.
        scratch: float32 (2, at least max(n, last - first)).
    """
    if transposed:
        for n in range(pairs.shape[0]):
            columns(weights, hidden, first, last - first, x, pairs[n], share, scratch[0])
            for h in range(first, last):
                out[pairs[n], h] = scratch[0, h - first]
    else:
        h = first
        while h < last:
            other = min(h + 1, last - 1)  # rows go in twos; a lone one is its own partner
            a, b = weights[h * inner : h * inner + share], weights[other * inner : other * inner + share]
            dots(a, b, x, pairs, share, scratch[0], scratch[1])
            for n in range(pairs.shape[0]):
                out[pairs[n], h] = scratch[0, n]
                out[pairs[n], other] = scratch[1, n]
            h += 2
    if bias.shape[0] > 0 and share == inner:
        for n in range(pairs.shape[0]):
            for h in range(first, last):
                out[pairs[n], h] += value(bias[h])
