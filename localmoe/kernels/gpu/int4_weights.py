"""Device code that reads tiles of a matrix of four-bit integers (kernels.int4_tiles) and multiplies with
them. An integer less its zero point is a bfloat16 number, and the sum of the columns that share a scale is
multiplied by it, so no weight is rounded, here as on the CPU. Decides nothing.

Dimension letters: R rows and C columns of a matrix, N rows of a block, M rows of the other factor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localmoe.kernels.gpu.bf12_weights import dot

_STRIP = tl.constexpr(16)  # rows
# A code in the mantissa of 128 is 128 more than it is; what is subtracted is 128 more than the zero point.
_PAIRS = tl.constexpr(
    "{ .reg .b32 a, one; mov.b32 one, 0x3F803F80;"
    " lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, a, one, $5;"
    " shr.b32 a, $4, 4; lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $1, a, one, $5;"
    " shr.b32 a, $4, 8; lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $2, a, one, $5;"
    " shr.b32 a, $4, 12; lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $3, a, one, $5; }"
)


@triton.jit
def scale_places(n, C: tl.constexpr, SPAN: tl.constexpr):
    """Where the words (N,) beside rows n begin; that for column c is c // SPAN * 16 further."""
    return n // _STRIP * (_STRIP * ((C + SPAN - 1) // SPAN)) + n % _STRIP


@triton.jit
def _pair(codes, zero, j: tl.constexpr):
    """As _PAIRS, in plain code: bits of the j-th pair, the one in the lower half first."""
    v = codes >> (4 * j)
    low, high = ((v & 15) - zero).to(tl.float32), (((v >> 16) & 15) - zero).to(tl.float32)
    low_bits = (low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF  # exact: the rest is zeros
    return low_bits | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def decode(codes, zeros, PTX: tl.constexpr):
    """bfloat16 (N, 8 W) of codes, int32 (N, W), less their zero points, likewise."""
    if PTX:
        less = (zeros + 0xC300) * 0x10001  # -128 and the zero point less, in both halves
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            _PAIRS, "=&r,=&r,=&r,=&r,r,r", [codes, less], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
        )
    else:
        p0, p1, p2, p3 = (
            _pair(codes, zeros, 0), _pair(codes, zeros, 1), _pair(codes, zeros, 2), _pair(codes, zeros, 3)
        )  # fmt: skip
    rows: tl.constexpr = codes.shape[0]
    width: tl.constexpr = 4 * codes.shape[1]
    pairs = tl.reshape(tl.join(tl.join(p0, p2), tl.join(p1, p3)), (rows, width))
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.interleave(low, high)


@triton.jit
def _scale(words):
    """float32 of a word's scale."""
    return (words & -32).to(tl.float32, bitcast=True)


@triton.jit
def add(acc, a, codes, words, PTX: tl.constexpr):
    """acc (M, N) and a (M, 8 W) times codes, int32 (N, W), of which all columns share a word (N,)."""
    zeros = tl.broadcast_to((words & 31)[:, None], codes.shape)
    found = dot(a, tl.trans(decode(codes, zeros, PTX)), tl.zeros(acc.shape, tl.float32), PTX)
    return acc + found * _scale(words)[None, :]
