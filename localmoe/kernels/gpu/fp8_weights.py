"""Device code that reads tiles of a matrix in FP8 (kernels.fp8_tiles) and multiplies with them. Codes are
bfloat16 numbers, and the sum of 64 columns is multiplied by their scale, so no weight is rounded, here as on
the CPU. Decides nothing.

Dimension letters: R rows and C columns of a matrix, N rows of a block, M rows of the other factor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localmoe.kernels.gpu.bf12_weights import dot

_STRIP = tl.constexpr(16)  # rows
_WORDS = tl.constexpr(16)  # of a row in a tile
_TILE = tl.constexpr(256)  # words
# A code's exponent and mantissa are put where those of a bfloat16 end and begin, and raised by 2^120; -0 adds
# nothing to any zero.
_PAIRS = tl.constexpr(
    "{ .reg .b32 a, b, up, none, zero;"
    " mov.b32 up, 0x7B807B80; mov.b32 none, 0x80008000; mov.b32 zero, 0;"
    " prmt.b32 a, $2, zero, 0x1404; shr.b32 b, a, 4; and.b32 b, b, 0x07F007F0;"
    " lop3.b32 a, a, 0x80008000, b, 0xEA; fma.rn.bf16x2 $0, a, up, none;"
    " prmt.b32 a, $2, zero, 0x3424; shr.b32 b, a, 4; and.b32 b, b, 0x07F007F0;"
    " lop3.b32 a, a, 0x80008000, b, 0xEA; fma.rn.bf16x2 $1, a, up, none; }"
)


@triton.jit
def code_places(n, C: tl.constexpr):
    """Where the words (N, 16) of rows n are, of columns 0 to 64; those of columns from c on, a multiple of
    64, are 4 c words further."""
    at = n // _STRIP * (_STRIP * C // 4) + n % _STRIP * _WORDS
    return at[:, None] + tl.arange(0, _WORDS)[None, :]


@triton.jit
def scale_places(n, C: tl.constexpr):
    """Where the scales (N,) of rows n are, for the first columns; those for column c are c // 128 * 16
    further."""
    groups: tl.constexpr = (C + 127) // 128
    return n // _STRIP * (_STRIP * groups) + n % _STRIP


@triton.jit
def _bits(codes, j: tl.constexpr):
    """As _PAIRS, in plain code: of the j-th code a bfloat16's bits."""
    code = (codes >> (8 * j)) & 255
    number = (((code & 127) << 20) | ((code & 128) << 24)).to(tl.float32, bitcast=True)
    return ((number * 1.329227995784916e36).to(tl.int32, bitcast=True) >> 16) & 0xFFFF  # 2^120


@triton.jit
def decode(codes, PTX: tl.constexpr):
    """bfloat16 (N, 64) of codes, int32 (N, 16)."""
    if PTX:
        p0, p1 = tl.inline_asm_elementwise(_PAIRS, "=&r,=&r,r", [codes], (tl.int32, tl.int32), True, 1)
    else:
        p0, p1 = _bits(codes, 0) | (_bits(codes, 1) << 16), _bits(codes, 2) | (_bits(codes, 3) << 16)
    rows: tl.constexpr = codes.shape[0]
    pairs = tl.reshape(tl.join(p0, p1), (rows, 32))
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.interleave(low, high)


@triton.jit
def add(acc, a, codes, scales, PTX: tl.constexpr):
    """acc (M, N) and a (M, 64) times codes, int32 (N, 16), times their scales, bits of float32 (N,)."""
    found = dot(a, tl.trans(decode(codes, PTX)), tl.zeros(acc.shape, tl.float32), PTX)
    return acc + found * scales.to(tl.float32, bitcast=True)[None, :]
